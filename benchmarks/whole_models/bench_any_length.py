"""One symbolic artifact at several lengths, beside a static artifact for each and ONNX Runtime, on this CPU.

    python -m benchmarks.whole_models.bench_any_length [MODEL ...] [--lengths 16,50,128,256,384] [--batch 1] [--runs 20]

The arms take turns in one run, with as many threads each. `minilm` has the sizes of all-MiniLM-L6-v2 and random
weights, like the models of the zoo. All kernels are those of the default schedules; every artifact is validated against
ONNX Runtime before it is timed. Raw values go to `benchmarks/results/cpu-any-length.json`.
"""

from __future__ import annotations

import argparse
import datetime
import json
import tempfile
from dataclasses import replace
from pathlib import Path

import onnx

from relaxtune.models import OnnxModel, load_model
from relaxtune.models.inference import check_and_infer
from relaxtune.models.inputs import unpadded_inputs
from relaxtune.models.zoo.bert import build_bert
from relaxtune.models.zoo.graph import Precision
from relaxtune.models.zoo.presets import get_preset
from relaxtune.pipeline.artifact.runtime import Module
from relaxtune.pipeline.bench.measure import (
    ORT_ARM,
    BenchmarkReport,
    measure,
    module_arm,
    onnxruntime_arms,
    run_conditions,
)
from relaxtune.pipeline.environment import cpu_name
from relaxtune.pipeline.jobs import compile_model
from relaxtune.pipeline.prepare import ModelRequest
from relaxtune.pipeline.threads import configure_threads

RESULTS = Path(__file__).parents[1] / "results" / "cpu-any-length.json"
MODELS = ("bert-base", "minilm", "gpt2-small")
SYMBOLIC, STATIC, PEER = "symbolic", "static", "ONNX Runtime"


def main() -> None:
    """Measure each model at each length, print ratios and write the raw values."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", default=list(MODELS), help=f"of {', '.join(MODELS)}, or any of the zoo")
    parser.add_argument("--lengths", default="16,50,128,256,384", type=lambda text: [*map(int, text.split(","))])
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--runs", type=int, default=20)
    arguments = parser.parse_args()
    configure_threads()
    entries = []
    print(f"{'model':12} {'length':>6} {SYMBOLIC:>10} {STATIC:>10} {PEER:>13} {'/ static':>9} {'/ peer':>7}  spreads")
    with tempfile.TemporaryDirectory() as folder:
        for name in arguments.models:
            entries += measure_model(name, arguments.lengths, arguments.batch, arguments.runs, Path(folder))
    document = {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "cpu": cpu_name(),
        "batch": arguments.batch,
        "entries": entries,
    }
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


def measure_model(name: str, lengths: list[int], batch: int, runs: int, folder: Path) -> list[dict[str, object]]:
    """Print how one model does at each length, and return the raw values."""
    source = model_file(name, folder)
    symbolic = load_model(source, shapes=shapes(source, "batch", "sequence"))
    module = compiled(source, "batch", "sequence", folder / f"{name}-symbolic")
    entries: list[dict[str, object]] = []
    for length in lengths:
        inputs = unpadded_inputs(load_model(source, shapes=shapes(source, batch, length)), seed=0)
        static = compiled(source, batch, length, folder / f"{name}-{length}")
        report = measure(
            {
                SYMBOLIC: module_arm(module, inputs),
                STATIC: module_arm(static, inputs),
                PEER: onnxruntime_arms(symbolic, inputs)[ORT_ARM],
            },
            runs=runs,
            conditions=run_conditions(module),
        )
        print_row(name, length, report)
        entries.append({"model": name, "length": length, "report": report.to_json()})
    return entries


def print_row(name: str, length: int, report: BenchmarkReport) -> None:
    """Print the medians, what the symbolic artifact takes of the others' time, and the spreads."""
    own, static, peer = (report.arm(arm) for arm in (SYMBOLIC, STATIC, PEER))
    times = f"{own.median_ms:7.2f} ms {static.median_ms:7.2f} ms {peer.median_ms:10.2f} ms"
    ratios = f"{own.median_ms / static.median_ms:9.2f} {own.median_ms / peer.median_ms:7.2f}"
    spreads = " ".join(f"{arm.spread:.0%}" for arm in (own, static, peer))
    print(f"{name:12} {length:6} {times} {ratios}  {spreads}", flush=True)


def model_file(name: str, folder: Path) -> str:
    """Return a name of the zoo, or the file of a model that it does not have."""
    if name != "minilm":
        return name
    config = replace(get_preset("bert-base").config, layers=6, hidden=384, ffn=1536)  # type: ignore[type-var]
    proto = build_bert(name, config, {"batch": "batch", "sequence": "sequence"}, Precision.FP32, 0)
    check_and_infer(proto)
    path = folder / f"{name}.onnx"
    onnx.save(proto, path)
    return str(path)


def shapes(source: str, batch: int | str, length: int | str) -> dict[str, tuple[int | str, int | str]]:
    """Return the shapes of all inputs, which are integers [batch, sequence]."""
    model: OnnxModel = load_model(source)
    return {spec.name: (batch, length) for spec in model.inputs}


def compiled(source: str, batch: int | str, length: int | str, directory: Path) -> Module:
    """Return a model compiled without records, which has passed its validation."""
    request = ModelRequest(source, shapes=shapes(source, batch, length), target="llvm")
    result = compile_model(request, directory, samples=1)
    if result.validation is None or not result.validation.passed:
        raise SystemExit(f"{source} {batch}x{length} failed its validation; nothing was timed")
    return Module.load(directory)


if __name__ == "__main__":
    main()
