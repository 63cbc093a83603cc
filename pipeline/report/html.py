"""Reports as one HTML page: styles and plots inside, nothing fetched from anywhere."""

from __future__ import annotations

import html
from collections.abc import Collection, Mapping, Sequence

from relaxtune.pipeline.printable import printable
from relaxtune.pipeline.report.error_plot import error_histograms
from relaxtune.pipeline.report.kernel import Bottleneck, KernelRow
from relaxtune.pipeline.report.plot import COLOURS, roofline, shares
from relaxtune.pipeline.report.report import Report

_STYLE = """
body { font: 14px/1.45 system-ui, sans-serif; margin: 2rem auto; max-width: 1600px; padding: 0 1rem; color: #1a202c }
h1 { font-size: 1.5rem } h2 { font-size: 1.15rem; margin-top: 2rem }
.wide { overflow-x: auto } svg { width: 100%; min-width: 40rem; height: auto; font: 12px system-ui, sans-serif }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums }
th, td { padding: .25rem .5rem; border-bottom: 1px solid #e2e8f0; text-align: right; vertical-align: top }
th { background: #f7fafc } .left { text-align: left } td:has(code) { min-width: 16rem }
.facts { display: flex; flex-wrap: wrap; gap: .5rem 2rem } .facts b { display: block; font-size: 1.2rem }
.note { color: #744210 } .key span { padding: 0 .6em; margin-right: .6em; color: white; border-radius: .3em }
code { overflow-wrap: anywhere }
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
_LEFT_COLUMNS = frozenset({"kernel", "family", "route", "bottleneck", "ONNX nodes"})


def render_page(reports: Sequence[Report]) -> str:
    """Return the page of one report or several."""
    title = ", ".join(dict.fromkeys(report.model for report in reports)) or "nothing measured"
    body = "".join(map(section, reports)) or "<p>No job of this database has a valid record.</p>"
    return page(title, body)


def page(title: str, body: str, head: str = "") -> str:
    """Return a whole page; `body` is HTML, and so is what goes into its head besides."""
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8">'
        f'<meta name="viewport" content="width=device-width, initial-scale=1"><title>{_escape(title)}</title>'
        f"<style>{_STYLE}</style>{head}</head><body>{body}</body></html>\n"
    )


def table(columns: Sequence[str], rows: Sequence[Sequence[str]], left: Collection[str] = ()) -> str:
    """Return a table without the columns that are empty in all rows.

    Its cells are HTML already. Those of the columns named in `left` begin at the left.
    """
    shown = [place for place in range(len(columns)) if not rows or any(row[place] for row in rows)]
    sides = [' class="left"' if name in left else "" for name in columns]
    head = "".join(f"<th{sides[place]}>{_escape(columns[place])}</th>" for place in shown)
    body = "".join(
        "<tr>" + "".join(f"<td{sides[place]}>{row[place]}</td>" for place in shown) + "</tr>" for row in rows
    )
    return _wide(f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>")


def _wide(content: str) -> str:
    """Return content that scrolls by itself where the page is narrower."""
    return content and f'<div class="wide">{content}</div>'


def tiles(facts: Sequence[tuple[str, str]]) -> str:
    """Return facts, a name and a value each, beside each other."""
    return f'<div class="facts">{"".join(f"<div><b>{_escape(v)}</b>{_escape(name)}</div>" for name, v in facts)}</div>'


def section(report: Report) -> str:
    """Return the part of a page that is one report."""
    parts = [
        f"<h1>{_escape(report.model)}</h1>",
        f"<p>{_escape(report.source)}; {_escape(report.target)}; times of {_escape(report.device or 'no device')}</p>",
        _facts(report),
        *(f'<p class="note">{_escape(note)}{"" if note.endswith((".", "?")) else "."}</p>' for note in report.notes),
        "<h2>Where the time goes</h2>",
        _key(),
        _wide(shares(report.kernels)) or "<p>No kernel has a time.</p>",
    ]
    plot = roofline(report.kernels, report.ceilings)
    if plot:
        parts += ["<h2>Rates under the device's ceilings</h2>", _wide(plot)]
    if report.ceilings is not None:
        parts.append(f"<p>Ceilings: {_escape(report.ceilings.source)}.</p>")
    errors = error_histograms(report.validation or {})
    if errors:
        parts += ["<h2>Errors of the last validation over tolerance</h2>", _wide(errors)]
    parts += [
        "<h2>Kernels</h2>",
        table(_COLUMNS, [*map(_cells, report.kernels)], _LEFT_COLUMNS),
        _versions(report.versions or {}),
    ]
    return printable("".join(parts))


def _facts(report: Report) -> str:
    facts = [
        ("kernels, launches of one inference", f"{len(report.kernels)}, {report.launches}"),
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
