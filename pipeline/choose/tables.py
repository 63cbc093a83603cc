"""The table of a kernel of symbolic sizes, from the records of its sizes.

The same records give the same table: tuning and compiling from records alone both end here.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from tvm import tirx

from relaxtune.pipeline.artifact.kernel_choice import KernelChoice
from relaxtune.pipeline.choose.candidates import CandidateLookup, unusable
from relaxtune.pipeline.codegen.tvm_errors import TVM_ERRORS
from relaxtune.pipeline.printable import last_line
from relaxtune.pipeline.tasks.task import TuningTask
from relaxtune.schedules.errors import Refusal
from relaxtune.schedules.marks import as_scheduled
from relaxtune.schedules.registry import RANGES, apply_decision
from relaxtune.schedules.targets import ResolvedTarget
from relaxtune.schedules.templates.base import TemplateError
from relaxtune.tuning_db.records import Route, TuningRecord
from relaxtune.tuning_db.winner import Choice, winner

logger = logging.getLogger(__name__)


def choose_table(
    function: str,
    func: tirx.PrimFunc,
    tasks: Sequence[tuple[int, TuningTask]],
    lookup: CandidateLookup,
    target: ResolvedTarget,
) -> KernelChoice | None:
    """Return the table of a function's fastest recorded kernels; None where none is recorded, or it cannot be made.

    Parameters
    ----------
    func : PrimFunc
        With a symbolic number of rows.
    tasks : sequence of (int, TuningTask)
        Numbers of rows, and the function at each.
    """
    chosen = {rows: _fastest(task, func, rows, lookup, target) for rows, task in tasks}
    found = {rows: choice.record for rows, choice in chosen.items() if choice.record is not None}
    if not found:
        return None
    table = RANGES.measured(func, target, {rows: record.decision for rows, record in found.items()})
    if isinstance(table, Refusal):
        logger.warning("kernel %s: its records make no table: %s", function, table.reason)
        return None
    decision = table.to_json()
    measured = ", ".join(f"{rows} (record {record.id})" for rows, record in sorted(found.items()))
    try:
        scheduled = as_scheduled(apply_decision(func, target, decision))
    except (TemplateError, *TVM_ERRORS) as e:
        logger.warning("kernel %s: its table of records cannot be made: %s", function, last_line(e))
        return None
    return KernelChoice(
        function=function,
        task=None,
        route=Route.TEMPLATE,
        decision=decision,
        note=f"table of kernels measured at rows {measured}",
        of_sizes=True,
        trace=tuple(entry for choice in chosen.values() for entry in choice.trace),
        scheduled=scheduled,
    )


def _fastest(
    task: TuningTask, func: tirx.PrimFunc, rows: int, lookup: CandidateLookup, target: ResolvedTarget
) -> Choice:
    """Return the fastest record that still makes the kernel that was measured, and one for symbolic rows too."""

    def refusal(record: TuningRecord) -> str | None:
        reason = unusable(task, record, target)
        if reason is not None:
            logger.warning("%s", reason)
            return reason
        refused = RANGES.refusal(func, target, record.decision, rows)
        if refused is None:
            return None
        logger.info("record %s of task %s is not for symbolic rows: %s", record.id, task.name, refused.reason)
        return f"it is not for symbolic rows: {refused.reason}"

    return winner(lookup.judge(task), routes=(Route.TEMPLATE,), unusable=refusal)
