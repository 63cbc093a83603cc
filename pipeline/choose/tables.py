"""The table of a kernel of symbolic sizes, from the records of its sizes.

The same records give the same table: tuning and compiling from records alone both end here.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from tvm import tirx

from relaxtune.pipeline.artifact.kernel_choice import KernelChoice
from relaxtune.pipeline.choose.candidates import RECORDS_TRIED, CandidateLookup
from relaxtune.pipeline.choose.replay import replay_record
from relaxtune.pipeline.codegen.tvm_errors import TVM_ERRORS
from relaxtune.pipeline.errors import LoweringError
from relaxtune.pipeline.printable import last_line
from relaxtune.pipeline.tasks.task import TuningTask
from relaxtune.schedules.errors import Refusal
from relaxtune.schedules.marks import as_scheduled
from relaxtune.schedules.registry import RANGES, apply_decision
from relaxtune.schedules.targets import ResolvedTarget
from relaxtune.schedules.templates.base import TemplateError
from relaxtune.tuning_db.records import Route, TuningRecord

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
    found: dict[int, TuningRecord] = {}
    for rows, task in tasks:
        record = _fastest(task, func, rows, lookup, target)
        if record is not None:
            found[rows] = record
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
        scheduled=scheduled,
    )


def _fastest(
    task: TuningTask, func: tirx.PrimFunc, rows: int, lookup: CandidateLookup, target: ResolvedTarget
) -> TuningRecord | None:
    """Return the fastest record that still makes the kernel that was measured, and one for symbolic rows too."""
    records = [record for record in lookup.list_standing(task) if record.route is Route.TEMPLATE]
    for record in records[:RECORDS_TRIED]:
        try:
            replay_record(task, record, target)
        except LoweringError as e:
            logger.warning("%s", e)
            continue
        refused = RANGES.refusal(func, target, record.decision, rows)
        if refused is None:
            return record
        logger.info("record %s of task %s is not for symbolic rows: %s", record.id, task.name, refused.reason)
    return None
