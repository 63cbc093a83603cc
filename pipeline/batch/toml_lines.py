"""Lines of a TOML file: where each key is, which `tomllib` does not tell."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence

Place = tuple[str | int, ...]

_HEADER = re.compile(r"\s*(\[\[?)\s*([^\[\]]+?)\s*\]\]?\s*(#.*)?$")
_KEY = re.compile(r"\s*([A-Za-z0-9_\-.\"' ]+?)\s*=")
_INLINE_KEY = re.compile(r"[{,]\s*([A-Za-z0-9_-]+)\s*=")
_STRINGS = re.compile(r"\"(?:[^\"\\]|\\.)*\"|'[^']*'")


class TomlLines:
    """Finds the line of a key, such as `("cells", 0, "models")`; the second `[[cells]]` table is `("cells", 1)`.

    Parameters
    ----------
    text : str
        A TOML document that `tomllib` has read.
    """

    def __init__(self, text: str) -> None:
        """Read the headers and keys; strings of several lines are taken for one line each."""
        self._lines = text.splitlines()
        self._starts: dict[Place, int] = {}
        table: Place = ()
        tables: Counter[Place] = Counter()
        depth = 0
        for number, line in enumerate(self._lines, start=1):
            bare = _STRINGS.sub(lambda found: "_" * len(found[0]), line).partition("#")[0]
            header, key = _HEADER.match(line), _KEY.match(line)
            if depth == 0 and header is not None:
                table = _parts(header[2])
                if header[1] == "[[":
                    tables[table] += 1
                elif len(table) > 1 and table[:1] in tables:
                    table = (table[0], tables[table[:1]] - 1, *table[1:])
                if header[1] == "[[":
                    table = (*table, tables[table] - 1)
                self._starts.setdefault(table, number)
            elif depth == 0 and key is not None:
                place = (*table, *_parts(key[1]))
                self._starts.setdefault(place, number)
                for inner in _INLINE_KEY.findall(bare):
                    self._starts.setdefault((*place, inner), number)
            depth += sum(map(bare.count, "[{")) - sum(map(bare.count, "]}")) if header is None or depth else 0

    def find(self, place: Sequence[str | int], value: object = None) -> int:
        """Return the line of a key, of the table around it where it is not there, and 1 where there is neither.

        `value` is a text of a list: its own line is returned where the list has several.
        """
        known = tuple(place)
        while known and known not in self._starts:
            known = known[:-1]
        start = self._starts.get(known, 1)
        if isinstance(value, str):
            later = [line for line in self._starts.values() if line > start]
            span = range(start, min(later, default=len(self._lines) + 1))
            return next((line for line in span if value in self._lines[line - 1]), start)
        return start


def _parts(key: str) -> Place:
    return tuple(part.strip().strip("\"'") for part in key.split("."))
