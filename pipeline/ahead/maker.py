"""The child that makes the kernels of a table, scheduled, lowered and written as CUDA source, and compiles kernels.

It does what the compilation does, with the same code.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
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
class TableReply:
    """What was made of a table.

    Attributes
    ----------
    parts
        TVM's array: the shell, and a lowered module for each kernel (`schedules.templates.made_table`). They share
        variables, and so are sent as one.
    units
        Name of a device kernel -> its source.
    """

    parts: Sequence[Any]
    units: Mapping[str, UnitSource]


def start() -> Callable[[object], object]:
    """Import TVM and return the function that makes what is asked for.

    For a `TableRequest` that is a `TableReply`, or None where the decision makes no table; for a `CubinRequest` a
    cubin.
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

    # Once, before anything is forked. What is missing the compilation tells.
    with contextlib.suppress(LoweringError):
        ensure_cuda_runtime()

    def make(request: object) -> object:
        if isinstance(request, CubinRequest):
            return request.compile()
        if not isinstance(request, TableRequest):
            raise TypeError(f"expected a TableRequest or a CubinRequest, got {type(request).__name__}")
        function, target = request.function, portable_host(request.target).target
        scheduled = as_scheduled(apply_decision(request.func, request.target, request.decision))
        if not is_table(scheduled):
            return None
        mod = IRModule({function: scheduled.with_attr("global_symbol", function)})
        with pass_context(True), target:
            finished = finish_kernels(mod, target)
            table = finished[function]
            facts = TableFacts(uses_atomics(table), count_launches(table), kernel_hash(table, target.kind.name))
            lowered, device = lower_kernels(function, tirx.transform.BindTarget(target)(finished)[function])
            units = {}
            for unit in split_units(device, apart=True):
                ((name, kernel),) = unit.functions.items()
                units[name.name_hint] = write_unit(unit, kernel.attrs["target"])
        shell = make_shell(scheduled, facts, request.key)
        stubs = [with_stubs(one, function, request.key) for one in lowered]
        return TableReply(tvm_ffi.Array([shell, *stubs]), units)

    return make
