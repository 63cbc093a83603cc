"""Reports as one HTML page: where the time goes, rates under the ceilings, errors, kernels; two builds side by side."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from markupsafe import Markup

from relaxtune.pipeline.pages.charts import Bar, Point, bars, curve, histograms, rate, roofline
from relaxtune.pipeline.pages.render import broken, code, note, number, page, percent, render, table
from relaxtune.pipeline.report.ceilings import Ceilings
from relaxtune.pipeline.report.diff import KernelChange, ReportDiff
from relaxtune.pipeline.report.kernel import CONTRACTIONS, Bottleneck, KernelRow
from relaxtune.pipeline.report.report import Report
from relaxtune.tuning_db.questions.artifacts import ArmSummary

_COLOURS = {
    Bottleneck.COMPUTE: "#2b6cb0",
    Bottleneck.BANDWIDTH: "#2f855a",
    Bottleneck.LATENCY: "#c05621",
    Bottleneck.LAUNCH: "#9b2c2c",
    None: "#718096",
}
_MEANING = {
    Bottleneck.COMPUTE: "nearest to the arithmetic ceiling, at half of it or more",
    Bottleneck.BANDWIDTH: "nearest to the bandwidth ceiling, at half of it or more",
    Bottleneck.LAUNCH: "at most twice the smallest kernel's time",
    Bottleneck.LATENCY: "none of these: too little work in flight",
}
_COLUMNS = (
    "kernel", "family", "route", "record", "calls", "us a call", "us", "share", "MFLOP", "MB", "TFLOP/s", "of ceiling",
    "GB/s", "of ceiling", "registers", "shared", "spills", "bottleneck", "ONNX nodes",
)  # fmt: skip
_DIFF_COLUMNS = ("kernel", "now", "what changed", "us before", "us after", "difference", "times as fast", "ONNX nodes")
_LEFT_COLUMNS = frozenset({"kernel", "family", "route", "bottleneck", "ONNX nodes", "now", "what changed"})
# Kernels with a bar of their own.
_BARS = 14


def render_page(reports: Sequence[Report], diff: ReportDiff | None = None) -> str:
    """Return the page of one report or several; with a diff, it comes first."""
    title = ", ".join(dict.fromkeys(report.model for report in reports)) or "nothing measured"
    parts = [*([diff_section(diff)] if diff else []), *map(section, reports)]
    return page(
        title, Markup().join(parts) if reports else Markup("<p>No job of this database has a valid record.</p>")
    )


def section(report: Report) -> Markup:
    """Return the part of a page that is one report."""
    # A note that all kernels have stands once.
    found = {row.note for row in report.kernels}
    common = found.pop() if len(found) == 1 and len(report.kernels) > 1 else ""
    rows = [replace(row, note="") for row in report.kernels] if common else report.kernels
    known = any(row.bottleneck is not None for row in rows)
    key = [{"name": one.value, "colour": _COLOURS[one], "meaning": meaning} for one, meaning in _MEANING.items()]
    return render(
        "report.html",
        report=report,
        subtitle="; ".join([report.source, report.target, *([f"times of {report.device}"] if report.device else [])]),
        facts=_facts(report),
        peers=peers_chart(report.arms),
        course=course_chart(report.curve),
        key=key if known else [],
        shares=shares_chart(rows),
        roofline=roofline_chart(rows, report.ceilings),
        errors=errors_chart(report.validation or {}),
        common_note=common,
        kernels=table(_COLUMNS, [*map(_cells, rows)], _LEFT_COLUMNS),
        cached=sum((row.bandwidth_use or 0.0) > 1 for row in rows),
        versions=", ".join(f"{name} {version}" for name, version in (report.versions or {}).items()),
        buckets=[*map(section, report.buckets)],
    )


def diff_section(diff: ReportDiff) -> Markup:
    """Return the part of a page that sets two builds side by side."""
    sides = [
        (side, report.source, report.target, number(report.kernels_us or None), str(report.launches))
        for side, report in (("before", diff.before), ("after", diff.after))
    ]
    return render(
        "diff.html",
        diff=diff,
        builds=table(("", "build", "target", "us of all kernels", "launches"), sides, {"", "build", "target"}),
        changes=table(_DIFF_COLUMNS, [*map(_change, diff.changes)], _LEFT_COLUMNS),
        timed=any(one.before_us or one.after_us for one in diff.changes),
        buckets=[*map(diff_section, diff.buckets)],
    )


def shares_chart(rows: Sequence[KernelRow]) -> Markup:
    """Return bars of the kernels that take the most time, coloured by bottleneck; empty when no time is known."""
    timed = [row for row in rows if row.share]
    shown, rest = timed[:_BARS], timed[_BARS:]
    found = [
        Bar(row.name, row.share or 0.0, percent(row.share), _COLOURS[row.bottleneck], _title(row)) for row in shown
    ]
    if rest:
        share = sum(row.share or 0.0 for row in rest)
        found.append(Bar(f"{len(rest)} more", share, percent(share), _COLOURS[None]))
    return bars(found, "share of the kernels' time")


def peers_chart(arms: Sequence[ArmSummary]) -> Markup:
    """Return bars of the arms of benchmarks; empty without any. Arms of one device ran alternately."""
    several = len({arm.device_name for arm in arms}) > 1
    found = [
        Bar(
            f"{arm.arm}, {arm.device_name}" if several else arm.arm,
            arm.latency_us,
            f"{arm.latency_us / 1e3:.4g} ms",
            _COLOURS[Bottleneck.COMPUTE if arm.arm.startswith("relaxtune") else None],
            f"{arm.arm} on {arm.device_name}, {arm.created_at:%Y-%m-%d %H:%M} UTC",
        )
        for arm in arms
    ]
    return bars(found, "latency of the whole model")


def course_chart(points: Sequence[tuple[float, float]]) -> Markup:
    """Return the model's time (us) over the seconds of tuning; empty without an improvement."""
    return curve([(seconds, us / 1e3) for seconds, us in points], "seconds of tuning", "ms")


