"""Reports as one HTML page: styles and plots inside, nothing fetched from anywhere."""

from __future__ import annotations

import html
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from relaxtune.pipeline.printable import printable
from relaxtune.pipeline.report.curve import step_curve
from relaxtune.pipeline.report.diff import KernelChange, ReportDiff
from relaxtune.pipeline.report.error_plot import error_histograms
from relaxtune.pipeline.report.kernel import Bottleneck, KernelRow
from relaxtune.pipeline.report.plot import COLOURS, latencies, roofline, shares
from relaxtune.pipeline.report.progress import Progress
from relaxtune.pipeline.report.report import Report

_STYLE = """
body { font: 14px/1.45 system-ui, sans-serif; margin: 2rem auto; max-width: 1600px; padding: 0 1rem; color: #1a202c }
h1, p { overflow-wrap: anywhere } h1 { font-size: 1.5rem } * + h1 { margin-top: 3rem }
h2 { font-size: 1.15rem; margin-top: 2rem }
.wide { overflow-x: auto } svg { width: 100%; min-width: 40rem; height: auto; font: 12px system-ui, sans-serif }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums }
th, td { padding: .25rem .5rem; border-bottom: 1px solid #e2e8f0; text-align: right; vertical-align: top }
th { background: #f7fafc; white-space: nowrap } .left, .when { text-align: left } .when { white-space: nowrap }
.text { text-align: left; min-width: 14rem } td:has(code) { min-width: 16rem }
.facts { display: flex; flex-wrap: wrap; gap: .5rem 2rem } .facts b { display: block; font-size: 1.2rem }
.note { color: #744210 } .key span { padding: 0 .6em; margin-right: .6em; color: white; border-radius: .3em }
code { overflow-wrap: anywhere } .curve { max-width: 60rem }
@media (max-width: 600px) { body { margin: .75rem auto } td:has(code) { min-width: 9rem } .curve { min-width: 30rem } }
@media screen and (prefers-color-scheme: dark) {
  body { background: #171923; color: #e2e8f0 } th { background: #2d3748 } a { color: #90cdf4 }
  th, td { border-color: #4a5568 } svg text { fill: #e2e8f0 } svg line { stroke: #a0aec0 }
  svg line.grid { stroke: #2d3748 } .curve path { stroke: #90cdf4 } .note { color: #f6ad55 }
}
@media print {
  @page { size: A4 landscape; margin: 12mm }
  body { margin: 0; max-width: none; padding: 0; font-size: 9pt; print-color-adjust: exact }
  .wide { overflow: visible } svg { min-width: 0; max-width: 100% } table { font-size: 6.5pt }
  th, td { padding: .1rem .2rem } td:has(code), .text { min-width: 9rem } th { white-space: normal }
  a { color: inherit }
  tr, svg, .facts { break-inside: avoid } h1, h2, .key { break-after: avoid }
}
"""

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
# Words of any length: where the page is narrow, they keep a width that can be read.
_TEXT_COLUMNS = frozenset({"why", "error", "reason", "cause"})
_LEFT_COLUMNS = frozenset({"kernel", "family", "route", "bottleneck", "ONNX nodes", "now", "what changed"})


def render_page(reports: Sequence[Report], diff: ReportDiff | None = None) -> str:
    """Return the page of one report or several; with a diff, it comes first."""
    title = ", ".join(dict.fromkeys(report.model for report in reports)) or "nothing measured"
    body = "".join(map(section, reports)) or "<p>No job of this database has a valid record.</p>"
    return page(title, (diff_section(diff) if diff else "") + body)


def page(title: str, body: str, head: str = "") -> str:
    """Return a whole page; `body` is HTML, and so is what goes into its head besides."""
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8">'
        f'<meta name="viewport" content="width=device-width, initial-scale=1"><title>{_escape(title)}</title>'
        f"<style>{_STYLE}</style>{head}</head><body>{body}</body></html>\n"
    )


