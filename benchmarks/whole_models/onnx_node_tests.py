"""ONNX's own node tests through our import and compilation for LLVM, beside stock TVM's `from_onnx` and `compile`.

    python -m benchmarks.whole_models.onnx_node_tests [OPERATOR ...] [--arm relaxtune|stock]

The cases are those the installed onnx package generates, for every operator of the main domain that occurs in exports
of transformers (`node_tests/operators.py`), each at the opset it is written for, the nodes its function expands to
included. "shipped" feeds every input at run time; "constant" has shapes, axes and the like as initializers. A case
passes when it loads, imports, compiles, runs, and gives the dtypes, shapes and numbers of the test within the test's
own tolerance. The table counts them per operator; each failure of ours has its reason (`node_tests/reasons.py`).
The outcomes go to `benchmarks/results/onnx-node-tests.json`; a run of some operators replaces theirs.
"""

from __future__ import annotations

import argparse
import collections
import datetime
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import onnx
import tvm
from rich.console import Console
from rich.table import Table

from benchmarks.node_tests.arms import Arm, Outcome, Stage
from benchmarks.node_tests.cases import Form, NodeCase, list_cases
from benchmarks.node_tests.operators import OPERATORS
from benchmarks.node_tests.reasons import find_reason
from benchmarks.node_tests.worker import outcomes
from relaxtune.pipeline.environment import cpu_name

RESULTS = Path(__file__).parents[1] / "results" / "onnx-node-tests.json"
Results = Mapping[Arm, Mapping[str, Outcome]]


def main() -> None:
    """Run the cases and print how many pass."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("operators", nargs="*", metavar="OPERATOR", help="default: all")
    parser.add_argument(
        "--arm", action="append", choices=[arm.value for arm in Arm], help="default: both; one alone is not written"
    )
    arguments = parser.parse_args()
    unknown = sorted(set(arguments.operators) - set(OPERATORS))
    if unknown:
        parser.error(f"not in benchmarks/node_tests/operators.py: {', '.join(unknown)}")
    cases = list_cases(arguments.operators or OPERATORS)
    arms = [Arm(name) for name in arguments.arm or [arm.value for arm in Arm]]
    results = {arm: {case.key: outcome for case, outcome in outcomes(cases, arm)} for arm in arms}
    console = Console(width=140)
    console.print(counts_table(cases, results))
    if Arm.OWN in results:
        for line in explained(cases, results[Arm.OWN]):
            console.print(line, markup=False, soft_wrap=True)
    if len(arms) == len(Arm):
        kept = json.loads(RESULTS.read_text(encoding="utf-8"))["cases"] if RESULTS.exists() else []
        operators = {case.operator for case in cases}
        rest = [entry for entry in kept if entry["operator"] not in operators]
        whole = document([*rest, *entries(cases, results)])
        RESULTS.write_text(json.dumps(whole, indent=1) + "\n", encoding="utf-8")


def counts_table(cases: Sequence[NodeCase], results: Results) -> Table:
    """Return the passes per operator, of each form and arm."""
    table = Table(title="cases that pass, per operator")
    for column in ("operator", "opsets", *(f"{form.value} {arm.value}" for form in Form for arm in results)):
        table.add_column(column)
    for name in [*sorted({case.operator for case in cases}), "all"]:
        own = [case for case in cases if name in (case.operator, "all")]
        opsets = sorted({case.opset for case in own})
        cells = [passes(own, results[arm], form) for form in Form for arm in results]
        table.add_row(name, " ".join(map(str, opsets)) if name != "all" else "", *cells)
    return table


def passes(cases: Sequence[NodeCase], outcome_of: Mapping[str, Outcome], form: Form) -> str:
    """Return how many cases of a form pass, such as `7/9`; empty where there is none."""
    chosen = [outcome_of[case.key].stage is Stage.PASSED for case in cases if case.form is form]
    return f"{sum(chosen)}/{len(chosen)}" if chosen else ""


def explained(cases: Sequence[NodeCase], outcome_of: Mapping[str, Outcome]) -> list[str]:
    """Return a line for each reason of our failures with its count, and one for each failure without a reason."""
    failures = [(case, outcome_of[case.key]) for case in cases if outcome_of[case.key].stage is not Stage.PASSED]
    reasons = [(find_reason(case, outcome), case, outcome) for case, outcome in failures]
    counts = collections.Counter(reason for reason, _, _ in reasons if reason is not None)
    lines = [f"{count:4} {reason.name}: {reason.explanation}" for reason, count in counts.most_common()]
    lines += [
        f"UNEXPLAINED {case.key} ({outcome.stage.value}): {outcome.error}"
        for reason, case, outcome in reasons
        if reason is None
    ]
    return lines


def entries(cases: Sequence[NodeCase], results: Results) -> list[dict[str, Any]]:
    """Return what is written of each case: how it ended in both arms, and why ours failed."""
    found = []
    for case in cases:
        own = results[Arm.OWN][case.key]
        reason = find_reason(case, own)
        failed = own.stage is not Stage.PASSED
        found.append(
            {
                "case": case.key,
                "operator": case.operator,
                "opset": case.opset,
                **{arm.value: outcome_of[case.key].stage.value for arm, outcome_of in results.items()},
                **({"reason": reason.name if reason else None} if failed else {}),
            }
        )
    return found


def document(found: Sequence[Mapping[str, Any]]) -> dict[str, object]:
    """Return what is written: the environment, the counts, and every case's outcomes."""
    counts = {}
    for form in Form:
        own = [entry for entry in found if entry["case"].endswith(f"/{form.value}")]
        for arm in Arm:
            passed = sum(entry[arm.value] == Stage.PASSED.value for entry in own)
            counts[f"{form.value} {arm.value}"] = f"{passed}/{len(own)}"
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "cpu": cpu_name(),
        "versions": {"onnx": onnx.__version__, "tvm": tvm.__version__},
        "passed": counts,
        "cases": sorted(found, key=lambda entry: (entry["operator"], entry["case"])),
    }


if __name__ == "__main__":
    main()
