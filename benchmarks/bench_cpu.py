"""Compiled zoo models beside ONNX Runtime on this CPU: same inputs, same threads, taking turns in one run.

    python benchmarks/bench_cpu.py [MODEL ...] [--db URL] [--runs 30]

Without --db every kernel takes the fallback schedule: what a user gets untuned. Raw values go to
`benchmarks/results/cpu-MODEL.json` with the machine and the versions.
"""

from __future__ import annotations

import argparse
import datetime
import json
import tempfile
from pathlib import Path

from models import load_model
from models.inputs import random_inputs
from pipeline.environment import cpu_name
from pipeline.jobs import compile_model
from pipeline.measure import ORT_ARM, OWN_ARM, measure_module
from pipeline.prepare import ModelRequest
from pipeline.runtime import Module

RESULTS = Path(__file__).parent / "results"
MODELS = ("bert-tiny", "bert-base", "gpt2-small", "vit-base", "t5-small")


def main() -> None:
    """Compile, validate and measure each model."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", default=MODELS)
    parser.add_argument("--db", help="tuning database to take records from")
    parser.add_argument("--runs", type=int, default=30)
    arguments = parser.parse_args()
    for name in arguments.models:
        with tempfile.TemporaryDirectory() as folder:
            directory = Path(folder) / name
            compiled = compile_model(ModelRequest(name, target="llvm"), directory, database=arguments.db)
            if compiled.validation is None or not compiled.validation.passed:
                raise SystemExit(f"{name} failed its validation; nothing was timed")
            model = load_model(name)
            report = measure_module(Module.load(directory), model, random_inputs(model, seed=0), runs=arguments.runs)
        own, ort = report.arm(OWN_ARM), report.arm(ORT_ARM)
        print(
            f"{name}: relaxtune {own.median_ms:.2f} ms (spread {own.spread:.0%}), ONNX Runtime {ort.median_ms:.2f} ms "
            f"(spread {ort.spread:.0%}), ONNX Runtime / relaxtune {report.ratio(ORT_ARM):.2f}, compiled in "
            f"{sum(compiled.manifest.compile_seconds.values()):.1f} s"
        )
        document = {
            "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "cpu": cpu_name(),
            "model": name,
            "tuned": arguments.db is not None,
            "versions": dict(compiled.manifest.versions),
            "compile_seconds": dict(compiled.manifest.compile_seconds),
            "report": report.to_json(),
        }
        RESULTS.mkdir(exist_ok=True)
        (RESULTS / f"cpu-{name}.json").write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
