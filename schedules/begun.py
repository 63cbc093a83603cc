"""Work on functions that begins before it is asked for: a result is made once, by whoever comes first.

A kernel can be lowered and compiled while Python still chooses the others. Who begins it does what the compilation does
later, in the same way; what that has in common with it, a function as it stands before some step, finds the result of
the step here. Where nothing began before, or something else did, the step is done as ever. Functions are one where they
have one body, not an equal one: that takes no time to compare.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from typing import Any, TypeVar

import tvm_ffi
from tvm.ir import IRModule
from tvm.tirx import PrimFunc

from relaxtune.schedules.targets.host import usable_cpus

Result = TypeVar("Result")


class Begun:
    """Threads, one for each core, and the results of steps by the step's name and the function."""

    def __init__(self) -> None:
        self.pool = ThreadPoolExecutor(max(1, len(usable_cpus())))
        self._results: dict[tuple[object, ...], Future[Any]] = {}
        self._lock = threading.Lock()

    def begin(self, step: str, func: PrimFunc, start: Callable[[], Future[Result]]) -> Future[Result]:
        """Return the result of a step, which this starts where nobody has; `start` must be quick."""
        key = step, func.body, tuple(func.params), tvm_ffi.StructuralKey(func.attrs)
        with self._lock:
            if key not in self._results:
                self._results[key] = start()
            return self._results[key]

    def result(self, step: str, func: PrimFunc, call: Callable[[], Result]) -> Result:
        """Return the result of a step, which is the call's where nobody has begun it; waits where one has."""
        mine: Future[Result] = Future()
        future = self.begin(step, func, lambda: mine)
        if future is mine:
            try:
                mine.set_result(call())
            except BaseException as error:
                mine.set_exception(error)
        return future.result()


_CURRENT: ContextVar[Begun | None] = ContextVar("begun", default=None)


@contextmanager
def holding(variable: ContextVar[Result], value: Result) -> Iterator[None]:
    """Let a variable have a value in this thread, inside the block."""
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)


def sharing(begun: Begun) -> AbstractContextManager[None]:
    """Share the results of steps in this thread, inside the block, with all that share the same ones."""
    return holding(_CURRENT, begun)


@contextmanager
def begun_work() -> Iterator[Begun]:
    """Give what is shared in this thread, or something new; of that, work that nobody waits for ends with the block."""
    shared = _CURRENT.get()
    if shared is not None:
        yield shared
        return
    begun = Begun()
    try:
        yield begun
    finally:
        begun.pool.shutdown(cancel_futures=True)


def shared_step(step: str, call: Callable[[IRModule], Result]) -> Callable[[IRModule], Result]:
    """Return the step, which takes results that began before for a module of one function, and shares its own.

    It must depend on the function alone: pass context and target are those of who began it.
    """
    begun = _CURRENT.get()
    if begun is None:
        return call

    def shared(mod: IRModule) -> Result:
        functions = list(mod.functions.values())
        return begun.result(step, functions[0], lambda: call(mod)) if len(functions) == 1 else call(mod)

    return shared
