"""The child that makes the kernels of a table, scheduled, lowered and written as CUDA source, and compiles kernels.

It does what the compilation does, with the same code.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tvm import tirx

    from relaxtune.pipeline.codegen.cuda_units import UnitSource
    from relaxtune.schedules.targets import ResolvedTarget

MAKER_MODULE = "relaxtune.pipeline.ahead.maker"


@dataclass(frozen=True)
class TableRequest:
    """A function of a lowered module, what it is scheduled for, the decision of its table, and a name for it."""

    function: str
    func: tirx.PrimFunc
    target: ResolvedTarget
    decision: str
    key: str


@dataclass(frozen=True)
class WrittenKernel:
    """The source of a device kernel of a table. `GoOn` asks for what comes next of the table."""

    name: str
    source: UnitSource


@dataclass(frozen=True)
class GoOn:
    """Asks for the next kernel of the table that was begun, or for the table."""


@dataclass(frozen=True)
class TableReply:
    """What was made of a table beside its device kernels, which came before.

    Attributes
    ----------
    parts
        TVM's array: the shell, and a lowered module for each kernel (`schedules.templates.made_table`). They share
        variables, and so are sent as one.
    """

    parts: Sequence[Any]


def start() -> Callable[[object], object]:
    """Import TVM and return the function that makes what is asked for.

    For a `TableRequest`, and a `GoOn` after each `WrittenKernel`, that is one of these or at the end a `TableReply`, or
    None where the decision makes no table; for a `CubinRequest` a cubin.
    """
    import tvm_ffi
    from tvm import tirx
    from tvm.ir import IRModule

    from relaxtune.pipeline.codegen.cuda_compiler import CubinRequest, ensure_cuda_runtime
    from relaxtune.pipeline.codegen.cuda_units import split_units, write_unit
    from relaxtune.pipeline.codegen.finish import finish_kernels, pass_context
    from relaxtune.pipeline.codegen.kernel_hash import kernel_hash
    from relaxtune.pipeline.errors import LoweringError
    from relaxtune.schedules.gpu.atomics import uses_atomics
    from relaxtune.schedules.gpu.binding import count_launches
    from relaxtune.schedules.marks import as_scheduled
    from relaxtune.schedules.registry import apply_decision
    from relaxtune.schedules.targets import portable_host
    from relaxtune.schedules.templates.launch_table import is_table
    from relaxtune.schedules.templates.lowering import lower_kernels
    from relaxtune.schedules.templates.made_table import TableFacts, make_shell, with_stubs

    # A collection would copy the pages of what was imported, in each process. None outlives a compilation.
    gc.disable()
    # Once, before anything is forked. What is missing the compilation tells.
    with contextlib.suppress(LoweringError):
        ensure_cuda_runtime()

    def make_table(request: TableRequest) -> Iterator[WrittenKernel | TableReply]:
        function, target = request.function, portable_host(request.target).target
        scheduled = as_scheduled(apply_decision(request.func, request.target, request.decision))
        if not is_table(scheduled):
            return
        mod = IRModule({function: scheduled.with_attr("global_symbol", function)})
        with pass_context(True), target:
            finished = finish_kernels(mod, target)
            table = finished[function]
            facts = TableFacts(uses_atomics(table), count_launches(table), kernel_hash(table, target.kind.name))
            stubs = {}
            bound = tirx.transform.BindTarget(target)(finished)[function]
            for place, lowered, device in lower_kernels(function, bound, count_launches):
                stubs[place] = with_stubs(lowered, function, request.key)
                for unit in split_units(device, apart=True):
                    ((name, kernel),) = unit.functions.items()
                    yield WrittenKernel(name.name_hint, write_unit(unit, kernel.attrs["target"]))
        shell = make_shell(scheduled, facts, request.key)
        yield TableReply(tvm_ffi.Array([shell, *(stubs[place] for place in sorted(stubs))]))

    table: Iterator[object] = iter(())

    def make(request: object) -> object:
        nonlocal table
        if isinstance(request, CubinRequest):
            return request.compile()
        if isinstance(request, TableRequest):
            table = make_table(request)
        elif not isinstance(request, GoOn):
            raise TypeError(f"expected a request of this module or a CubinRequest, got {type(request).__name__}")
        return next(table, None)

    return make
