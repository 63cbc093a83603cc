"""Compare random graphs of transformers' operators, and near misses of what the passes look for, with ONNX Runtime.

    python -m tests.guardrails.graphs [--mode steps | near-misses | one-node | sizes] [--count 300] [--seed 0]
                                      [--workers 1] [--target llvm | cuda:...] [--compile] [--limit 60]
                                      [--seconds 600] [--json FILE]

Without `--compile`, kernels run on this CPU without schedules, whichever target's passes made them. With it, they are
compiled as the product does, and run where the device is here. Prints what is wrong or crashed by seed, and how many
graphs were refused, by reason; exits 1 when any was wrong or crashed. Ten thousand of them are the tests marked
`nightly`.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from tests.guardrails.graph_judge import FAULTS, Outcome, Plan, Status
from tests.guardrails.graph_workers import Attempts, try_graphs
from tests.guardrails.one_node.sweep import OneNode, list_cases
from tests.guardrails.sized_calls import SizedPlan

_TOLD_EVERY = 250


def summary(outcomes: Sequence[Outcome]) -> dict[str, object]:
    """Return the counts, the refusals by reason, and the graphs at fault."""
    counts = Counter(outcome.status.value for outcome in outcomes)
    reasons = {
        status.value: dict(Counter(outcome.reason for outcome in outcomes if outcome.status is status).most_common())
        for status in (Status.REFUSED, Status.INVALID)
    }
    kept = (*FAULTS, Status.UNSTABLE)
    return {
        "counts": {status.value: counts[status.value] for status in Status},
        "reasons": reasons,
        "seeds": [asdict(outcome) for outcome in sorted(outcomes, key=_seed) if outcome.status in kept],
    }


def _seed(outcome: Outcome) -> int:
    return outcome.seed


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--mode", choices=("steps", "near-misses", "one-node", "sizes"), default="steps")
    parser.add_argument("--count", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0, help="of the first graph")
    parser.add_argument("--workers", type=int, default=1, help="processes at a time")
    parser.add_argument("--target", default="llvm", help="whose passes run")
    parser.add_argument("--compile", action="store_true", help="compile the kernels, and run them on their device")
    parser.add_argument("--limit", type=float, default=60.0, help="seconds of a processor for a graph")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="after which no graph begins")
    parser.add_argument("--json", type=Path, help="where the counts and the failing seeds go")
    args = parser.parse_args()
    one_node = args.mode == "one-node"
    plan: Attempts = Plan(args.mode == "near-misses", args.target, args.compile)
    plan = {"one-node": OneNode(), "sizes": SizedPlan()}.get(args.mode, plan)
    started = time.perf_counter()
    outcomes = []
    end = min(args.seed + args.count, len(list_cases())) if one_node else args.seed + args.count
    seeds = itertools.takewhile(lambda _: time.perf_counter() - started < args.seconds, range(args.seed, end))
    for outcome in try_graphs(seeds, plan, workers=args.workers, limit_s=args.limit):
        outcomes.append(outcome)
        if outcome.status in FAULTS:
            print(f"seed {outcome.seed} {outcome.name}: {outcome.status.value}: {outcome.reason}", flush=True)
        if len(outcomes) % _TOLD_EVERY == 0:
            print(f"{len(outcomes)} graphs in {time.perf_counter() - started:.0f} s", file=sys.stderr, flush=True)
    found = summary(outcomes)
    for status, reasons in found["reasons"].items():  # type: ignore[attr-defined]
        for reason, count in reasons.items():
            print(f"{status} x{count}: {reason}")
    seconds = round(time.perf_counter() - started, 1)
    print(", ".join(f"{count} {status}" for status, count in found["counts"].items() if count), f"in {seconds} s")  # type: ignore[attr-defined]
    if args.json:
        asked = {"mode": args.mode, "seed": args.seed, "count": len(outcomes), "target": args.target}
        asked |= {"compile": args.compile, "seconds": seconds}
        args.json.write_text(json.dumps({**asked, **found}, indent=1) + "\n")
    sys.exit(any(outcome.status in FAULTS for outcome in outcomes))


if __name__ == "__main__":
    main()
