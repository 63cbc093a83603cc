"""The schedule of last resort: it gives every PrimFunc without a schedule a valid and decent one."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import tvm
from tvm.ir import GlobalVar, IRModule
from tvm.s_tir import Schedule, ScheduleError
from tvm.target import Target
from tvm.tirx import PrimFunc

from relaxtune.schedules.cpu.any_size.attention import any_size_attention
from relaxtune.schedules.cpu.any_size.matmul import any_size_matmul
from relaxtune.schedules.cpu.any_size.rows import any_size_rows
from relaxtune.schedules.cpu.any_size.window_kernel import any_size_windows
from relaxtune.schedules.cpu.contraction import find_convolution
from relaxtune.schedules.cpu.generic import elementwise, generic, plain
from relaxtune.schedules.cpu.reduction import row_reduction
from relaxtune.schedules.cpu.tiling import contraction_rule, find_tiled_matmul, normed_matmul
from relaxtune.schedules.cpu.vector_math import register_vector_math
from relaxtune.schedules.errors import TargetError, UnscheduledError
from relaxtune.schedules.gpu.dlight_rules import Rule, cuda_rules
from relaxtune.schedules.marks import SCHEDULED_ATTR, is_scheduled
from relaxtune.schedules.tir.symbolic_sizes import with_named_sizes

logger = logging.getLogger(__name__)


def apply_fallback(mod: IRModule, target: Target) -> IRModule:
    """Return the module with every unscheduled PrimFunc scheduled by the first rule that takes it.

    Raises `TargetError`: there are no default rules for the target's kind; `UnscheduledError`: no rule took a function
    (on CUDA: a function without blocks, which cannot be bound to threads).
    """
    return fallback_with_rules(mod, target)[0]


def rules_for(target: Target) -> list[tuple[str, Rule]]:
    """Return the default rules of a target with their names, the most special first.

    Raises `TargetError`: there are none for the target's kind.
    """
    if target.kind.name == "llvm":
        register_vector_math()
        return [
            ("cpu-elementwise", elementwise),
            ("cpu-any-size-matmul", any_size_matmul),
            ("cpu-any-size-attention", any_size_attention),
            ("cpu-any-size-windows", any_size_windows),
            ("cpu-matmul", contraction_rule(find_tiled_matmul)),
            ("cpu-normed-matmul", normed_matmul),
            ("cpu-convolution", contraction_rule(find_convolution)),
            ("cpu-any-size-rows", any_size_rows),
            ("cpu-reduction", row_reduction),
            ("cpu-generic", generic),
            ("cpu-plain", plain),
        ]
    if target.kind.name == "cuda":
        return cuda_rules()
    raise TargetError(f"no default schedules for target kind {target.kind.name!r}; expected llvm or cuda.")


def fallback_with_rules(mod: IRModule, target: Target) -> tuple[IRModule, dict[str, str]]:
    """Return what `apply_fallback` returns, and the name of the rule that took each function, by function name.

    Raises `TargetError`, `UnscheduledError`: as `apply_fallback`.
    """
    names: dict[str, str] = {}
    scheduled: dict[GlobalVar, PrimFunc] = {}
    for var, func in mod.functions_items():
        if not isinstance(func, PrimFunc) or is_scheduled(func):
            continue
        name = str(var.name_hint)
        rule_name, sch = schedule_by_rules(name, func, target)
        names[name] = rule_name
        scheduled[var] = sch.mod["main"].with_attr(SCHEDULED_ATTR, True)
    result = IRModule(dict(mod.functions_items()), attrs=mod.attrs)
    for var, func in scheduled.items():
        result[var] = func
    return result, names


def apply_plainest(name: str, func: PrimFunc, target: Target) -> PrimFunc:
    """Return a function scheduled by the last rule of its target, whose code asks for nothing that may be missing.

    Raises `TargetError`, `UnscheduledError`: as `apply_fallback`.
    """
    _, sch = schedule_by_rules(name, func, target, rules_for(target)[-1:])
    return sch.mod["main"].with_attr(SCHEDULED_ATTR, True)


def schedule_by_rules(
    name: str, func: PrimFunc, target: Target, rules: Sequence[tuple[str, Rule]] | None = None
) -> tuple[str, Schedule]:
    """Return the first rule that takes a function, and its schedule; the name is for messages.

    `rules` are those of the target unless others are given.

    Raises `TargetError`, `UnscheduledError`: as `apply_fallback`.
    """
    rules = rules_for(target) if rules is None else rules
    func = with_named_sizes(func)
    with target:
        for rule_name, rule in rules:
            try:
                sch = rule(func, target)
            except (ScheduleError, tvm.error.InternalError) as error:
                # A rule that misjudged a function must not stop the compilation: the next one is more modest.
                reason = str(error).strip().rpartition("\n")[2] or type(error).__name__
                logger.warning("rule %s failed on %s and is skipped: %s", rule_name, name, reason)
                continue
            if sch is not None:
                return rule_name, sch
    raise UnscheduledError(
        f"no default rule for {target.kind.name} took the function {name!r}; tried "
        f"{', '.join(rule_name for rule_name, _ in rules)}. Its body is no nest of loops over blocks, or no "
        "rule could bind all its blocks to threads."
    )
