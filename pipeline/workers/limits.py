"""Limits of one request to a worker, and the clock of its deadline."""

from __future__ import annotations

import time
from dataclasses import dataclass
from enum import Enum

import psutil

from relaxtune.pipeline.workers.child import resident_bytes

# A process that looks at its clock several times a second was stopped, or its machine slept, if it missed this long.
_ASLEEP_S = 5.0
# Seconds between two looks at a process that has a limit of processor time.
LOOK_S = 1.0
# Looks at a process that does nothing and waits for no disk, after which it stands still.
STILL_LOOKS = 120


class Limit(Enum):
    """The limit that a request went beyond."""

    TIME = "time"
    MEMORY = "memory"
    WORK = "work"


@dataclass(frozen=True)
class Limits:
    """Limits of the answer to a request; None is no limit."""

    timeout_s: float | None = None  # Seconds in which the machine was awake.
    rss_bytes: int | None = None  # Resident memory.
    # Seconds of a processor, children included. A process that does nothing is over this limit too: a busy machine is
    # no reason for either.
    cpu_s: float | None = None


class AwakeClock:
    """Seconds without those in which the process was stopped or the machine asleep; for one thread.

    A child that slept too has not had its time. Read the clock several times a second.
    """

    def __init__(self) -> None:
        self._last, self._asleep_s = time.monotonic(), 0.0

    def seconds(self) -> float:
        """Return the seconds since some moment."""
        now = time.monotonic()
        missed, self._last = now - self._last, now
        if missed > _ASLEEP_S:
            self._asleep_s += missed
        return now - self._asleep_s


class Watch:
    """Looks at a process several times a second while it should answer a request."""

    def __init__(self, pid: int, limits: Limits) -> None:
        self._pid, self._limits, self._clock = pid, limits, AwakeClock()
        self._began_s = self._looked_s = self._clock.seconds()
        self._cpu_began_s: float | None = None
        self._cpu_s = 0.0
        self._still = 0

    @property
    def seconds(self) -> float:
        """Seconds since the request was sent."""
        return self._clock.seconds() - self._began_s

    def exceeded(self) -> tuple[Limit, str] | None:
        """Return the limit that the process is beyond, and a message; None while it may go on."""
        now_s, limits = self._clock.seconds(), self._limits
        if limits.timeout_s is not None and now_s - self._began_s > limits.timeout_s:
            return Limit.TIME, f"killed after {limits.timeout_s:g} s"
        if limits.rss_bytes is not None and (rss_bytes := resident_bytes(self._pid)) > limits.rss_bytes:
            allowed = f"{limits.rss_bytes / 2**20:.0f} are allowed"
            return Limit.MEMORY, f"killed at {rss_bytes / 2**20:.0f} MiB of memory, {allowed}"
        if limits.cpu_s is None or now_s - self._looked_s < LOOK_S:
            return None
        self._looked_s = now_s
        used_s, idle = _work_of(self._pid)
        if self._cpu_began_s is None:
            self._cpu_began_s = used_s
        self._still = self._still + 1 if idle and used_s <= self._cpu_s else 0
        self._cpu_s = used_s
        if used_s - self._cpu_began_s > limits.cpu_s:
            return Limit.WORK, f"the process computed for {limits.cpu_s:g} s of a processor without an answer"
        if self._still >= STILL_LOOKS:
            return Limit.WORK, f"the process did nothing for {STILL_LOOKS} s and gave no answer"
        return None


def _work_of(pid: int) -> tuple[float, bool]:
    """Return the seconds of a processor that a process and its children took, and whether all are idle."""
    used_s, idle = 0.0, True
    try:
        process = psutil.Process(pid)
        family = [process, *process.children(recursive=True)]
    except psutil.NoSuchProcess:
        return used_s, False
    for member in family:
        try:
            times, status = member.cpu_times(), member.status()
        except psutil.NoSuchProcess:
            continue
        used_s += times.user + times.system
        idle = idle and status not in (psutil.STATUS_RUNNING, psutil.STATUS_DISK_SLEEP)
    return used_s, idle
