"""Fuzz shapes, masks and values of five artifacts with symbolic axes against ONNX Runtime.

    python -m tests.guardrails.fuzz [--cases 2000] [--seed 0] [--target llvm] [--precision fp16] [--out FILE.json]

Prints the mismatches and how long it took; exits 1 when there are any. The same cases are the test marked `nightly`. In
half precision values are usual ones or zeros, and tokens that see no key are not compared.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import tempfile
from dataclasses import asdict
from importlib import metadata
from pathlib import Path

from tests.guardrails.fuzz_cases import ARTIFACTS, MASKS, VALUES, draw_cases
from tests.guardrails.fuzz_run import make_subject, run_cases

# Masks that leave each row of the batch a key. Tokens without one are some mean of the values where attention is one
# kernel; see `recognise_attention`.
_HALF_MASKS, _HALF_VALUES = ("right", "left", "ones", "one left"), ("usual", "zeros")


def environment() -> dict[str, str]:
    """Return what the outcome is true for."""
    packages = {name: metadata.version(name) for name in ("apache-tvm", "onnxruntime", "numpy")}
    return {"machine": platform.machine(), "cores": str(os.cpu_count()), **packages}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--cases", type=int, default=2000, help="over all artifacts")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--models", nargs="+", default=[fuzzed.model for fuzzed in ARTIFACTS])
    parser.add_argument("--target", default="llvm")
    parser.add_argument("--precision", help="None for the graph's own")
    parser.add_argument("--out", type=Path, help="where to write the summary as JSON")
    args = parser.parse_args()
    chosen = [fuzzed for fuzzed in ARTIFACTS if fuzzed.model in args.models]
    summary = []
    with tempfile.TemporaryDirectory(prefix="relaxtune-fuzz-") as folder:
        for fuzzed in chosen:
            subject = make_subject(fuzzed, Path(folder) / fuzzed.model, args.target, args.precision)
            kinds = (MASKS, VALUES) if args.precision is None else (_HALF_MASKS, _HALF_VALUES)
            cases = draw_cases(fuzzed, -(-args.cases // len(chosen)), args.seed, *kinds)
            mismatches, seconds = run_cases(subject, cases)
            for mismatch in mismatches:
                print(f"{mismatch.case}: {mismatch.output}: {mismatch.reason}")
            print(f"{fuzzed.model}: {len(cases)} cases, {len(mismatches)} mismatches, {seconds:.1f} s", flush=True)
            summary.append(
                {
                    "model": fuzzed.model,
                    "cases": len(cases),
                    "seconds": round(seconds, 1),
                    "mismatches": [asdict(mismatch) for mismatch in mismatches],
                }
            )
    if args.out:
        args.out.write_text(
            json.dumps(
                {
                    "environment": environment(),
                    "target": args.target,
                    "precision": args.precision,
                    "seed": args.seed,
                    "artifacts": summary,
                },
                indent=1,
            )
            + "\n"
        )
    sys.exit(any(entry["mismatches"] for entry in summary))


if __name__ == "__main__":
    main()