def table(columns: Sequence[str], rows: Sequence[Sequence[str]], left: Collection[str] = ()) -> str:
    """Return a table without the columns that are empty in all rows.

    Its cells are HTML already. Those of the columns named in `left` begin at the left. So do words of any length and
    moments (`began (UTC)`), which stay on one line.
    """
    shown = [place for place in range(len(columns)) if not rows or any(row[place] for row in rows)]
    sides = [_class(name, left) for name in columns]
    head = "".join(f"<th{sides[place]}>{_escape(columns[place])}</th>" for place in shown)
    body = "".join(
        "<tr>" + "".join(f"<td{sides[place]}>{row[place]}</td>" for place in shown) + "</tr>" for row in rows
    )
    return _wide(f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>")


def _class(column: str, left: Collection[str]) -> str:
    kind = "when" if column.endswith("(UTC)") else "text" if column in _TEXT_COLUMNS else "left"
    return f' class="{kind}"' if kind != "left" or column in left else ""


def _wide(content: str) -> str:
    """Return content that scrolls by itself where the page is narrower."""
    return content and f'<div class="wide">{content}</div>'


def tiles(facts: Sequence[tuple[str, str]]) -> str:
    """Return facts, a name and a value each, beside each other."""
    return f'<div class="facts">{"".join(f"<div><b>{_escape(v)}</b>{_escape(name)}</div>" for name, v in facts)}</div>'


def section(report: Report) -> str:
    """Return the part of a page that is one report."""
    of_device = [f"times of {report.device}"] if report.device else []
    same = _note_of_all(report.kernels)
    rows = [replace(row, note="") for row in report.kernels] if same else report.kernels
    parts = [
        f"<h1>{_escape(report.model)}</h1>",
        f"<p>{_escape('; '.join([report.source, report.target, *of_device]))}</p>",
        _facts(report),
        notes(report.notes),
        *_progress(report.progress),
        "<h2>Where the time goes</h2>",
        _key() if any(row.bottleneck is not None for row in report.kernels) else "",
        _wide(shares(report.kernels)) or "<p>No kernel has a time.</p>",
    ]
    plot = roofline(report.kernels, report.ceilings)
    if plot:
        parts += ["<h2>Rates under the device's ceilings</h2>", _wide(plot)]
    if plot and report.ceilings is not None:
        parts.append(f"<p>Ceilings: {_escape(report.ceilings.source)}.</p>")
    errors = error_histograms(report.validation or {})
    if errors:
        parts += ["<h2>Errors of the last validation over tolerance</h2>", _wide(errors)]
    parts += [
        "<h2>Kernels</h2>",
        notes([f"For all {len(rows)} kernels: {same}"] if same else []),
        table(_COLUMNS, [*map(_cells, rows)], _LEFT_COLUMNS),
        _cached(report.kernels),
        _versions(report.versions or {}),
        *map(section, report.buckets),
    ]
    return printable("".join(parts))


def diff_section(diff: ReportDiff) -> str:
    """Return the part of a page that sets two builds beside each other."""
    sides = [
        (side, _escape(report.source), _escape(report.target), number(report.kernels_us or None), str(report.launches))
        for side, report in (("before", diff.before), ("after", diff.after))
    ]
    parts = [
        f"<h1>{_escape(diff.after.model)}, before and after</h1>",
        table(("", "build", "target", "us of all kernels", "launches"), sides, {"", "build", "target"}),
        notes(diff.notes),
        "<h2>What changed, kernel by kernel</h2>",
        table(_DIFF_COLUMNS, [*map(_change, diff.changes)], _LEFT_COLUMNS),
        "<p>Times are of all calls.</p>" if any(one.before_us or one.after_us for one in diff.changes) else "",
        *map(diff_section, diff.buckets),
    ]
    return printable("".join(parts))


def _change(change: KernelChange) -> tuple[str, ...]:
    names = [[f"<code>{_escape(row.name)}</code>" for row in side] for side in (change.before, change.after)]
    nodes = dict.fromkeys(node for row in (*change.before, *change.after) for node in row.onnx_nodes)
    difference = change.difference_us
    return (
        "<br>".join(names[0] or ["none"]),
        # A name that is the same stands once.
        "" if names[0] == names[1] else "<br>".join(names[1] or ["none"]),
        _escape(change.what),
        number(change.before_us) if change.before else "",
        number(change.after_us) if change.after else "",
        "" if difference is None else f"{'+' if difference > 0 else ''}{number(difference)}",
        "" if change.times is None else f"{change.times:.2f}",
        _nodes([*nodes]),
    )


def notes(told: Sequence[str]) -> str:
    """Return what a reader must know, a paragraph each."""
    return "".join(f'<p class="note">{_escape(one)}{"" if one.endswith((".", "?")) else "."}</p>' for one in told)


def _progress(progress: Progress) -> list[str]:
    """Return the course of the tuning and the peers, each where there is any."""
    curve = step_curve([(seconds, us / 1e3) for seconds, us in progress.curve], "seconds of tuning", "ms")
    bars = latencies(progress.arms)
    parts = ["<h2>Beside others</h2>", _wide(bars)] if bars else []
    if curve:
        told = "<p>All calls of all kernels, each timed alone, by the best candidates so far.</p>"
        parts += ["<h2>Best so far</h2>", _wide(curve), told]
    return parts


def _note_of_all(rows: Sequence[KernelRow]) -> str:
    """Return the note that all of several kernels have, to be told once; empty where there is none."""
    told = {row.note for row in rows}
    return told.pop() if len(told) == 1 and len(rows) > 1 else ""


def _cached(rows: Sequence[KernelRow]) -> str:
    """Return a word on rates above the ceiling of memory; empty where there are none."""
    above = sum((row.bandwidth_use or 0.0) > 1 for row in rows)
    told = "have more GB/s than the ceiling of memory: their data came from a cache"
    return f'<p class="note">{above} of {len(rows)} kernels {told}.</p>' if above else ""


def _facts(report: Report) -> str:
    facts = [
        ("kernels", f"{len(report.kernels)}"),
        ("launches of one inference", f"{report.launches}"),
        ("all kernels, each timed alone", f"{report.kernels_us / 1e3:.3f} ms" if report.kernels_us else "not measured"),
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
    return tiles(facts)


def _key() -> str:
    spans = "".join(
        f'<span style="background:{COLOURS[one]}" title="{_escape(meaning)}">{one.value}</span>'
        for one, meaning in _MEANING.items()
    )
    return f'<p class="key">{spans}</p>'


def _cells(row: KernelRow) -> tuple[str, ...]:
    """Return the cells in the order of `_COLUMNS`, already HTML."""
    name = f"<code>{_escape(row.name)}</code>"
    if row.note:
        name += f'<br><span class="note">{_escape(row.note)}</span>'
    bottleneck = "" if row.bottleneck is None else row.bottleneck.value
    return (
        name,
        _escape(row.family or ""),
        _escape(row.route),
        "" if row.record_id is None else str(row.record_id),
        str(row.calls),
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
        bottleneck and f'<b style="color:{COLOURS[row.bottleneck]}">{bottleneck}</b>',
        _nodes(row.onnx_nodes),
    )


def number(value: float | None, unit: float = 1.0) -> str:
    """Return a quantity in a unit with three digits, empty when it is unknown."""
    if value is None:
        return ""
    scaled = value / unit
    return f"{scaled:,.0f}" if abs(scaled) >= 100 or scaled == int(scaled) else f"{scaled:.3g}"


def percent(value: float | None) -> str:
    """Return a part as a percentage, empty when it is unknown."""
    return "" if value is None else f"{value:.1%}"


def _nodes(nodes: Sequence[str]) -> str:
    if not nodes:
        return ""
    first = f"<code>{_escape(nodes[0])}</code>"
    if len(nodes) == 1:
        return first
    rest = "<br>".join(_escape(node) for node in nodes[1:])
    return f"<details><summary>{first} and {len(nodes) - 1} more</summary><code>{rest}</code></details>"


def _versions(versions: Mapping[str, str]) -> str:
    return f"<p>Made with {_escape(', '.join(f'{name} {version}' for name, version in versions.items()))}.</p>"


def _escape(text: str) -> str:
    return html.escape(text)
