"""`relaxtune db explain`: which records of a model's kernels were looked at, and why each was taken or not."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

from relaxtune.pipeline.cli.db.common import TableOptions, app, microseconds
from relaxtune.pipeline.cli.groups import takes_groups
from relaxtune.pipeline.cli.options import ModelOptions, SharedDatabasesOption
from relaxtune.pipeline.cli.output import DataFormat, emit
from relaxtune.pipeline.cli.set_option import CommandWithSet
from relaxtune.pipeline.printable import short
from relaxtune.pipeline.printed_tables import TableView

if TYPE_CHECKING:
    from relaxtune.pipeline.jobs.explain import ExplainedKernel
    from relaxtune.tuning_db.winner import Considered

# Rows of one kernel in the table, without the record taken; JSON and CSV have all.
_ROWS = 4


@app.command(cls=CommandWithSet)
@takes_groups(without=("limit", "dump_ir", "embed_weights"))
def explain(model: ModelOptions, table: TableOptions, shared_db: SharedDatabasesOption = None) -> None:
    """List the records of each kernel of MODEL and of decisions about its graph, and why each was taken or not.

    It looks records up as `compile` does for --target, shapes and precision, and compiles nothing.
    """
    from relaxtune.pipeline.jobs.explain import explain_model

    found = explain_model(model.request(), table.db, shared_db or ())
    if table.output_format is DataFormat.CSV:
        rows = [
            {"task": kernel.task, "functions": " ".join(kernel.functions), "kernel_route": kernel.route, **asdict(one)}
            for kernel in found.kernels
            for one in kernel.records
        ]
        emit(table.output_format, rows)
        return
    made = Counter(kernel.route.value if kernel.taken is None else "record" for kernel in found.kernels)
    counts = ", ".join(f"{count} by {name}" for name, count in made.most_common())
    title = f"{found.model} on {found.target}, device {found.device}, TVM {found.tvm_version}: {counts}"
    cells = [row for kernel in found.kernels for row in _rows(kernel, found.note)]
    cells += [
        (f"graph: {one.decision}", str(one.record_id), "", microseconds(1e3 * (one.model_ms or 0.0)), "", one.reason)
        for one in found.decisions
    ]
    columns = ("kernel", "record", "route", "us", "device", "reason")
    emit(table.output_format, found.to_json(), TableView(title, columns, tuple(cells), found.note))


def _rows(kernel: ExplainedKernel, caption: str) -> list[tuple[str, ...]]:
    """Return a row with the route of a kernel, and rows of its records: like reasons are one row with a count.

    A note that the table's caption has is not repeated.
    """
    count = f" ({len(kernel.functions)})" if len(kernel.functions) > 1 else ""
    name = short(kernel.task or kernel.functions[0]) + count
    note = "" if kernel.note == caption else kernel.note
    first = (name, "", kernel.route.value, "", "", note)
    if kernel.taken is None and not kernel.records:
        return [(*first[:-1], note or "no record")]
    groups: dict[tuple[object, ...], list[Considered]] = {}
    for record in kernel.records:
        key = (record.route, record.device_name, record.reason)
        groups.setdefault(key, []).append(record)
    rows = [_row(group, caption) for group in groups.values()]
    if len(rows) > _ROWS + 1:
        more = sum(len(group) for group in list(groups.values())[_ROWS:])
        rows = [*rows[:_ROWS], ("", "", "", "", "", f"{more} more records: --format json")]
    if kernel.taken is not None:
        return [(name, *rows[0][1:]), *rows[1:]]
    return [first, *rows]


def _row(group: Sequence[Considered], caption: str) -> tuple[str, ...]:
    best = group[0]
    number = "" if best.id is None else str(best.id)
    more = f" and {len(group) - 1} more" if len(group) > 1 else ""
    return (
        "", number + more, best.route.value, microseconds(best.latency_us), best.device_name,
        best.reason.removeprefix(f"{caption}; "),
    )  # fmt: skip
