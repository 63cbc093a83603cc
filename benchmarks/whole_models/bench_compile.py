"""Compare the time to compile a model with symbolic sizes with that of the same model at some sizes.

    python -m benchmarks.whole_models.bench_compile [--model bert-base:fp16] [--target cuda:sm_90a]
        [--profile batch=1:8:32,sequence=1:128:512] [--sizes 1x128,8x128,32x512] [--runs 3] [--json FILE]

Each run is the command `relaxtune compile`, a process of its own from its start to its end; validation is left out.
The arms run by turns, after a run that is not timed: it leaves Python's bytecode. CUDA's cache of what was compiled is
off. No GPU is needed. Sizes are of the profile's axes, in their order.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.this_run import run_facts

SYMBOLIC = "symbolic"


def options_of(arm: str, profile: str) -> list[str]:
    """Return the options of the command for an arm."""
    if arm == SYMBOLIC:
        return ["--profile", profile]
    axes = [text.partition("=")[0] for text in profile.split(",")]
    return [word for axis, size in zip(axes, arm.split("x"), strict=True) for word in ("--dim", f"{axis}={size}")]


def compile_once(model: str, target: str, options: Sequence[str]) -> float:
    """Return the seconds of one compilation, process and all."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "relaxtune", "compile", model, "--target", target, *options]
        command += ["--samples", "0", "--out", str(Path(folder) / "artifact")]
        kept = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
        began = time.perf_counter()
        done = subprocess.run(command, capture_output=True, text=True, env={**kept, "CUDA_CACHE_DISABLE": "1"})
        seconds = time.perf_counter() - began
    if done.returncode:
        raise SystemExit(done.stderr)
    return seconds


def main() -> None:
    """Compile by turns; print medians and ratios."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="bert-base:fp16")
    parser.add_argument("--target", default="cuda:sm_90a")
    parser.add_argument("--profile", default="batch=1:8:32,sequence=1:128:512")
    parser.add_argument("--sizes", default="1x128,8x128,32x512")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    arms = [SYMBOLIC, *arguments.sizes.split(",")]
    taken: dict[str, list[float]] = {arm: [] for arm in arms}
    compile_once(arguments.model, arguments.target, options_of(SYMBOLIC, arguments.profile))
    for number in range(arguments.runs):
        for arm in arms:
            taken[arm].append(compile_once(arguments.model, arguments.target, options_of(arm, arguments.profile)))
            print(f"run {number + 1}, {arm}: {taken[arm][-1]:.1f} s", file=sys.stderr)
    medians = {arm: statistics.median(seconds) for arm, seconds in taken.items()}
    for arm, median in medians.items():
        spread = f"{min(taken[arm]):.1f} to {max(taken[arm]):.1f}"
        print(f"{arm:10} {median:6.1f} s ({spread}); symbolic is {medians[SYMBOLIC] / median:.2f} of it")
    if arguments.json is not None:
        result = {"run": run_facts(), "model": arguments.model, "target": arguments.target, "seconds": taken}
        arguments.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
