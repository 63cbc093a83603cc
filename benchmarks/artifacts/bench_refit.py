"""Refit beside compilation: zoo models in several precisions, bits of the outputs and the time of both.

    python -m benchmarks.artifacts.bench_refit [--target llvm|cuda] [--models bert-tiny ...] [--results FILE]

Each model is compiled with the weights of one seed. Then the weights of another seed come: once by `artifact refit`,
once by compiling. Both artifacts run on the same inputs. Times are without validation, which is the same for both.
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
from relaxtune.pipeline.artifact.module import Module
from relaxtune.pipeline.validate.builds import reference_model
from relaxtune.pipeline.validate.comparison import compare_outputs
from relaxtune.pipeline.validate.validation import sample_inputs

RESULTS = Path(__file__).parents[1] / "results" / "refit.json"
CASES: tuple[tuple[str, ModelOptions], ...] = (
    ("bert-tiny", {}),
    ("bert-tiny", {"precision": "w4a16"}),
    ("gpt2-tiny", {"precision": "fp16"}),
    ("llama-tiny", {"precision": "w8a16"}),
    ("llama-tiny-decode", {"precision": "w4a16"}),
    ("vit-tiny", {}),
    ("t5-tiny", {"precision": "fp16"}),
    ("whisper-tiny", {}),
    ("bert-tiny", {"shapes": {"input_ids": (1, "sequence")}, "buckets": {"sequence": (16, 32)}}),
    ("bert-base", {}),
)


def measure(model: str, options: ModelOptions, folder: Path, target: str) -> dict[str, object]:
    """Return how long both ways took and whether the outputs have the same bits."""
    relaxtune.compile(model, folder / "first", samples=0, target=target, **options)
    began = time.perf_counter()
    relaxtune.compile(model, folder / "compiled", samples=0, target=target, seed=1, **options)
    compiled_s = time.perf_counter() - began
    began = time.perf_counter()
    done = relaxtune.refit(folder / "first", model, folder / "refitted", seed=1, samples=0)
    refit_s = time.perf_counter() - began
    modules = [Module.load(folder / name) for name in ("compiled", "refitted", "first")]
    inputs = sample_inputs(reference_model(modules[1]), samples=2, seed=0)
    compiled, refitted, first = ([module.run(one) for one in inputs] for module in modules)
    return {
        "same_bits": all(one.passed for one in compare_outputs(compiled, refitted, exact=True)),
        "other_than_before": not all(one.passed for one in compare_outputs(first, refitted, exact=True)),
        "weights_changed": len(done.changed),
        "weights_same": len(done.same),
        "weights_mb": round(sum(entry.bytes for entry in done.manifest.files.values()) / 1e6, 1),
        "compile_s": round(compiled_s, 2),
        "refit_s": round(refit_s, 2),
    }


def main() -> None:
    """Measure every case, print a line each and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="llvm")
    parser.add_argument("--models", nargs="+", default=[model for model, _ in CASES])
    parser.add_argument("--commit", default=None, help="where there is no git")
    parser.add_argument("--results", type=Path, default=RESULTS)
    asked = parser.parse_args()
    found = []
    for model, options in (case for case in CASES if case[0] in asked.models):
        with tempfile.TemporaryDirectory() as folder:
            shown = {key: str(value) for key, value in options.items()}
            entry = {"model": model, "options": shown, **measure(model, options, Path(folder), asked.target)}
        found.append(entry)
        print(entry, flush=True)
    facts = run_facts(asked.target)
    machine = {**facts, "commit": asked.commit or facts["commit"]}
    document = {"machine": machine, "target": asked.target, "cases": found}
    asked.results.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
