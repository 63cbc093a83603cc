"""HTML that the pages share: cells whose text is escaped, links, times."""

from __future__ import annotations

import html
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from datetime import datetime

from relaxtune.pipeline.report.html import table

Html = str
NONE = "<p>None.</p>"


@dataclass(frozen=True)
class Page:
    """A title, and the HTML between the navigation and the foot.

    `live` pages are read anew every few seconds; one that `waits` stands for a page that is being made.
    """

    title: str
    body: Html
    live: bool = False
    waits: bool = False


@dataclass(frozen=True)
class Markup:
    """HTML that is not escaped again."""

    html: Html


def row(*values: object) -> tuple[Html, ...]:
    """Return the cells of a row; all but `Markup` is escaped."""
    return tuple(value.html if isinstance(value, Markup) else text(str(value)) for value in values)


def rows_table(columns: Sequence[str], rows: Sequence[Sequence[Html]], left: Collection[str]) -> Html:
    """Return a table, or a word where there are no rows."""
    return table(columns, rows, left) if rows else NONE


def link(address: str, name: str) -> Markup:
    """Return a link."""
    return Markup(f'<a href="{html.escape(address)}">{text(name)}</a>')


def plot(svg: Html) -> Html:
    """Return a plot that scrolls by itself where the page is narrower; empty for an empty one."""
    return svg and f'<div class="wide">{svg}</div>'


def minute(moment: datetime | None) -> str:
    """Return a time without seconds, empty for None."""
    return "" if moment is None else f"{moment:%Y-%m-%d %H:%M}"


def text(words: str) -> Html:
    """Return a text as HTML."""
    return html.escape(words)
