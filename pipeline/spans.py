"""Stages of each process of a run, with start and end: a line for each stage, in one file that all of them write.

`RELAXTUNE_SPANS=FILE` names the file; without it nothing is written. A line is a JSON list, see `Span`. Clocks of all
processes of a machine agree, and a process that is killed has written what it had finished.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path

VARIABLE = "RELAXTUNE_SPANS"


@dataclass(frozen=True)
class Span:
    """A stage that is over."""

    # The stage, and its subject: a workload hash, a cell, or "".
    stage: str
    of: str
    # By the machine's monotonic clock.
    began_s: float
    seconds: float
    # Seconds of a processor that the thread itself took meanwhile; None where another thread did the work.
    cpu_s: float | None
    # Who did it.
    process: int
    thread: str

    @property
    def ended_s(self) -> float:
        """When it was over."""
        return self.began_s + self.seconds


@contextmanager
def span(stage: str, of: str = "") -> Iterator[None]:
    """Write down how long something takes, also when it fails."""
    file = _file()
    if file is None:
        yield
        return
    began, cpu = time.monotonic(), time.thread_time()
    try:
        yield
    finally:
        _write(file, stage, of, began, time.monotonic() - began, time.thread_time() - cpu)


def note_span(stage: str, of: str, began_s: float, ended_s: float) -> None:
    """Write down what another thread or process has done."""
    file = _file()
    if file is not None:
        _write(file, stage, of, began_s, ended_s - began_s, None)


def read_spans(path: Path) -> list[Span]:
    """Return the spans of a file, in the order in which they ended."""
    return [Span(*json.loads(line)) for line in path.read_text(encoding="utf-8").splitlines()]


def _file() -> int | None:
    path = os.environ.get(VARIABLE)
    return None if not path else _open(path)


@cache
def _open(path: str) -> int:
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)


def _write(file: int, stage: str, of: str, began_s: float, seconds: float, cpu_s: float | None) -> None:
    thread = threading.current_thread().name
    line = [stage, of, round(began_s, 6), round(seconds, 6), cpu_s and round(cpu_s, 6), os.getpid(), thread]
    # One call a line: lines of several processes do not mix.
    os.write(file, f"{json.dumps(line)}\n".encode())
