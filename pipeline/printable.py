"""Text of others made fit to show: names in models and files may hold what a terminal obeys."""

from __future__ import annotations

import re

# C0 but tab and line feed, DEL, C1, marks and overrides of the writing direction, line separators, lone surrogates.
_OBEYED = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")

# Letters of a kernel's name.
_SHOWN = 40


def printable(text: str) -> str:
    """Return a text of the same length in which each character that a terminal would obey is `?`."""
    return _OBEYED.sub("?", text)


def last_line(said: Exception | str | None) -> str:
    """Return the line of an error that tells what is wrong: the last, after whatever trace comes before it."""
    lines = [line.strip() for line in str(said or "").splitlines() if line.strip()]
    return lines[-1] if lines else type(said).__name__ if isinstance(said, Exception) else "no message"


def duration(seconds: float) -> str:
    """Return a time that something takes, in the unit that people would use."""
    if seconds < 60:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 3600 else f"{seconds / 3600:.1f} h"


def milliseconds(value: float | None) -> str:
    """Return a model's latency with four figures, empty when it is unknown."""
    return "" if value is None else f"{value:.4g}"


def short(name: str) -> str:
    """Return the name of a kernel or a task as screens show it: begin and end, with its sizes; JSON has all of it."""
    kernel, bracket, sizes = name.partition("[")
    if len(kernel) > _SHOWN:
        kernel = f"{kernel[: _SHOWN // 2]}…{kernel[1 - _SHOWN // 2 :]}"
    return kernel + bracket + sizes
