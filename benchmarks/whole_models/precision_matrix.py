"""Compile models under every precision policy, validate them, and tell the drift from the float32 original.

    python -m benchmarks.whole_models.precision_matrix [--target auto] [--models bert-tiny,...] [--precisions fp16,...]
        [--sequence 32] [--processes 1] [--out FILE.json]

A line for each model, precision and output: whether the artifact computes what its precision says (validation, against
ONNX Runtime, with quantised weights in the reference where the policy quantises), and how far that is from the float32
original (drift). Exits 1 when a validation failed. Models whose name ends in `-decode` run one token after the others.
Needs TVM; the models are of the zoo, so nothing is downloaded.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import json
import multiprocessing
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

MODELS = (
    "bert-tiny",
    "gpt2-tiny",
    "llama-tiny",
    "llama-tiny-decode",
    "bert-tiny-outliers",
    "llama-tiny-outliers",
)
PRECISIONS = ("fp16", "bf16", "w8a16", "w4a16")


def measure(model: str, precision: str, target: str, sequence: int) -> dict[str, Any]:
    """Return what one compilation gave: seconds, sizes, and each output's validation and drift."""
    from relaxtune.models.zoo import get_preset
    from relaxtune.pipeline.jobs.compile_and_tune import compile_model
    from relaxtune.pipeline.passes import LoweringOptions
    from relaxtune.pipeline.prepare import ModelRequest

    names = [spec.name for spec in get_preset(model).inputs]
    shapes = {
        name: (1, sequence)
        for name in names
        if not model.endswith("-decode") and name in ("input_ids", "attention_mask", "token_type_ids")
    }
    request = ModelRequest(model, shapes, target, LoweringOptions(precision=precision))
    started = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="relaxtune-") as folder:
        result = compile_model(request, Path(folder) / "artifact", samples=2)
    report = result.validation
    if report is None or report.drift is None:
        raise SystemExit(f"{model} {precision}: compiled for {target}, which cannot run here; run this where it can")
    drift = {one.name: one for one in report.drift.outputs}
    outputs = []
    for output in report.outputs:
        one = drift.get(output.name)
        outputs.append(
            {
                "output": output.name,
                "passed": output.passed,
                "reason": output.reason,
                "required_atol": output.worst("required_atol"),
                "drift": None if one is None else vars(one),
            }
        )
    manifest = result.manifest
    routes = [kernel.route for kernel in manifest.kernels]
    return {
        "model": model,
        "precision": precision,
        "target": f"{manifest.target.kind} {manifest.target.arch}",
        "sequence": None if model.endswith("-decode") else sequence,
        "seconds": round(time.perf_counter() - started, 1),
        "weights_bytes": manifest.memory.weights_bytes if manifest.memory else None,
        "quantised": len(manifest.policy.quantised_nodes) if manifest.policy else 0,
        "kernels": {route: routes.count(route) for route in sorted(set(routes))},
        "tolerance": [report.tolerance.rtol, report.tolerance.atol],
        "data": [vars(one) for one in report.drift.data],
        "outputs": outputs,
    }


def environment() -> dict[str, Any]:
    """Return the machine and the versions that the figures are true for."""
    from relaxtune.pipeline.artifact.export import versions
    from relaxtune.pipeline.environment import detect_environment
    from relaxtune.schedules.targets import resolve_target

    return {"device": detect_environment(resolve_target("auto")).device_name, "versions": versions()}


def print_lines(entry: dict[str, Any]) -> None:
    for output in entry["outputs"]:
        drift = output["drift"] or {}
        measures = "  ".join(
            f"{name} {drift[key]:.6g}"
            for name, key in (
                ("max/RMS", "max_rel"),
                ("row cosine", "row_cosine_mean"),
                ("lowest", "row_cosine_min"),
                ("arg-max", "argmax_agreement"),
                ("KL", "kl_mean"),
            )
            if drift.get(key) is not None
        )
        verdict = "ok" if output["passed"] else f"FAILED ({output['reason']})"
        print(
            f"{entry['model']:30} {entry['precision']:6} {output['output']:18} {verdict}, atol needed "
            f"{output['required_atol']:.2g} of {entry['tolerance'][1]:g}  drift: {measures}  "
            f"{entry['weights_bytes'] / 1e6:.1f} MB {entry['kernels']} {entry['seconds']} s",
            flush=True,
        )


def main() -> None:
    """Run the matrix."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="auto")
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--precisions", default=",".join(PRECISIONS))
    parser.add_argument("--sequence", type=int, default=32)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    cases = [(m, p) for m in arguments.models.split(",") for p in arguments.precisions.split(",")]
    context = multiprocessing.get_context("spawn")
    entries = []
    with concurrent.futures.ProcessPoolExecutor(arguments.processes, mp_context=context) as pool:
        futures = [pool.submit(measure, m, p, arguments.target, arguments.sequence) for m, p in cases]
        for future in futures:
            entries.append(future.result())
            print_lines(entries[-1])
            if arguments.out is not None:
                arguments.out.write_text(json.dumps({**environment(), "entries": entries}, indent=1))
    sys.exit(0 if all(output["passed"] for entry in entries for output in entry["outputs"]) else 1)


if __name__ == "__main__":
    main()
