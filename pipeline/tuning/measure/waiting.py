"""Work that waits for devices, in the order in which each takes it; a choice among ten thousand is as quick as of ten.

Work of a workload goes to the device that began it, its home. A device takes what has the least rank of its own and of
workloads without a home. Where there is none, it takes the least of other devices' work.

There is a heap for each home, and one for work without. When a workload gets a home, what waits of it in the latter
moves once it comes to the top there.
"""

from __future__ import annotations

import heapq
import itertools
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from typing import Generic, Protocol, TypeVar


class Ranked(Protocol):
    """Something to do for a workload; the least rank is done first."""

    @property
    def workload(self) -> str:
        """Workload hash."""
        ...

    @property
    def rank(self) -> tuple[int, int]:
        """Its place."""
        ...


W = TypeVar("W", bound=Ranked)
# The heap of work without a home; those of devices have their `id`.
_NO_HOME = 0


class WaitingWork(Generic[W]):
    """What waits, and the homes of workloads. It is not safe between threads."""

    def __init__(self) -> None:
        self._heaps: dict[int, list[tuple[tuple[int, int], int, W]]] = defaultdict(list)
        self._homes: dict[str, int] = {}
        self._counts: Counter[str] = Counter()
        self._order = itertools.count()

    def __bool__(self) -> bool:
        """Whether anything waits."""
        return any(self._heaps.values())

    def has(self, workload: str) -> bool:
        """Whether something waits for a workload."""
        return self._counts[workload] > 0

    def put(self, work: W) -> None:
        """Let something wait."""
        self._counts[work.workload] += 1
        self._push(work)

    def take(self, device: object, held_up: Callable[[str], bool]) -> W | None:
        """Return what a device does next, and make it the home of that workload if it has none; None without any.

        Parameters
        ----------
        held_up : callable
            Whether this device must not take work of a workload now.
        """
        left: list[W] = []
        key = self._least((_NO_HOME, id(device)), held_up, left)
        if key is None:
            key = self._least(tuple(self._heaps), held_up, left)
        found = None if key is None else heapq.heappop(self._heaps[key])[2]
        for one in left:
            self._push(one)
        if found is not None:
            self._counts[found.workload] -= 1
            self._homes.setdefault(found.workload, id(device))
        return found

    def leave(self, device: object) -> None:
        """Take a device's workloads from it."""
        self._homes = {name: home for name, home in self._homes.items() if home != id(device)}
        for _, _, work in self._heaps.pop(id(device), []):
            self._push(work)

    def take_all(self) -> list[W]:
        """Return everything; nothing waits any more."""
        found = [work for heap in self._heaps.values() for _, _, work in heap]
        self._heaps.clear()
        self._counts.clear()
        return found

    def _push(self, work: W) -> None:
        home = self._homes.get(work.workload, _NO_HOME)
        heapq.heappush(self._heaps[home], (work.rank, next(self._order), work))

    def _least(self, keys: Iterable[int], held_up: Callable[[str], bool], left: list[W]) -> int | None:
        """Return the heap whose top is least; tops that are held up are taken away into `left`."""
        tops = []
        # Work moves only from the first of them, the heap without a home.
        for key in sorted(keys):
            heap = self._heaps[key]
            while heap and (
                (moved := self._homes.get(heap[0][2].workload, _NO_HOME) != key) or held_up(heap[0][2].workload)
            ):
                work = heapq.heappop(heap)[2]
                if moved:
                    self._push(work)
                else:
                    left.append(work)
            if heap:
                tops.append((heap[0][:2], key))
        return min(tops, default=(None, None))[1]
