"""A folder of ONNX files as users have them: does each come in, is it right, how fast is it beside ONNX Runtime.

    python -m benchmarks.artifacts.bench_real_files FOLDER [--sizes FILE.json] [--results FILE.json] [--threads N]

Each file is compiled for this CPU, untuned, in a process of its own; its artifact and ONNX Runtime run by turns on as
many threads, one each by default; ONNX Runtime's do not spin between calls. The file of sizes maps patterns of names to
what a user calls the model with:
`{"*ocr_det*": {"sizes": [{"height": 320}, {"height": 640}], "values": {"lengths": "samples"}, "dims": {"batch": 1}}}`.
`values` fill an input with a number or with the size of an axis; `dims` are sizes that the artifact has fixed.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort

import relaxtune
from benchmarks.this_run import run_facts
from relaxtune.models import axis_sizes, load_model, random_inputs

RESULTS = Path(__file__).parents[1] / "results" / "cpu-real-files.json"
_TIMEOUT_S = 400
_CALLS, _SECONDS = 15, 3.0
_RIGHT = 2e-3  # Of the largest element of an output, or of 0.001: detectors see nothing in noise.


def main() -> None:
    """Measure each file of a folder, and write the table and the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--sizes", type=Path)
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--one", action="store_true", help="the folder is a file: print its row as JSON")
    options = parser.parse_args()
    if options.one:
        rules = json.loads(options.sizes.read_text()) if options.sizes else {}
        print(json.dumps(measure(options.folder, rules, options.threads)))
        return
    rows: list[dict[str, Any]] = []
    for file in sorted(options.folder.glob("*.onnx")):
        command = [sys.executable, "-m", __spec__.name, str(file), "--one", "--threads", str(options.threads)]
        command += ["--sizes", str(options.sizes)] if options.sizes else []
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
            row = json.loads(done.stdout.splitlines()[-1]) if done.returncode == 0 else {"error": done.stderr[-300:]}
        except subprocess.TimeoutExpired as e:
            row = {"error": str(e)}
        rows.append({"file": file.stem, **row})
        print(table_row(rows[-1]), flush=True)
        options.results.write_text(json.dumps({"run": run_facts(), "rows": rows}, indent=1) + "\n")


def measure(file: Path, rules: Mapping[str, Mapping[str, Any]], threads: int) -> dict[str, Any]:
    """Return whether a file comes in, and for each set of sizes the difference and both times."""
    rule = next((one for pattern, one in rules.items() if fnmatch.fnmatch(file.stem, pattern)), {})
    shapes = {axis: (size,) for axis, size in rule.get("dims", {}).items()}
    sizes: list[dict[str, int]] = rule.get("sizes", [])
    axes = {axis: sorted(one[axis] for one in sizes) for axis in (sizes[0] if sizes else ())}
    profile = {axis: (found[0], found[0], found[-1]) for axis, found in axes.items()}
    with tempfile.TemporaryDirectory() as folder:
        try:
            done = relaxtune.compile(file, folder, target="llvm", samples=1, shapes=shapes, profile=profile)
        except Exception as e:
            return {"error": f"{type(e).__name__}: {e}"}
        if done.validation is not None and not done.validation.passed:
            return {"error": "its validation failed"}
        model, module = load_model(file, shapes=shapes), relaxtune.load(folder, threads=threads)
        as_many = ort.SessionOptions()
        as_many.intra_op_num_threads, as_many.inter_op_num_threads = threads, 1
        as_many.add_session_config_entry("session.intra_op.allow_spinning", "0")
        session = ort.InferenceSession(str(file), as_many)
        points = []
        for given in sizes or [axis_sizes(model)]:
            inputs = random_inputs(model, seed=1, dims=axis_sizes(model, given))
            for name, value in rule.get("values", {}).items():
                inputs[name][...] = given[value] if isinstance(value, str) else value
            points.append({"sizes": given, **_compared(module, session, inputs)})
    return {"points": points}


def _compared(module: Any, session: ort.InferenceSession, inputs: dict[str, np.ndarray]) -> dict[str, float | bool]:
    expected, got = session.run(None, inputs), list(module.run(inputs).values())
    difference = 0.0
    for ours, theirs in zip(got, expected, strict=True):
        if ours.shape != theirs.shape or not np.array_equal(np.isnan(ours), np.isnan(theirs)):
            return {"right": False, "difference": float("inf")}
        left, right = (np.nan_to_num(one.astype("float64")) for one in (ours, theirs))
        largest = max(float(np.abs(right).max(initial=0)), 1e-3)
        difference = max(difference, float(np.abs(left - right).max(initial=0)) / largest)
    times: dict[str, list[float]] = {"ours": [], "ort": []}
    began = time.perf_counter()
    while len(times["ort"]) < _CALLS and (len(times["ort"]) < 3 or time.perf_counter() - began < _SECONDS):
        for name, run in (("ours", lambda: module.run(inputs)), ("ort", lambda: session.run(None, inputs))):
            start = time.perf_counter()
            run()
            times[name].append(time.perf_counter() - start)
    ours_ms, ort_ms = (1e3 * statistics.median(times[name]) for name in ("ours", "ort"))
    return {"right": difference < _RIGHT, "difference": difference, "ours_ms": ours_ms, "ort_ms": ort_ms}


def table_row(row: Mapping[str, Any]) -> str:
    """Return a row of the table: file, comes in, right, our time over ONNX Runtime's at each set of sizes."""
    if "points" not in row:
        return f"| {row['file']} | no: {' '.join(row['error'].split())[:160]} | | |"
    right = "yes" if all(one["right"] for one in row["points"]) else "no"
    ratios = ", ".join(f"{one['ours_ms'] / one['ort_ms']:.2f}" for one in row["points"] if "ours_ms" in one)
    return f"| {row['file']} | yes | {right} | {ratios} |"


if __name__ == "__main__":
    main()
