"""Artifacts inside ONNX Runtime beside the same artifacts alone, on a CPU: bits, and latencies by turns.

    python -m benchmarks.artifacts.bench_provider [--models bert-tiny bert-base] [--runs 200] [--results FILE]

Both arms take and return NumPy arrays in one process, with one thread, or `--threads`.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path

import numpy as np
import onnxruntime as ort

import relaxtune
from benchmarks.this_run import run_facts
from relaxtune.pipeline.artifact.module import Module
from relaxtune.pipeline.artifact.provider import PROVIDER, export_for_onnx_runtime
from relaxtune.pipeline.bench.measure import measure
from relaxtune.pipeline.validate.builds import reference_model
from relaxtune.pipeline.validate.validation import sample_inputs

RESULTS = Path(__file__).parents[1] / "results/cpu-provider.json"


def compare(model: str, folder: Path, runs: int, threads: int) -> dict[str, object]:
    """Return bits and latencies of one model."""
    artifact = relaxtune.compile(model, folder / "artifact", samples=0, target="llvm").directory
    written = export_for_onnx_runtime(artifact, folder / "exported")
    if all(device.ep_name != PROVIDER for device in ort.get_ep_devices()):
        ort.register_execution_provider_library(PROVIDER, str(written.library))
    options = ort.SessionOptions()
    devices = [device for device in ort.get_ep_devices() if device.ep_name == PROVIDER]
    options.add_provider_for_devices(devices, {"threads": str(threads)})
    session = ort.InferenceSession(str(written.model), options)
    module = Module.load(artifact, threads=threads)
    inputs = sample_inputs(reference_model(module), samples=1, seed=0)[0]

    def alone() -> None:
        module.run(inputs)

    def inside() -> None:
        session.run(None, inputs)

    pairs = zip(session.run(None, inputs), module.run(inputs).values(), strict=True)
    report = measure({"artifact": alone, "provider": inside}, runs=runs, mirrored=True)
    alone_ms, inside_ms = (np.array(arm.latencies_ms) for arm in report.arms)
    return {
        "model": model,
        "same_bits": all(one.tobytes() == other.tobytes() for one, other in pairs),
        "runs": runs,
        "threads": threads,
        "artifact_ms": float(np.median(alone_ms)),
        "provider_ms": float(np.median(inside_ms)),
        # Of runs one after another, whose machine is the same.
        "ratio": float(np.median(inside_ms / alone_ms)),
    }


def main() -> None:
    """Compare each model, print a line each and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["bert-tiny", "bert-base"])
    parser.add_argument("--runs", type=int, default=200)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--results", type=Path, default=RESULTS)
    options = parser.parse_args()
    found = []
    for model in options.models:
        with tempfile.TemporaryDirectory() as folder:
            found.append(compare(model, Path(folder), options.runs, options.threads))
        print(found[-1], flush=True)
    document = {"machine": {**run_facts(), "onnxruntime": ort.__version__}, "cases": found}
    options.results.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
