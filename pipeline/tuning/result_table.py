"""The table a tuning run ends with, and the same as JSON."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import fields

from relaxtune.pipeline.printable import short
from relaxtune.pipeline.printed_tables import TableView
from relaxtune.pipeline.tuning.options import TaskSummary, TuningSummary
from relaxtune.tuning_db.records import Status

_NODES_SHOWN = 2
_NODE_CHARS = 28


def summary_table(summary: TuningSummary) -> TableView:
    """Return the table of a run: one row a task, those that take most of the model's time first."""
    figures: dict[str, Callable[[TaskSummary], str]] = {
        "calls": lambda task: str(task.weight),
        "valid/failed": lambda task: f"{task.valid}/{task.failed}",
        "default us": lambda task: _number(task.before_us, ".1f"),
        "best us": lambda task: (
            _number(task.after_us, ".1f") + ("" if task.spread is None else f" ±{50 * task.spread:.0f}%")
        ),
        "speed-up": lambda task: _number(task.speedup, ".2f", "x"),
        "share": lambda task: f"{100 * task.share:.1f}%",
    }
    columns: dict[str, Callable[[TaskSummary], str]] = {
        "task": lambda task: short(task.task.name),
        "ONNX nodes": lambda task: shorten_nodes(task.task.onnx_nodes),
        "route": lambda task: task.route.value if task.route else "none",
        **figures,
        "note": note,
    }
    optional = ("ONNX nodes", "note", "valid/failed", "default us", "calls")
    return TableView.of(headline(summary), summary.tasks, columns, phases(summary), figures.keys(), optional)


def headline(summary: TuningSummary) -> str:
    """Return one line about the whole run: candidates, rate, and the sum of a model's kernels, each timed alone.

    The model itself is measured apart (`choose.shipping`): among others, a kernel takes another time.
    """
    if not summary.tasks:
        return (
            "nothing to tune: no kernel can be tuned here while calls decide its sizes (on a CPU, none can); give axes "
            "sizes (--dim), or sizes that get code of their own (--bucket)"
        )
    before = sum(task.weight * (task.before_us or math.inf) for task in summary.tasks if task.after_us is not None)
    default = f"{before / 1e3:.3f} ms" if math.isfinite(before) else "unknown"
    after = sum(task.weight * task.after_us for task in summary.tasks if task.after_us is not None)
    stopped = ", interrupted" if summary.interrupted else ""
    return (
        f"{summary.candidates} candidates in {summary.seconds:.1f} s ({summary.candidates_per_s:.2f}/s){stopped}. "
        f"Sum of kernels timed alone: {default} with default schedules, {after / 1e3:.3f} ms with the best records"
    )


def phases(summary: TuningSummary) -> str:
    """Return in what the time of a run went; phases that overlap count twice."""
    parts = [f"{phase} {seconds:.1f} s" for phase, seconds in summary.seconds_by_phase.items()]
    replaced = f"; {summary.restarts} processes replaced" if summary.restarts else ""
    return "time: " + ", ".join(parts) + replaced


def note(task: TaskSummary) -> str:
    """Return why a task was skipped or ended, how its candidates failed, what was known of it."""
    parts = [reason for reason in (task.skipped, task.ended) if reason]
    parts += [f"{count} {status.value}" for status, count in task.failures.items() if count]
    if task.known and not task.skipped:
        parts.append(f"{task.known} known")
    return ", ".join(parts)


def shorten_nodes(nodes: tuple[str, ...]) -> str:
    """Return the first node names, each cut at its start, where names differ least, and how many more there are."""
    shown = [name if len(name) <= _NODE_CHARS else "…" + name[1 - _NODE_CHARS :] for name in nodes[:_NODES_SHOWN]]
    more = len(nodes) - len(shown)
    return " ".join([*shown, f"+{more}"] if more > 0 else shown)


def to_data(summary: TuningSummary) -> dict[str, object]:
    """Return a run as plain JSON data: the table with all node names, failures by status and seconds by phase."""
    return {
        "candidates": summary.candidates,
        "candidates_per_s": summary.candidates_per_s,
        "seconds": summary.seconds,
        "seconds_by_phase": dict(summary.seconds_by_phase),
        "interrupted": summary.interrupted,
        "restarts": summary.restarts,
        "tasks": [_task_fields(task) for task in summary.tasks],
    }


def _task_fields(task: TaskSummary) -> dict[str, object]:
    values = {field.name: getattr(task, field.name) for field in fields(task)}
    return {
        **values,
        "task": task.task.name,
        "workload_hash": task.task.workload_hash,
        "family": task.task.family,
        "onnx_nodes": list(task.task.onnx_nodes),
        "route": task.route.value if task.route else None,
        "failures": {status.value: task.failures.get(status, 0) for status in Status if status is not Status.OK},
        "speedup": task.speedup,
    }


def _number(value: float | None, form: str, unit: str = "") -> str:
    return "-" if value is None else f"{value:{form}}{unit}"
