"""A page of the dashboard: a heading, facts, and sections of tables and charts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from markupsafe import Markup

from relaxtune.pipeline.pages.render import render


@dataclass(frozen=True)
class Page:
    """A title, and the HTML between the navigation and the foot.

    `live` pages are read anew every few seconds; one that `waits` stands for a page that is being made.
    """

    title: str
    body: Markup
    live: bool = False
    waits: bool = False


@dataclass(frozen=True)
class Section:
    """A part of a page: its heading ("" for none), a table or chart, and a remark behind it."""

    heading: str
    content: Markup
    remark: Markup | str = ""


def sections(
    heading: str, parts: Sequence[Section], *, subtitle: Markup | str = "", facts: Sequence[tuple[str, str]] = ()
) -> Markup:
    """Return the body of a page; sections without content are left out."""
    shown = [(one.heading, one.content, one.remark) for one in parts if one.content]
    return render("sections.html", heading=heading, subtitle=subtitle, facts=facts, sections=shown)


def chart(svg: Markup) -> Markup:
    """Return a chart that scrolls by itself where the page is narrower; empty for an empty one."""
    return Markup('<div class="wide">{}</div>').format(svg) if svg else svg


def remark(text: str) -> Markup:
    """Return a paragraph in the colour of remarks."""
    return Markup('<p class="note">{}</p>').format(text)
