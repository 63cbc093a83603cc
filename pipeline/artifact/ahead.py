"""Kernels that are lowered and compiled in threads while the others are still chosen.

To choose the kernels of a model with symbolic sizes, and to build them, takes one thread of Python seconds, in which
the other cores would wait; the passes of TVM and CUDA's compiler need no Python. All that needs Python, which is what
writes CUDA source, is done by the thread that chooses, between two choices: a second thread of Python would hold it up.
Kernels are lowered at once, and compiled when they are so many that each is a unit (`pipeline.codegen.cuda_units`).
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar

import tvm
from tvm import tirx
from tvm.ir import IRModule
from tvm.ir.transform import PassContext

from relaxtune.pipeline.codegen.cuda_units import KERNELS_MIN, BeginUnit, split_units
from relaxtune.pipeline.codegen.finish import device_toolchain, finish_kernels
from relaxtune.schedules.begun import Begun, holding, sharing
from relaxtune.schedules.side_by_side import context_like
from relaxtune.schedules.templates.launch_table import count_kernels, is_table
from relaxtune.schedules.templates.lowering import lower_kernels


class KernelsAhead:
    """Compiles the kernels of tables for the next compilation, which has this target and this pass context."""

    def __init__(self, target: tvm.target.Target, context: PassContext) -> None:
        self._target, self._context = target, context
        self._kernels = 0
        self._lowered: list[Future[list[IRModule]]] = []
        self._stack = ExitStack()
        self._begun: Begun | None = None
        self._begin_unit: BeginUnit | None = None

    def begin(self, name: str, scheduled: tirx.PrimFunc) -> None:
        """Begin to compile a function that the module will have under a name."""
        self._kernels += count_kernels(scheduled)
        if is_table(scheduled):
            self._begun = self._begun or Begun()
            self._lowered.append(self._begun.pool.submit(self._lower, self._begun, name, scheduled))
        if self._kernels >= KERNELS_MIN and self._begun is not None:
            if self._begin_unit is None:
                self._begin_unit = self._stack.enter_context(device_toolchain(self._target))
            self._compile_lowered()

    @contextmanager
    def toolchain(self) -> Iterator[None]:
        """Make TVM compile device code with the project's compilers inside the block, and take what began."""
        try:
            if self._begin_unit is None:
                self._stack.enter_context(device_toolchain(self._target))
            if self._begun is not None:
                self._stack.enter_context(sharing(self._begun))
            self._compile_lowered()
            yield
        finally:
            self.close()

    def close(self) -> None:
        """Wait for what is under way, and leave the rest; what begins now is another compilation's."""
        if self._begun is not None:
            # While the toolchain is there.
            self._begun.pool.shutdown(cancel_futures=True)
        self._kernels, self._begun, self._begin_unit = 0, None, None
        self._lowered.clear()
        self._stack.close()

    def _lower(self, begun: Begun, name: str, scheduled: tirx.PrimFunc) -> list[IRModule]:
        """Return the kernels of a function, lowered, each as a unit; in a thread of its own."""
        with self._settings(), sharing(begun):
            mod = IRModule({name: scheduled.with_attr("global_symbol", name)})
            mod = tirx.transform.BindTarget(self._target)(finish_kernels(mod, self._target))
            return split_units(lower_kernels(name, mod[name]), apart=True)

    def _compile_lowered(self) -> None:
        """Write the source of what is lowered by now, and begin to compile it, where each kernel is a unit."""
        if self._begun is None or self._begin_unit is None:
            return
        ready = [one for one in self._lowered if one.done()]
        self._lowered = [one for one in self._lowered if one not in ready]
        # What failed is told by the compilation, which does it again.
        for unit in [unit for one in ready if one.exception() is None for unit in one.result()]:
            (kernel,) = unit.functions.values()
            with self._settings():
                self._begin_unit(self._begun, unit, kernel.attrs["target"])

    @contextmanager
    def _settings(self) -> Iterator[None]:
        with context_like(self._context), self._target:
            yield


_CURRENT: ContextVar[KernelsAhead | None] = ContextVar("kernels_ahead", default=None)


@contextmanager
def compiled_ahead(ahead: KernelsAhead) -> Iterator[None]:
    """Let kernels that are chosen in this thread, inside the block, begin to compile."""
    with holding(_CURRENT, ahead):
        try:
            yield
        finally:
            ahead.close()


def begin_kernel(name: str, scheduled: tirx.PrimFunc | None) -> None:
    """Begin to compile the kernel of a function, where a compilation is to follow."""
    ahead = _CURRENT.get()
    if ahead is not None and scheduled is not None:
        ahead.begin(name, scheduled)


@contextmanager
def toolchain(target: tvm.target.Target) -> Iterator[None]:
    """Make TVM compile device code for a target inside the block, and take what began."""
    ahead = _CURRENT.get()
    with device_toolchain(target) if ahead is None else ahead.toolchain():
        yield
