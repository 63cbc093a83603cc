"""The default rules for CUDA: TVM's dlight and ours, in the order in which they are asked, held to binding every block.

dlight's transpose rule takes a function for its last transpose alone and leaves every block after that one unbound (the
halves of a concatenation, say). A schedule like that is no answer: the function goes to the next rule.
"""

from __future__ import annotations

import logging

import tvm
from tvm import tirx
from tvm.ir import Var
from tvm.ir.expr import TensorLoad
from tvm.s_tir import Schedule, ScheduleError, dlight
from tvm.s_tir.dlight.base import ScheduleRule
from tvm.s_tir.schedule import SBlockRV
from tvm.target import Target
from tvm.tirx import PrimFunc

from relaxtune.schedules.gpu.binding import launches_threads, list_unbound_blocks
from relaxtune.schedules.gpu.element_reduction import ElementReduction
from relaxtune.schedules.gpu.launch_limits import exceeded_limit
from relaxtune.schedules.gpu.unit_reductions import without_unit_reductions

logger = logging.getLogger(__name__)

# dlight's rules check their assumptions with Python's asserts and whatever their Python code runs into.
_MISJUDGED = (AssertionError, AttributeError, LookupError, TypeError, ValueError)


class Transpose(dlight.gpu.Transpose):  # type: ignore[misc]  # dlight has no type information
    """dlight's rule, which compares indices with `==` and so raises on a constant one (an axis of length 1)."""

    def is_transpose(self, sch: Schedule, block_rv: SBlockRV) -> bool:
        """Whether a block copies with the same iterators in another order."""
        store = sch.get(block_rv).body
        if not isinstance(store, tirx.BufferStore) or not isinstance(store.value, TensorLoad):
            return False
        written, read = list(store.indices), list(store.value.indices)
        if len(written) != len(read) or not all(isinstance(index, Var) for index in (*written, *read)):
            return False
        moved = any(not left.same_as(right) for left, right in zip(written, read, strict=True))
        return moved and set(written) == set(read)


class BindingRule(ScheduleRule):  # type: ignore[misc]
    """A dlight rule whose schedules count only where GPU threads run every block."""

    def __init__(self, rule: ScheduleRule) -> None:
        super().__init__()
        self._rule = rule
        self.name = f"dlight-{type(rule).__name__.lower()}"

    def apply(self, func: PrimFunc, target: Target, tunable: bool) -> Schedule | None:
        """Return the rule's schedule, None when it has none, leaves a block outside the threads or asks for too much.

        Raises
        ------
        tvm.s_tir.ScheduleError
            The rule ran into a function it does not understand.
        """
        try:
            sch = self._rule.apply(without_unit_reductions(func), target, tunable)
        except _MISJUDGED as error:
            raise ScheduleError(f"{type(error).__name__} in dlight: {error}") from error
        return None if sch is None or list_unbound_blocks(sch.mod["main"]) or not _fits(sch, target) else sch


def _fits(sch: Schedule, target: Target) -> bool:
    """Return whether TVM can lower a schedule, and a launch of the target can have what it then asks for.

    It cannot lower dlight's reduction over threads of a grouped convolution, for one.
    """
    try:
        exceeded = exceeded_limit(sch.mod["main"], target)
    except (tvm.error.InternalError, TypeError, ValueError):
        return False
    if exceeded is not None:
        logger.debug("a schedule of dlight takes %s", exceeded)
    return exceeded is None


class Bound(ScheduleRule):  # type: ignore[misc]
    """Code that names its threads itself (TVM's scatters): it is taken as it is."""

    name = "bound"

    def apply(self, func: PrimFunc, target: Target, tunable: bool) -> Schedule | None:
        """Return a schedule without a step, None for a function that leaves threads to be bound."""
        del target, tunable
        return Schedule(func) if launches_threads(func) and not list_unbound_blocks(func) else None


def cuda_rules() -> list[tuple[str, ScheduleRule]]:
    """Return the rules with their names for reports; the last one takes every function that has blocks."""
    rules = [
        dlight.gpu.Matmul(),
        dlight.gpu.GEMV(),
        dlight.gpu.Reduction(),
        dlight.gpu.GeneralReduction(),
        Transpose(),
    ]
    last: list[ScheduleRule] = [ElementReduction(), BindingRule(dlight.gpu.Fallback())]
    return [(str(rule.name), rule) for rule in (Bound(), *map(BindingRule, rules), *last)]
