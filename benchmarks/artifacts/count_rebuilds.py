"""How many artifacts `artifact rebuild` makes again bit for bit: zoo models in several precisions, shapes and targets.

    python -m benchmarks.artifacts.count_rebuilds [--db URL] [--results FILE]

Each is compiled, then made again from its manifest (and the database, where one is given). Artifacts for a target that
is not here are compared by the hashes of kernels and weights, the others by their outputs, too.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path

import relaxtune
from benchmarks.this_run import run_facts
from relaxtune.api import ModelOptions
from relaxtune.pipeline.errors import PipelineError
from relaxtune.pipeline.registry.rebuild import rebuild_artifact

RESULTS = Path(__file__).parents[1] / "results" / "rebuilds.json"
CASES: tuple[tuple[str, ModelOptions], ...] = (
    ("bert-tiny", {"target": "llvm"}),
    ("bert-tiny", {"target": "llvm", "precision": "w8a16"}),
    ("bert-tiny", {"target": "llvm", "embed_weights": True}),
    ("bert-tiny", {"target": "llvm", "shapes": {"input_ids": (1, "sequence")}, "buckets": {"sequence": (16, 32)}}),
    ("bert-tiny", {"target": "llvm", "shapes": {"input_ids": (1, "sequence")}, "profile": {"sequence": (1, 16, 64)}}),
    ("gpt2-tiny", {"target": "llvm"}),
    ("gpt2-tiny-decode", {"target": "llvm"}),
    ("llama-tiny", {"target": "llvm"}),
    ("llama-tiny-decode", {"target": "llvm"}),
    ("vit-tiny", {"target": "llvm"}),
    ("t5-tiny", {"target": "llvm"}),
    ("bert-tiny", {"target": "cuda:sm_90a", "precision": "fp16"}),
    ("llama-tiny", {"target": "cuda:sm_90a", "precision": "fp16"}),
)


def main() -> None:
    """Compile and make again, print a line each and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--db", default=None, help="records to compile from")
    parser.add_argument("--results", type=Path, default=RESULTS)
    asked = parser.parse_args()
    found = []
    for number, (model, options) in enumerate(CASES):
        with tempfile.TemporaryDirectory() as folder:
            first, again = Path(folder) / "first", Path(folder) / "again"
            entry: dict[str, object] = {"model": model, "options": {k: str(v) for k, v in options.items()}}
            try:
                relaxtune.compile(model, first, database=asked.db, samples=0, **options)
                began = time.monotonic()
                made = rebuild_artifact(first, again, database=asked.db)
                entry |= {
                    "same": made.same,
                    "kernels": made.kernels,
                    "outputs_compared": None if made.outputs is None else len(made.outputs),
                    "files_with_other_bytes": [name for name, same in made.same_files.items() if not same],
                    "changed": [f"{one.subject}: {one.field}" for one in made.changed],
                    "seconds": round(time.monotonic() - began, 2),
                }
            except PipelineError as error:
                entry |= {"same": False, "error": str(error)[:300]}
        found.append(entry)
        print(number, entry, flush=True)
    same = sum(entry["same"] is True for entry in found)
    document = {"machine": run_facts(), "artifacts": len(found), "same": same, "cases": found}
    asked.results.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    print(f"{same} of {len(found)} are the same")


if __name__ == "__main__":
    main()
