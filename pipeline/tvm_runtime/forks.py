"""Locks that a forked process finds free: a fork waits for whoever holds them.

Else the child would have a copy of a lock that another thread held in that moment, and no thread to release it.
"""

from __future__ import annotations

import os
import threading
import weakref

# A fork does not wait for a holder that waits for the forking thread itself.
_WAIT_MAX_S = 30.0
_locks: weakref.WeakSet[threading.RLock] = weakref.WeakSet()
_making = threading.RLock()
_held: list[threading.RLock] = []


def lock_over_forks() -> threading.RLock:
    """Return a new lock that is free, with what it guards whole, in a process forked at any moment."""
    with _making:
        lock = threading.RLock()
        _locks.add(lock)
        return lock


def _before() -> None:
    for lock in (_making, *_locks):
        if lock.acquire(timeout=_WAIT_MAX_S):
            _held.append(lock)


def _after() -> None:
    while _held:
        _held.pop().release()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before, after_in_parent=_after, after_in_child=_after)
