"""Whether a process at work stands still or works without end; a busy machine is no reason for either."""

from __future__ import annotations

import psutil

# Looks, a second apart, at a process that does nothing and waits for no disk, after which it stands still.
STILL_LOOKS = 120


class Watch:
    """Looked at every second while a process should work.

    Parameters
    ----------
    pid : int
        The process; its children count with it.
    limit_cpu_s : float
        Seconds of a processor that its work may take.
    """

    def __init__(self, pid: int, limit_cpu_s: float) -> None:
        self._pid, self._limit_s = pid, limit_cpu_s
        self._began_s = self._last_s = self._look()[0]
        self._still = 0

    def stuck(self) -> str | None:
        """Return why its answer is not waited for any longer; None while it is at work, or gone."""
        used_s, idle = self._look()
        self._still = self._still + 1 if idle and used_s <= self._last_s else 0
        self._last_s = used_s
        if used_s - self._began_s > self._limit_s:
            return f"the process computed for {self._limit_s:g} s of a processor without an answer"
        if self._still >= STILL_LOOKS:
            return f"the process did nothing for {STILL_LOOKS} s and gave no answer"
        return None

    def _look(self) -> tuple[float, bool]:
        """Return the processor's seconds so far, and whether the process waits for something else than that."""
        used_s, idle = 0.0, True
        try:
            process = psutil.Process(self._pid)
            family = [process, *process.children(recursive=True)]
        except psutil.NoSuchProcess:
            return used_s, False
        for one in family:
            try:
                times, status = one.cpu_times(), one.status()
            except psutil.NoSuchProcess:
                continue
            used_s += times.user + times.system
            idle = idle and status not in (psutil.STATUS_RUNNING, psutil.STATUS_DISK_SLEEP)
        return used_s, idle
