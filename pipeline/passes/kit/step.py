"""`Step`: one entry of the list of passes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

import tvm

from relaxtune.pipeline.passes.kit.state import LoweringState


class Phase(StrEnum):
    """The numbered phases of the lowering, in order."""

    CANONICALISE = "0 canonicalise"
    FOLD_CONSTANTS = "1 fold constants"
    REMOVE_DEAD_CODE = "2 remove dead code"
    PRECISION = "3 precision"
    PATTERNS = "4 pattern rewrites"
    LEGALISE = "5 legalise"
    FUSE = "6 fuse"
    PLAN_MEMORY = "7 plan memory"


@dataclass(frozen=True)
class Step:
    """One pass."""

    phase: Phase
    name: str  # The name in `disabled_passes`.
    run: Callable[[tvm.ir.IRModule, LoweringState], tvm.ir.IRModule]
    required: str = ""  # Why no module can do without it; "" where one can.
    makes_precision: bool = False  # Whether the requested precision depends on it: its failure ends the lowering.


def stock(tvm_pass: tvm.ir.transform.Pass) -> Callable[[tvm.ir.IRModule, LoweringState], tvm.ir.IRModule]:
    """Return a pass of TVM's own as what a `Step` runs."""

    def run(mod: tvm.ir.IRModule, _state: LoweringState) -> tvm.ir.IRModule:
        result: tvm.ir.IRModule = tvm_pass(mod)
        return result

    return run