def roofline_chart(rows: Sequence[KernelRow], ceilings: Ceilings | None) -> Markup:
    """Return kernels under the device's roofs; empty without a bandwidth ceiling or a rate."""
    known = [row for row in rows if row.flops and row.bytes and row.flops_per_s]
    if ceilings is None or not ceilings.bytes_per_s or not known:
        return Markup()
    points = [
        Point(
            (row.flops or 1.0) / (row.bytes or 1.0),
            row.flops_per_s or 1.0,
            row.share or 0.0,
            _COLOURS[row.bottleneck],
            _title(row),
        )
        for row in known
    ]
    used = {row.dtype for row in known if row.family in CONTRACTIONS}
    peaks = {dtype: peak for dtype, peak in ceilings.flops_per_s.items() if dtype in used}
    return roofline(points, ceilings.bytes_per_s, peaks)


def errors_chart(validation: Mapping[str, object]) -> Markup:
    """Return histograms of the last validation's errors over tolerance; empty for a validation without any."""
    outputs = validation.get("outputs")
    found = [one for one in outputs if one.get("histogram", {}).get("counts")] if isinstance(outputs, list) else []
    rows = []
    for one in found:
        factor = one.get("worst", {}).get("required_factor")
        needed = "no tolerance would do" if factor is None else f"needs {factor:.3g} of the tolerance"
        rows.append((f"{one['name']}: {needed}", one["histogram"]["counts"]))
    return histograms(rows, found[0]["histogram"]["edges"]) if rows else Markup()


def _title(row: KernelRow) -> str:
    time = f"{row.time_us:.2f} us x {row.calls}" if row.time_us else "no time"
    rates = [
        rate(row.flops_per_s) if row.flops_per_s else "",
        f"{row.bytes_per_s / 1e9:,.0f} GB/s" if row.bytes_per_s else "",
    ]
    return ", ".join([row.name, row.route, time, *filter(None, rates), row.bottleneck or ""])


def _change(change: KernelChange) -> tuple[object, ...]:
    names = [[row.name for row in side] for side in (change.before, change.after)]
    nodes = dict.fromkeys(node for row in (*change.before, *change.after) for node in row.onnx_nodes)
    difference = change.difference_us
    return (
        broken([code(name) for name in names[0]] or ["none"]),
        # A name that is the same stands once.
        "" if names[0] == names[1] else broken([code(name) for name in names[1]] or ["none"]),
        change.what,
        number(change.before_us) if change.before else "",
        number(change.after_us) if change.after else "",
        "" if difference is None else f"{'+' if difference > 0 else ''}{number(difference)}",
        "" if change.times is None else f"{change.times:.2f}",
        _nodes([*nodes]),
    )


def _facts(report: Report) -> list[tuple[str, str]]:
    timed = f"{report.kernels_us / 1e3:.3f} ms" if report.kernels_us else "not measured"
    facts = [
        ("kernels", f"{len(report.kernels)}"),
        ("launches of one inference", f"{report.launches}"),
        ("all kernels, each timed alone", timed),
    ]
    if report.model_us is not None:
        facts.append(("the whole module, measured now", f"{report.model_us / 1e3:.3f} ms"))
    if report.weights_bytes is not None:
        planned = "depends on shapes" if report.planned_bytes is None else f"{report.planned_bytes / 1e6:,.2f} MB"
        facts += [("planned memory", planned), ("weights", f"{report.weights_bytes / 1e6:,.2f} MB")]
    if report.observed_bytes is not None:
        facts.append(("device memory taken, measured now", f"{report.observed_bytes / 1e6:,.2f} MB"))
    if report.validation is not None:
        verdict = "passed" if report.validation.get("passed") else "FAILED"
        facts.append(("validation against ONNX Runtime", f"{verdict}, {report.validation.get('samples')} samples"))
    elif report.weights_bytes is not None:
        facts.append(("validation against ONNX Runtime", "never"))
    return facts


def _cells(row: KernelRow) -> tuple[object, ...]:
    """Return the cells in the order of `_COLUMNS`."""
    bottleneck = Markup('<b style="color:{}">{}</b>').format(_COLOURS[row.bottleneck], row.bottleneck)
    return (
        broken([code(row.name), note(row.note)]) if row.note else code(row.name),
        row.family or "",
        row.route,
        "" if row.record_id is None else row.record_id,
        row.calls,
        number(row.time_us),
        number(row.total_us),
        percent(row.share),
        number(row.flops, 1e6),
        number(row.bytes, 1e6),
        number(row.flops_per_s, 1e12),
        percent(row.compute_use),
        number(row.bytes_per_s, 1e9),
        percent(row.bandwidth_use),
        number(row.registers),
        number(row.smem_bytes),
        number(row.spill_bytes),
        bottleneck if row.bottleneck else "",
        _nodes(row.onnx_nodes),
    )


def _nodes(nodes: Sequence[str]) -> Markup:
    if len(nodes) < 2:
        return code("".join(nodes))
    folded = "<details><summary>{} and {} more</summary>{}</details>"
    return Markup(folded).format(code(nodes[0]), len(nodes) - 1, code(broken(nodes[1:])))
