"""How many artifacts `artifact rebuild` makes again bit for bit: zoo models in several precisions, shapes and targets.

    python -m benchmarks.artifacts.count_rebuilds [--db URL] [--results FILE] [--cpu TARGET]
    python -m benchmarks.artifacts.count_rebuilds --keep FOLDER     # on one machine
    python -m benchmarks.artifacts.count_rebuilds --kept FOLDER     # on another one, where FOLDER was copied

Each is compiled, then made again from its manifest (and the database, where one is given). Artifacts for a target that
is not here are compared by the hashes of kernels and weights, the others by their outputs, too, with the bits that the
first machine noted in FOLDER.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import tempfile
import time
from pathlib import Path

import relaxtune
from benchmarks.this_run import run_facts
from relaxtune.api import ModelOptions
from relaxtune.pipeline.artifact.module import Module
from relaxtune.pipeline.errors import ArtifactError, PipelineError
from relaxtune.pipeline.registry.rebuild import rebuild_artifact
from relaxtune.pipeline.validate.builds import reference_model
from relaxtune.pipeline.validate.validation import sample_inputs

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


NOTED = "outputs.json"


def main() -> None:
    """Compile and make again, print a line each and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--db", default=None, help="records to compile from")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--cpu", default="llvm", help="the target of the CPU's artifacts: one that both machines run")
    parser.add_argument("--keep", type=Path, default=None, help="leave artifacts and hashes of their outputs here")
    parser.add_argument("--kept", type=Path, default=None, help="make those again that are here, not new ones")
    asked = parser.parse_args()
    found = []
    for number, (model, options) in enumerate(CASES):
        given: ModelOptions = {**options, "target": asked.cpu} if options["target"] == "llvm" else options
        with tempfile.TemporaryDirectory() as temporary:
            folder = (asked.keep or asked.kept or Path(temporary)) / f"{number:02}"
            folder.mkdir(parents=True, exist_ok=True)
            entry: dict[str, object] = {"model": model, "options": {k: str(v) for k, v in given.items()}}
            try:
                if asked.kept is None:
                    relaxtune.compile(model, folder / "artifact", database=asked.db, samples=0, **given)
                if asked.keep is not None:
                    (folder / NOTED).write_text(json.dumps(output_hashes(folder / "artifact")))
                else:
                    entry |= made_again(folder, Path(temporary) / "again", asked.db)
            except PipelineError as error:
                entry |= {"same": False, "error": str(error)[:300]}
        found.append(entry)
        print(number, entry, flush=True)
    if asked.keep is not None:
        return
    same = sum(entry["same"] is True for entry in found)
    document = {"machine": run_facts(), "artifacts": len(found), "same": same, "cases": found}
    asked.results.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    print(f"{same} of {len(found)} are the same")


def made_again(folder: Path, again: Path, database: str | None) -> dict[str, object]:
    """Return how an artifact compares with the one that is made of its manifest."""
    began = time.monotonic()
    made = rebuild_artifact(folder / "artifact", again, database=database)
    noted = folder / NOTED
    told = json.loads(noted.read_text()) if noted.exists() else None
    here = output_hashes(again)
    elsewhere = None if not told or not here else told == here
    return {
        "same": made.same and elsewhere is not False,
        "kernels": made.kernels,
        "outputs_compared": None if made.outputs is None else len(made.outputs),
        "outputs_as_noted_elsewhere": elsewhere,
        "files_with_other_bytes": [name for name, same in made.same_files.items() if not same],
        "changed": [f"{one.subject}: {one.field}" for one in made.changed],
        "seconds": round(time.monotonic() - began, 2),
    }


def output_hashes(directory: Path) -> dict[str, str]:
    """Return the sha256 of each output on inputs of one seed; none for a target that is not here."""
    try:
        module = Module.load(directory)
    except ArtifactError:
        return {}
    (inputs,) = sample_inputs(reference_model(module), samples=1, seed=0)
    return {name: hashlib.sha256(array.tobytes()).hexdigest() for name, array in module.run(inputs).items()}


if __name__ == "__main__":
    main()
