"""The matrix of exports as a Markdown page: a row an export, what was validated in each column, and what was not."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

Cells = Sequence[Mapping[str, object]]

# (family, dtype of the graph) -> what is known beyond the message.
_NOTES = {
    (
        "gemma2",
        "float16",
    ): "one query, padding itself, sees nothing but padding in its window: the graph adds "
    "-65504 to its scores in float16, which makes them equal, the reference in float32, which does not"
}
_AXES = ("static", "symbolic", "pinned")


def render(cells: Cells, environment: Mapping[str, str]) -> str:
    """Return the page."""
    plain = [cell for cell in cells if cell["opset"] is None and not cell["dtype"]]
    half = [cell for cell in cells if cell["dtype"]]
    opsets = [cell for cell in cells if cell["opset"] is not None]
    exports = {(cell["family"], cell["exporter"], cell["opset"], cell["dtype"], _is_dynamic(cell)) for cell in cells}
    good = {
        (cell["family"], cell["exporter"], cell["opset"], cell["dtype"], _is_dynamic(cell))
        for cell in cells
        if cell["state"] == "validated"
    }
    versions = ", ".join(f"{name} {version}" for name, version in environment.items())
    text = [
        "# Exports of transformers, validated on this CPU",
        "",
        f"Made by `python -m tests.export.matrix`; {versions}.",
        "",
        f"{len(good)} of {len(exports)} exports validated, "
        f"{sum(cell['state'] == 'validated' for cell in cells)} of {len(cells)} ways of compiling them. A number is "
        "the smallest absolute tolerance that would have passed (beside `rtol`), in units of the output's root mean "
        "square where that is above 1; symbolic artifacts were run at six sizes. `-`: see the list below.",
        "",
        *_table(plain, sorted({str(cell["precision"]) for cell in plain})),
        "",
    ]
    if half:
        text += ["## Graphs exported in half precision", "", *_table(half, [""]), ""]
    if opsets:
        text += ["## Opsets (symbolic axes)", "", *_opset_table(opsets), ""]
    failed = [cell for cell in cells if cell["state"] != "validated"]
    if failed:
        text += ["## What was not validated, and why", ""]
        text += [f"- `{cell['key']}` {cell['state']}: {_short(str(cell['reason']))}{_note(cell)}" for cell in failed]
        text.append("")
    return "\n".join(text)


def _is_dynamic(cell: Mapping[str, object]) -> bool:
    return cell["axes"] != "static"


def _table(cells: Cells, precisions: Sequence[str]) -> list[str]:
    by_place = {(c["family"], c["exporter"], c["dtype"], c["axes"], c["precision"]): c for c in cells}
    columns = [
        (axes, precision)
        for precision in precisions
        for axes in _AXES
        if any(cell["axes"] == axes and cell["precision"] == precision for cell in cells)
    ]
    heads = [f"{axes} {precision}".strip() for axes, precision in columns]
    lines = [f"| family | exporter | {' | '.join(heads)} |", f"|---|---|{'---|' * len(heads)}"]
    for family, exporter, dtype in sorted({(str(c["family"]), str(c["exporter"]), str(c["dtype"])) for c in cells}):
        found = [_entry(by_place.get((family, exporter, dtype, axes, precision))) for axes, precision in columns]
        lines.append(f"| {family} | {' '.join([exporter, dtype]).strip()} | {' | '.join(found)} |")
    return lines


def _opset_table(cells: Cells) -> list[str]:
    versions = sorted({int(str(cell["opset"])) for cell in cells})
    by_place = {(c["family"], c["exporter"], c["opset"], c["axes"]): c for c in cells}
    lines = [f"| family | exporter | {' | '.join(map(str, versions))} |", f"|---|---|{'---|' * len(versions)}"]
    for family, exporter in sorted({(str(cell["family"]), str(cell["exporter"])) for cell in cells}):
        found = [_entry(by_place.get((family, exporter, version, "symbolic"))) for version in versions]
        lines.append(f"| {family} | {exporter} | {' | '.join(found)} |")
    return lines


def _entry(cell: Mapping[str, object] | None) -> str:
    if cell is None:
        return ""
    needed = cell.get("atol_needed")
    return f"{float(str(needed)):.1e}" if cell["state"] == "validated" and needed is not None else "-"


def _note(cell: Mapping[str, object]) -> str:
    note = _NOTES.get((str(cell["family"]), str(cell["dtype"])))
    return f" ({note})" if note else ""


def _short(reason: str) -> str:
    return reason if len(reason) <= 300 else reason[:297] + "..."
