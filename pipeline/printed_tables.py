"""`TableView`: every table that a command prints."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table
from rich.text import Text

Item = TypeVar("Item")
# Cells up to this many letters are not folded where there is room; no column of a table has fewer than the least.
_NARROW, _LEAST = 12, 8
# The room that a name wants; with less, optional columns are left out.
_NAME = 24
# Names of nodes are cut to so many letters, at the start, where they differ least.
_LONG = 40


@dataclass(frozen=True)
class TableView:
    """A table to print: its title, column names, and rows of already formatted cells; rich draws it."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    caption: str = ""
    right: Collection[str] = ()  # Columns that end at the right.
    optional: Sequence[str] = ()  # Columns to leave out where there is no room, in this order.

    @classmethod
    def of(
        cls,
        title: str,
        items: Iterable[Item],
        columns: Mapping[str, Callable[[Item], object]],
        caption: str = "",
        right: Collection[str] = (),
        optional: Sequence[str] = (),
    ) -> TableView:
        """Return a table with a row for each item; `columns` says what a cell shows, nothing for None."""
        cells = ([show(item) for show in columns.values()] for item in items)
        rows = tuple(tuple("" if cell is None else str(cell) for cell in row) for row in cells)
        return cls(title, tuple(columns), rows, caption, right, optional)

    @classmethod
    def facts(cls, title: str, facts: Iterable[tuple[str, object]], value: str = "found") -> TableView:
        """Return a table of the facts on one thing: a row for each, by its name."""
        return cls.of(title, facts, {"what": lambda fact: fact[0], value: lambda fact: fact[1]})

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Yield the table, in the width that there is; a row is a section of its own where the columns have no room."""
        # Columns that are empty, or have no number, in every row are left out.
        shown = [
            column
            for column in zip(self.columns, *self.rows, strict=True)
            if not self.rows or any(cell.strip("-") for cell in column[1:])
        ]
        names, left_out = {column[0] for column in shown}, []
        for name in (name for name in self.optional if name in names):
            if sum(3 + min(max(map(len, column)), _NAME) for column in shown) < options.max_width:
                break
            shown = [column for column in shown if column[0] != name]
            left_out.append(name)
        more = f"no room for {', '.join(left_out)}: see --format json" if left_out else ""
        title = Text(self.title, style="table.title")
        caption = Text("\n".join(filter(None, (self.caption, more)))) if self.caption or more else None
        columns, *rows = zip(*shown, strict=True)
        widths = [max(map(len, column)) for column in shown]
        room = options.max_width - 3 * len(widths) - 1
        if sum(min(width, _LEAST) for width in widths) > room:
            table = Table(title=title, title_justify="left", caption=caption, caption_justify="left", show_header=False)
            for row in rows:
                for column, cell in zip(columns, row, strict=True):
                    if cell:
                        table.add_row(Text(column), Text(cell))
                table.add_section()
            yield table
            return
        table = Table(title=title, title_justify="left", caption=caption, caption_justify="left")
        narrow = [width <= _NARROW for width in widths]
        # Numbers and words keep their width where names have room to be folded beside them.
        kept = sum(width for width, short in zip(widths, narrow, strict=True) if short)
        whole = room - kept >= _NARROW * narrow.count(False)
        for column, short in zip(columns, narrow, strict=True):
            table.add_column(
                column, overflow="fold", no_wrap=short and whole, justify="right" if column in self.right else "left"
            )
        for row in rows:
            # As plain text: names and messages may hold brackets, which rich would read as markup.
            table.add_row(*(Text(cell) for cell in row))
        yield table


def first_of(names: Sequence[str]) -> str:
    """Return the first name, cut at its start if it is long, and how many more there are."""
    if not names:
        return ""
    first = names[0] if len(names[0]) <= _LONG else "…" + names[0][1 - _LONG :]
    return first + (f" and {len(names) - 1} more" if len(names) > 1 else "")
