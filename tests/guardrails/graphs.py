"""Compare random graphs of transformers' operators with ONNX Runtime, on LLVM without schedules.

    python -m tests.guardrails.graphs [--count 300] [--seed 0]

Prints what is wrong or crashed by seed, and how many graphs were refused, by reason; exits 1 when any was wrong or
crashed. Ten thousand of them are the test marked `nightly`.
"""

from __future__ import annotations

import argparse
import logging
import multiprocessing
import sys
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass

import numpy as np

from relaxtune.pipeline.errors import ImportFailedError
from relaxtune.pipeline.importer import import_model
from relaxtune.pipeline.passes import lower
from tests.guardrails.graph_cases import draw_graph
from tests.pipeline.passes.pass_cases import UNOPTIMISED, run_lowered, run_reference


@dataclass(frozen=True)
class Outcome:
    """What became of a graph: "right", "wrong", "crashed", "refused", or "invalid" where ONNX Runtime refuses it."""

    seed: int
    status: str
    reason: str = ""


def try_graph(seed: int) -> Outcome:
    """Draw a graph, compile and run it, and compare."""
    logging.disable(logging.WARNING)
    model, feeds = draw_graph(seed)
    try:
        wanted = run_reference(model, feeds)[0]
    except Exception as e:  # ONNX Runtime's errors have no common base; the drawing is at fault
        return Outcome(seed, "invalid", _line(e))
    try:
        got = run_lowered(lower(import_model(model), UNOPTIMISED), feeds)[0]
    except ImportFailedError as e:
        return Outcome(seed, "refused", str(e).partition("Cause: ")[2].splitlines()[0][:150])
    except Exception as e:  # whatever comes out where ONNX Runtime answers is a finding
        return Outcome(seed, "crashed", _line(e))
    if got.shape != wanted.shape:
        return Outcome(seed, "wrong", f"expected shape {wanted.shape}, got {got.shape}")
    halves = any(node.op_type == "Cast" for node in model.proto.graph.node)
    finite = wanted[np.isfinite(wanted)]
    size = max(1.0, float(np.sqrt(np.mean(finite.astype("float64") ** 2)))) if finite.size else 1.0
    limit = 2e-2 if halves else 1e-3
    if not np.allclose(got, wanted, rtol=limit, atol=limit * size, equal_nan=True):
        return Outcome(seed, "wrong", f"largest difference {np.nanmax(np.abs(got - wanted)):.3g}, RMS {size:.3g}")
    return Outcome(seed, "right")


def try_graphs(seeds: range) -> list[Outcome]:
    """Try graphs in a process of their own, which one that dies takes along."""
    outcomes: list[Outcome] = []
    left = list(seeds)
    context = multiprocessing.get_context("spawn")
    while left:
        with ProcessPoolExecutor(1, mp_context=context) as pool:
            futures = [(seed, pool.submit(try_graph, seed)) for seed in left]
            for seed, future in futures:
                try:
                    outcomes.append(future.result())
                except BrokenProcessPool:
                    outcomes.append(Outcome(seed, "crashed", "the process died"))
                    left.remove(seed)
                    break
                left.remove(seed)
    return outcomes


def _line(error: Exception) -> str:
    lines = [line for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[-1].strip()[:200] if lines else ''}"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--count", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0, help="of the first graph")
    args = parser.parse_args()
    started = time.perf_counter()
    outcomes = try_graphs(range(args.seed, args.seed + args.count))
    for outcome in outcomes:
        if outcome.status in ("wrong", "crashed"):
            print(f"seed {outcome.seed}: {outcome.status}: {outcome.reason}")
    counts = Counter(outcome.status for outcome in outcomes)
    for status in ("refused", "invalid"):
        for reason, count in Counter(outcome.reason for outcome in outcomes if outcome.status == status).items():
            print(f"{status} x{count}: {reason}")
    seconds = time.perf_counter() - started
    print(", ".join(f"{count} {status}" for status, count in counts.most_common()), f"in {seconds:.0f} s")
    sys.exit(bool(counts["wrong"] or counts["crashed"]))


if __name__ == "__main__":
    main()
