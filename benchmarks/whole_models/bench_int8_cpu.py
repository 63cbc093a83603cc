"""`--precision int8` of float models on this CPU, beside float32 and ONNX Runtime in float32 and int8.

    python -m benchmarks.whole_models.bench_int8_cpu [MODEL ...] [--sizes 1x16,1x128,8x64] [--runs 20] [--keep DIR]

One symbolic artifact of each precision. The arms take turns in one run, with as many threads each. ONNX Runtime's int8
is of `onnxruntime.quantization.quantize_dynamic` with int8 weights. Models are those of `bench_any_length`. The cosine
is of outputs in int8 with those of ONNX Runtime in float32. `--keep DIR` leaves artifacts there, and takes those that
are there. Raw values go to `benchmarks/results/cpu-int8.json`.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path

import numpy as np
from onnxruntime.quantization import QuantType, quantize_dynamic

from benchmarks.this_run import run_facts
from benchmarks.whole_models.bench_any_length import model_file, shapes
from relaxtune.models import load_model, save_model
from relaxtune.models.inputs import unpadded_inputs
from relaxtune.pipeline.artifact.module import Module
from relaxtune.pipeline.bench.measure import ORT_ARM, Call, measure, module_arm, onnxruntime_peer
from relaxtune.pipeline.bench.tables import run_conditions
from relaxtune.pipeline.jobs.compile_and_tune import compile_model
from relaxtune.pipeline.passes import LoweringOptions
from relaxtune.pipeline.prepare import ModelRequest
from relaxtune.pipeline.tvm_runtime.threads import configure_threads
from relaxtune.pipeline.validate.reference import Reference

RESULTS = Path(__file__).parents[1] / "results" / "cpu-int8.json"
INT8, FLOAT32, PEER_INT8, PEER = "int8", "fp32", "ONNX Runtime int8", "ONNX Runtime fp32"


def main() -> None:
    """Measure each model at each size, print ratios and write the raw values."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", default=["minilm", "bert-base"])
    parser.add_argument("--sizes", default="1x16,1x128,8x64", type=lambda text: [_size(one) for one in text.split(",")])
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--keep", type=Path, help="folder for the artifacts")
    arguments = parser.parse_args()
    configure_threads()
    with tempfile.TemporaryDirectory() as folder:
        entries = [
            entry
            for name in arguments.models
            for entry in measure_model(name, arguments, (arguments.keep or Path(folder)) / name)
        ]
    document = {**run_facts(), "entries": entries}
    RESULTS.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


def measure_model(name: str, arguments: argparse.Namespace, folder: Path) -> list[dict[str, object]]:
    """Print how one model does at each size, and return the raw values."""
    folder.mkdir(parents=True, exist_ok=True)
    source = model_file(name, folder)
    symbolic = shapes(source, "sequence")
    given = load_model(source, shapes=symbolic)
    modules = {precision: compiled(source, symbolic, precision, folder / precision) for precision in (INT8, FLOAT32)}
    smaller = folder / "ort-int8.onnx"
    quantize_dynamic(save_model(given, folder / "given.onnx"), smaller, weight_type=QuantType.QInt8)
    peers = {PEER_INT8: load_model(str(smaller)), PEER: given}
    stored = {arm: sum(file.stat().st_size for file in (folder / arm).iterdir()) for arm in modules}
    entries: list[dict[str, object]] = []
    for batch, length in arguments.sizes:
        sizes = {key: (batch, *shape[1:]) for key, shape in shapes(source, length).items()}
        inputs = unpadded_inputs(load_model(source, shapes=sizes), seed=0)
        report = measure(
            {
                **{arm: module_arm(module, inputs) for arm, module in modules.items()},
                **{arm: onnxruntime_peer(model, [Call(inputs)]).arms[ORT_ARM] for arm, model in peers.items()},
            },
            runs=arguments.runs,
            conditions=run_conditions(modules[INT8]),
            mirrored=True,
        )
        got, expected = modules[INT8].run(inputs), Reference(given).run(inputs)
        cosines = {key: _cosine(got[key], value) for key, value in expected.items()}
        own, *others = report.arms
        ratios = "  ".join(f"{arm.name} {arm.median_ms:.2f} ms ({own.median_ms / arm.median_ms:.2f})" for arm in others)
        print(
            f"{name:10} {batch}x{length:<4} {own.median_ms:8.2f} ms  {ratios}  cosine {min(cosines.values()):.5f}",
            flush=True,
        )
        entry = {"model": name, "batch": batch, "length": length, "cosines": cosines, "bytes": stored}
        entries.append({**entry, "report": report.to_json()})
    return entries


def compiled(source: str, sizes: dict[str, tuple[int | str, ...]], precision: str, directory: Path) -> Module:
    """Return a model compiled without records, which has passed its validation."""
    if not directory.exists():
        request = ModelRequest(source, shapes=sizes, target="llvm", lowering=LoweringOptions(precision))
        result = compile_model(request, directory, samples=1)
        if result.validation is None or not result.validation.passed:
            raise SystemExit(f"{source} in {precision} failed its validation; nothing was timed")
    return Module.load(directory)


def _size(text: str) -> tuple[int, int]:
    batch, _, length = text.partition("x")
    return int(batch), int(length)


def _cosine(got: np.ndarray, expected: np.ndarray) -> float:
    """Return the least cosine of two arrays of vectors."""
    norms = np.linalg.norm(got, axis=-1) * np.linalg.norm(expected, axis=-1)
    return float(((got * expected).sum(-1) / np.maximum(norms, 1e-12)).min())


if __name__ == "__main__":
    main()
