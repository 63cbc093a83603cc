"""Pages out of templates (`templates/*.html`): tables, numbers as text, and everything escaped but `Markup`."""

from __future__ import annotations

import functools
from collections.abc import Collection, Sequence
from datetime import datetime
from pathlib import Path

import jinja2
from markupsafe import Markup, escape

from relaxtune.pipeline.printable import printable

# Words of any length: where the page is narrow, they keep a width that can be read.
_TEXT_COLUMNS = frozenset({"why", "error", "reason", "cause"})


def render(template: str, **values: object) -> Markup:
    """Return a template filled with values; control characters of terminals become visible."""
    return Markup(printable(_environment().get_template(template).render(values)))


def page(title: str, body: Markup, head: Markup | str = "") -> str:
    """Return a whole page of one file: its style is inside, and nothing is fetched from anywhere."""
    return str(render("page.html", title=title, body=body, head=head))


def table(columns: Sequence[str], rows: Sequence[Sequence[object]], left: Collection[str] | None = None) -> Markup:
    """Return a table without the columns that are empty in all rows; a word where there are no rows.

    Cells of the columns named in `left` (None: of all) begin at the left. So do words of any length, and moments
    (`began (UTC)`), which stay on one line.
    """
    if not rows:
        return Markup("<p>None.</p>")
    shown = [place for place in range(len(columns)) if any(str(row[place]) for row in rows)]
    return render(
        "table.html",
        columns=[(columns[place], _kind(columns[place], left)) for place in shown],
        rows=[[row[place] for place in shown] for row in rows],
    )


def link(address: str, name: object) -> Markup:
    """Return a link."""
    return Markup('<a href="{}">{}</a>').format(address, name)


def code(name: object) -> Markup:
    """Return a name in the letters of code; empty for an empty one."""
    return Markup("<code>{}</code>").format(name) if name else Markup()


def note(text: object) -> Markup:
    """Return a remark in the colour of remarks; empty for an empty one."""
    return Markup('<span class="note">{}</span>').format(text) if text else Markup()


def broken(lines: Sequence[object]) -> Markup:
    """Return lines below each other."""
    return Markup("<br>").join(escape(line) for line in lines)


def number(value: float | None, unit: float = 1.0) -> str:
    """Return a quantity in a unit with three digits, empty when it is unknown."""
    if value is None:
        return ""
    scaled = value / unit
    return f"{scaled:,.0f}" if abs(scaled) >= 100 or scaled == int(scaled) else f"{scaled:.3g}"


def percent(value: float | None) -> str:
    """Return a part as a percentage, empty when it is unknown."""
    return "" if value is None else f"{value:.1%}"


def minute(moment: datetime | None) -> str:
    """Return a time without seconds, empty for None."""
    return "" if moment is None else f"{moment:%Y-%m-%d %H:%M}"


def _kind(column: str, left: Collection[str] | None) -> str:
    if column.endswith("(UTC)"):
        return "when"
    return "text" if column in _TEXT_COLUMNS else "left" if left is None or column in left else ""


@functools.cache
def _environment() -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent / "templates"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.globals["table"] = table
    environment.filters |= {"number": number, "percent": percent, "minute": minute}
    return environment
