"""Replies of a worker, and errors in place of one."""

from __future__ import annotations

from dataclasses import dataclass

from relaxtune.pipeline.workers.limits import Limit


@dataclass(frozen=True)
class Reply:
    """The answer of a child: a value, or the text of the exception it met, and its resident memory afterwards."""

    value: object | None
    error: str | None
    rss_bytes: int = 0


class WorkerError(Exception):
    """A request has no answer. The next one goes to another child.

    `from_outside` says that a signal ended it which no crash sends: the user, the system or its memory killer did so.
    """

    from_outside = False

    @property
    def short(self) -> str:
        """The first line, and the last line that the child wrote."""
        lines = str(self).strip().splitlines() or [type(self).__name__]
        return " ".join(dict.fromkeys([lines[0], lines[-1].strip()]))


class WorkerDiedError(WorkerError):
    """The child ended without an answer; the message says how, with the end of what it wrote to stderr."""

    def __init__(self, message: str, *, from_outside: bool = False) -> None:
        super().__init__(message)
        self.from_outside = from_outside


class WorkerKilledError(WorkerError):
    """The child was killed at a limit of the request."""

    def __init__(self, limit: Limit, message: str) -> None:
        super().__init__(message)
        self.limit = limit


class WorkerStoppedError(WorkerError):
    """The run was stopped, or the worker left."""


class WorkerStartError(WorkerError):
    """No child can be started."""
