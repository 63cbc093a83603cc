"""Shared memory that kernels ask for at launch, read from the host's code while TVM lowers it."""

from __future__ import annotations

import tvm
from tvm import tirx

from relaxtune.schedules.marks import LAUNCH_ATTR
from relaxtune.schedules.tir.blocks import list_statements
from relaxtune.schedules.tir.expressions import find_all

_DYNAMIC = "tirx.use_dyn_shared_memory"
# Kernels are functions of their own by then, and the host still calls them by name with all arguments in sight.
_PASS = "tirx.MakePackedAPI"


@tvm.instrument.pass_instrument
class DynamicSharedMemory:
    """A pass instrument that notes the dynamic shared memory of the kernels; `bytes` is the largest."""

    def __init__(self) -> None:
        self.bytes = 0

    def run_after_pass(self, mod: tvm.ir.IRModule, info: tvm.transform.PassInfo) -> None:
        """Look at the module once its kernels are split off and called by name."""
        if str(info.name) != _PASS:
            return
        functions = {str(var.name_hint): func for var, func in mod.functions_items()}
        kernels = {
            name
            for name, func in functions.items()
            if func.attrs and LAUNCH_ATTR in func.attrs and _DYNAMIC in map(str, func.attrs[LAUNCH_ATTR])
        }
        for func in functions.values():
            statements = list_statements(func.body) if isinstance(func, tirx.PrimFunc) else []
            values = [value for stmt in statements if isinstance(value := getattr(stmt, "value", None), tvm.ir.Expr)]
            for call in (call for value in values for call in find_all(value, tvm.ir.Call) if len(call.args) > 1):
                # The size is the last of a launch's arguments.
                callee, size = str(getattr(call.args[0], "value", "")), call.args[-1]
                if callee in kernels and isinstance(size, tirx.IntImm):
                    self.bytes = max(self.bytes, int(size))
