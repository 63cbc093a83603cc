"""Kernels that other processes make while a compilation goes on, of models with symbolic sizes.

Such a model has tables of kernels (49 kernels of BERT-base, 13 where sizes are known). To build them, to lower them and
to write their source is Python's work and takes one thread seconds, whatever the cores. So each table is made by a
process of its own (`pipeline.ahead.maker`) as soon as its decision is known. Its kernels are compiled from the moment
that they come back, those that take long first, by processes too: NVRTC reads one source at a time in a process (on 16
cores sixteen threads took 4.7 s for BERT-base's 49 kernels, and 14 s of processor time). What cannot be made there is
made here, when the compilation comes to it, and so it tells the errors.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from contextvars import ContextVar
from typing import TypeAlias

import tvm
from tvm import tirx

from relaxtune.models import OnnxModel
from relaxtune.pipeline.ahead.maker import MAKER_MODULE, GoOn, TableReply, TableRequest, WrittenKernel
from relaxtune.pipeline.codegen.cuda_compiler import CubinRequest, compile_elsewhere
from relaxtune.pipeline.codegen.cuda_units import KERNELS_MIN, compile_unit
from relaxtune.pipeline.codegen.finish import device_toolchain
from relaxtune.pipeline.errors import LoweringError
from relaxtune.pipeline.processes.fork_client import ForkServer
from relaxtune.pipeline.processes.process import ChildDiedError, ChildProcess, Reply
from relaxtune.schedules.targets import ResolvedTarget
from relaxtune.schedules.targets.host import usable_cpus
from relaxtune.schedules.templates.launch_table import count_kernels
from relaxtune.schedules.templates.made_table import MadeTable, holding_tables
from relaxtune.schedules.templates.ranges import symbolic_rows

logger = logging.getLogger(__name__)

#: A scheduled function, or a table that another process made.
Made: TypeAlias = tirx.PrimFunc | MadeTable

#: Functions of symbolic sizes from which on other processes make their tables: fewer are made while these start.
FUNCTIONS_MIN = 6
# Each table takes one; BERT-base has ten that take long. Compilers are limited for their memory, 100 MB each.
_MAKERS_MAX, _COMPILERS_MAX = 12, 16


class TablesAhead:
    """Processes that make the tables of one compilation, and compile their kernels.

    Parameters
    ----------
    target : tvm.target.Target
        What is compiled for.
    server : ForkServer
        Has imported `MAKER_MODULE`, or does so. It is not closed here.

    Raises
    ------
    LoweringError
        CUDA's toolchain is missing.
    """

    def __init__(self, target: tvm.target.Target, server: ForkServer) -> None:
        self._server = server
        self._stack = ExitStack()
        self._stack.enter_context(device_toolchain(target))
        cores = max(1, len(usable_cpus()))
        self._makers = ThreadPoolExecutor(min(cores, _MAKERS_MAX), thread_name_prefix="relaxtune-tables")
        self._compilers = ThreadPoolExecutor(
            min(cores, _COMPILERS_MAX), "relaxtune-cuda", compile_elsewhere, (self._have_compiled,)
        )
        self._children: list[ChildProcess] = []
        self._idle: list[ChildProcess] = []
        self._lock = threading.Lock()
        self._open = True
        self._begun = self._kernels = 0
        self._waiting: list[tuple[WrittenKernel, dict[str, Future[tvm.runtime.Module]]]] = []
        self._tables: dict[str, MadeTable] = {}

    def begin(
        self,
        function: str,
        func: tirx.PrimFunc,
        target: ResolvedTarget,
        decision: str,
        make: Callable[[], tirx.PrimFunc],
    ) -> Callable[[], Made]:
        """Begin to make the table that a decision makes of a function; return what waits for it.

        Parameters
        ----------
        function : str
            Its name in the module.
        make : callable
            Makes it here.
        """
        self._begun += 1
        key, units = f"{function} {self._begun}", dict[str, Future[tvm.runtime.Module]]()
        asked = self._makers.submit(self._ask, TableRequest(function, func, target, decision, key), units)

        def take() -> Made:
            reply = asked.result()
            if reply is None:
                return make()
            shell, *lowered = reply.parts
            self._tables[key] = MadeTable(key, shell, len(lowered), lowered, units, make)
            return self._tables[key]

        return take

    def choose_made(self, made: Sequence[Made | None]) -> frozenset[str]:
        """Return the keys of the tables that the next compilation may take: all if each kernel is a unit, else none."""
        if not self._open or sum(map(_count, made)) < KERNELS_MIN:
            return frozenset()
        with self._lock:
            self._compile_waiting()
        return frozenset(self._tables)

    @contextmanager
    def compiling(self) -> Iterator[None]:
        """Let a compilation in this thread, inside the block, take the tables; then none is made any more."""
        try:
            with holding_tables(self._tables):
                yield
        finally:
            self.close()

    def close(self) -> None:
        """End the processes, and wait for what is being compiled."""
        with self._lock:
            self._open = False
            ChildProcess.kill_all(self._children)
        self._makers.shutdown(cancel_futures=True)
        # While the toolchain is there.
        self._compilers.shutdown(cancel_futures=True)
        self._tables.clear()
        self._stack.close()

    @property
    def open(self) -> bool:
        """Whether tables are made."""
        return self._open

    def _ask(self, request: TableRequest, units: dict[str, Future[tvm.runtime.Module]]) -> TableReply | None:
        """Have a process make a table, and begin to compile it; None where it is to be made here."""
        reply = self._answer(f"the table of {request.function}", request, units)
        return reply if isinstance(reply, TableReply) else None

    def _have_compiled(self, request: CubinRequest) -> bytes | None:
        """Have a process compile a kernel; None where that is to be done here."""
        cubin = self._answer("a kernel", request, {})
        if not self._open:
            raise LoweringError("the compilation is over")
        return cubin if isinstance(cubin, bytes) else None

    def _answer(self, what: str, request: object, units: dict[str, Future[tvm.runtime.Module]]) -> object | None:
        """Return what a process answers, and begin to compile the kernels that it writes; None where it does not."""
        try:
            child = self._take_child()
            reply = self._asked(child, request)
            while isinstance(reply.value, WrittenKernel):
                self._begin_kernel(reply.value, units)
                reply = self._asked(child, GoOn())
        except (ChildDiedError, OSError) as e:
            logger.info("%s is made here: %s", what, e)
            return None
        with self._lock:
            self._idle.append(child)
        if reply.error is not None:
            # Making it here tells what is wrong, or works.
            logger.debug("%s is made here: %s", what, reply.error)
        return reply.value

    def _asked(self, child: ChildProcess, request: object) -> Reply:
        child.send(request)
        return child.receive()

    def _begin_kernel(self, kernel: WrittenKernel, units: dict[str, Future[tvm.runtime.Module]]) -> None:
        """Begin to compile a kernel as a unit as soon as there are many."""
        with self._lock:
            self._kernels += 1
            self._waiting.append((kernel, units))
            if self._open and self._kernels >= KERNELS_MIN:
                self._compile_waiting()

    def _compile_waiting(self) -> None:
        """Begin to compile what has arrived. The lock is held."""
        for kernel, units in self._waiting:
            units[kernel.name] = self._compilers.submit(compile_unit, kernel.source)
        self._waiting.clear()

    def _take_child(self) -> ChildProcess:
        """Return a process that has nothing to do."""
        with self._lock:
            if not self._open:
                raise OSError("the compilation is over")
            if self._idle:
                return self._idle.pop()
            child = ChildProcess(MAKER_MODULE, {}, self._server)
            self._children.append(child)
        child.receive()
        return child


class TableMakers:
    """Starts what makes tables as soon as a model turns out to need them: it imports while the model is lowered."""

    def __init__(self) -> None:
        self.server: ForkServer | None = None

    def expect(self, model: OnnxModel, target: ResolvedTarget) -> None:
        """Be told of the model that is being prepared."""
        symbolic = any(not isinstance(size, int) for spec in model.inputs for size in spec.shape)
        if symbolic and target.kind == "cuda" and self.server is None and ForkServer.available():
            self.server = ForkServer([MAKER_MODULE])

    def close(self) -> None:
        """End the process."""
        if self.server is not None:
            self.server.close()


_CURRENT: ContextVar[TablesAhead | None] = ContextVar("tables_ahead", default=None)


@contextmanager
def tables_ahead(lowered: tvm.ir.IRModule, target: ResolvedTarget, makers: TableMakers | None = None) -> Iterator[None]:
    """Let other processes make the tables that are chosen in this thread, inside the block, for its first compilation.

    Parameters
    ----------
    makers : TableMakers or None
        Was told of the model; it is not closed here.
    """
    functions = [func for func in lowered.functions.values() if isinstance(func, tirx.PrimFunc)]
    symbolic = sum(symbolic_rows(func) is not None for func in functions) if target.kind == "cuda" else 0
    if symbolic < FUNCTIONS_MIN or not ForkServer.available():
        yield
        return
    with ExitStack() as stack:
        server = makers.server if makers is not None else None
        server = server or stack.enter_context(closing(ForkServer([MAKER_MODULE])))
        try:
            ahead = stack.enter_context(closing(TablesAhead(target.target, server)))
        except LoweringError:
            # The compilation says so.
            yield
            return
        token = _CURRENT.set(ahead)
        try:
            yield
        finally:
            _CURRENT.reset(token)


def begin_table(
    function: str, func: tirx.PrimFunc, target: ResolvedTarget, decision: str, make: Callable[[], tirx.PrimFunc]
) -> Callable[[], Made]:
    """Begin to make a table where a compilation is to follow; `make` otherwise. See `TablesAhead.begin`."""
    ahead = _CURRENT.get()
    return make if ahead is None or not ahead.open else ahead.begin(function, func, target, decision, make)


def choose_made(made: Sequence[Made | None]) -> frozenset[str]:
    """Return the keys of the tables of these that the compilation which begins may take as they were made."""
    ahead = _CURRENT.get()
    return frozenset() if ahead is None else ahead.choose_made(made)


@contextmanager
def toolchain(target: tvm.target.Target) -> Iterator[None]:
    """Make TVM compile device code for a target inside the block, and take what was made ahead."""
    ahead = _CURRENT.get()
    with device_toolchain(target) if ahead is None or not ahead.open else ahead.compiling():
        yield


def _count(made: Made | None) -> int:
    if made is None:
        return 1
    return made.kernels if isinstance(made, MadeTable) else count_kernels(made)
