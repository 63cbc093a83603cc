"""`ReportDiff`: two builds of a model side by side, kernel by kernel.

Kernels of the same name and the same ONNX nodes are a pair. All others are put together where they share an ONNX node:
one kernel before may be two now, and the sum of their times is compared with its own.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from relaxtune.pipeline.report.kernel import KernelRow
from relaxtune.pipeline.report.report import Report

# Times of one kernel in two builds that are further apart get a note.
_SCATTER = 1.1


@dataclass(frozen=True)
class KernelChange:
    """Kernels that compute the same before and after; one side is empty where nothing shares its ONNX nodes."""

    before: tuple[KernelRow, ...]
    after: tuple[KernelRow, ...]

    @property
    def before_us(self) -> float | None:
        """Time of all calls before; None where a kernel has no time."""
        return _total(self.before)

    @property
    def after_us(self) -> float | None:
        """Time of all calls after; None where a kernel has no time."""
        return _total(self.after)

    @property
    def difference_us(self) -> float | None:
        """Microseconds more than before; below 0 where it is faster."""
        return None if self.before_us is None or self.after_us is None else self.after_us - self.before_us

    @property
    def times(self) -> float | None:
        """How many times as fast it is now; None where one side has no time or no kernel."""
        return self.before_us / self.after_us if self.before_us and self.after_us else None

    @property
    def same(self) -> bool:
        """Whether both sides are one kernel, by its hash."""
        hashes = [row.kernel_hash for row in (*self.before, *self.after)]
        return len(self.before) == len(self.after) == 1 and hashes[0] == hashes[1] is not None

    @property
    def what(self) -> str:
        """The change: the same kernel, another one, other kernels for these nodes, new, or gone."""
        if not self.before:
            return "new"
        if not self.after:
            return "gone"
        if len(self.before) > 1 or len(self.after) > 1:
            return "other kernels for these nodes"
        was, now = self.before[0], self.after[0]
        if self.same:
            return "the same kernel" if was.calls == now.calls else f"{was.calls} calls before, {now.calls} now"
        if was.kernel_hash is not None and now.kernel_hash is not None:
            return "another kernel" if was.route == now.route else f"{was.route} before, {now.route} now"
        return "" if was.route == now.route else f"{was.route} before, {now.route} now"

    def to_json(self) -> dict[str, object]:
        """Return plain JSON data; kernels by name, with their routes."""
        sides = {"before": self.before, "after": self.after}
        return {
            **{side: [{"name": row.name, "route": row.route} for row in rows] for side, rows in sides.items()},
            "what": self.what,
            "before_us": self.before_us,
            "after_us": self.after_us,
            "difference_us": self.difference_us,
            "times": self.times,
        }


@dataclass(frozen=True)
class ReportDiff:
    """Two builds side by side."""

    # Their reports.
    before: Report
    after: Report
    changes: tuple[KernelChange, ...]  # The largest changes of time first.
    buckets: tuple[ReportDiff, ...]  # The same of the code of each shape bucket that both have.
    # Warnings: times of two devices, other targets, kernels without a time, buckets of one alone.
    notes: tuple[str, ...]

    def to_json(self) -> dict[str, object]:
        """Return plain JSON data."""
        return {
            "before": self.before.source,
            "after": self.after.source,
            "before_us": self.before.kernels_us,
            "after_us": self.after.kernels_us,
            "kernels": [change.to_json() for change in self.changes],
            "bucket": self.after.bucket,
            "buckets": [one.to_json() for one in self.buckets],
            "notes": list(self.notes),
        }


def diff_reports(before: Report, after: Report) -> ReportDiff:
    """Return what changed from one build to another."""
    changes = _paired(before.kernels, after.kernels)
    ordered = sorted(changes, key=lambda one: (-abs(one.difference_us or 0.0), -(one.after_us or one.before_us or 0.0)))
    sides = [{one.bucket: one for one in report.buckets} for report in (before, after)]
    buckets = tuple(diff_reports(sides[0][name], sides[1][name]) for name in sides[0] if name in sides[1])
    alone = [
        f"the bucket {name} is only {side}"
        for side, own, others in (("before", *sides), ("after", *reversed(sides)))
        for name in own
        if name not in others
    ]
    return ReportDiff(before, after, tuple(ordered), buckets, (*alone, *_notes(before, after), *_scatter(ordered)))


def _paired(before: Sequence[KernelRow], after: Sequence[KernelRow]) -> list[KernelChange]:
    known: dict[tuple[str, tuple[str, ...]], list[KernelRow]] = defaultdict(list)
    for row in before:
        known[row.name, row.onnx_nodes].append(row)
    found: list[KernelChange] = []
    new: list[KernelRow] = []
    for row in after:
        same = known[row.name, row.onnx_nodes]
        if same:
            found.append(KernelChange((same.pop(),), (row,)))
        else:
            new.append(row)
    return found + _grouped([row for rows in known.values() for row in rows], new)


def _grouped(before: Sequence[KernelRow], after: Sequence[KernelRow]) -> list[KernelChange]:
    """Return the groups of kernels that ONNX nodes join; a kernel without nodes is joined by its name."""
    by_node: dict[str, list[int]] = defaultdict(list)
    rows = [*before, *after]
    for place, row in enumerate(rows):
        for node in row.onnx_nodes or (row.name,):
            by_node[node].append(place)
    root = list(range(len(rows)))

    def find(place: int) -> int:
        while root[place] != place:
            place = root[place]
        return place

    for places in by_node.values():
        for other in places[1:]:
            root[find(other)] = find(places[0])
    groups: dict[int, list[int]] = defaultdict(list)
    for place in range(len(rows)):
        groups[find(place)].append(place)
    return [
        KernelChange(
            tuple(rows[place] for place in group if place < len(before)),
            tuple(rows[place] for place in group if place >= len(before)),
        )
        for group in groups.values()
    ]


def _scatter(changes: Sequence[KernelChange]) -> list[str]:
    """Return what kernels that did not change say of the times: they should be equal."""
    same = [one for one in changes if one.same and one.before[0].calls == one.after[0].calls]
    before, after = (sum(one.before_us or 0.0 for one in same), sum(one.after_us or 0.0 for one in same))
    if not before or not after or max(before, after) / min(before, after) <= _SCATTER:
        return []
    return [
        f"equal kernels ({len(same)}) took {before:,.0f} us before and {after:,.0f} us after: the machine made this "
        "difference, and may have made differences of other kernels"
    ]


def _total(rows: Sequence[KernelRow]) -> float | None:
    """Return the time of kernels; 0 of none."""
    times = [row.total_us for row in rows]
    return None if None in times else sum(time for time in times if time is not None)


def _notes(before: Report, after: Report) -> list[str]:
    sides: Mapping[str, Report] = {"before": before, "after": after}
    notes = []
    if before.model != after.model:
        notes.append(f"these are two models: {before.model} before, {after.model} after")
    if before.target != after.target:
        notes.append(f"these are for two targets: {before.target} before, {after.target} after")
    if before.device is not None and after.device is not None and before.device != after.device:
        notes.append(f"times are of two devices: {before.device} before, {after.device} after")
    for side, report in sides.items():
        untimed = sum(row.time_us is None for row in report.kernels)
        if untimed:
            notes.append(
                f"{untimed} of {len(report.kernels)} kernels {side} have no time; `relaxtune report NEW --diff OLD "
                "--profile` times both builds on the device that is here"
            )
    return notes
