"""One PrimFunc of several kernels: its host code launches the first whose condition holds.

Each kernel is lowered apart (`split_table`, `join_table`): passes prove things of a kernel from everything around it,
which for seven kernels in one function took six times as long as for the seven alone.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import tvm_ffi
from tvm import tirx
from tvm.ir import Call, StringImm

from relaxtune.schedules.marks import KERNELS_ATTR
from relaxtune.schedules.tir.blocks import shape_of, static_shape

#: A condition, and the text of the error where it does not hold.
Check: TypeAlias = "tuple[tirx.Expr, str]"

# Stands for a kernel in the function that chooses; never compiled.
_PLACE = "relaxtune_kernel_place"
_ELEMENTS_MAX = 2**31 - 1


@dataclass(frozen=True)
class SplitTable:
    """A table of kernels as functions of the same parameters: the one that chooses by conditions, and the kernels."""

    choice: tirx.PrimFunc
    kernels: tuple[tirx.PrimFunc, ...]
    conditions: tuple[tirx.Expr, ...]  # Of all kernels but the last one.


def launch_first(
    conditions: Sequence[tirx.Expr], kernels: Sequence[tirx.PrimFunc], work: tirx.Expr, checks: Sequence[Check]
) -> tirx.PrimFunc:
    """Return the function that runs the first kernel whose condition holds, the last where none does.

    Conditions, checks and `work` are expressions of the function's variables. Without `work` (0), no kernel runs. Where
    a check does not hold, its text is the error.
    """
    first = kernels[0]
    bodies = [_with_params(kernel.body, kernel.params, first.params) for kernel in kernels]
    body = bodies[-1]
    for condition, other in reversed(list(zip(conditions, bodies[:-1], strict=True))):
        body = tirx.IfThenElse(condition, other, body)
    asserts = [tirx.AssertStmt(holds, StringImm("ValueError"), [StringImm(why)]) for holds, why in checks]
    # A grid has a block at least.
    body = tirx.SeqStmt([*asserts, tirx.IfThenElse(work > tirx.IntImm("int64", 0), body, None)])
    made = _with_attrs(tirx.PrimFunc(first.params, body, first.ret_type), first)
    return made.with_attr(KERNELS_ATTR, len(kernels))


def launch_by_lines(
    func: tirx.PrimFunc,
    lines: Sequence[tuple[Sequence[tirx.Expr], int]],
    kernels: Sequence[tirx.PrimFunc],
    work: tirx.Expr,
) -> tirx.PrimFunc:
    """Return the function that runs the kernel of the first line whose conditions hold; see `launch_first`.

    A line has conditions, those of the last one left out, and the number of a kernel, which may be a table itself.
    """
    taken: tirx.Expr = tirx.IntImm("int32", lines[-1][1])
    for conditions, number in reversed(lines[:-1]):
        taken = tirx.Select(tirx.all(*conditions), tirx.IntImm("int32", number), taken)
    parts = [(number, *part) for number, kernel in enumerate(kernels) for part in list_kernels(kernel)]
    within = [
        taken == number if condition is None else tirx.all(taken == number, condition)
        for number, condition, _ in parts[:-1]
    ]
    return launch_first(within, [kernel for *_, kernel in parts], work, element_checks(func))


def element_checks(func: tirx.PrimFunc) -> list[Check]:
    """Return that 32 bits, in which kernels count, count the elements of each tensor of symbolic shape."""
    shapes = [shape for param in func.params if (shape := shape_of(param)) and static_shape(param) is None]
    why = f"a tensor has more than {_ELEMENTS_MAX} elements; make smaller batches"
    return [(math.prod(shape) <= tirx.IntImm("int64", _ELEMENTS_MAX), why) for shape in shapes]


def is_table(func: tirx.PrimFunc) -> bool:
    """Whether `launch_first` made the function."""
    return bool(func.attrs) and KERNELS_ATTR in func.attrs


def list_kernels(func: tirx.PrimFunc) -> list[tuple[tirx.Expr | None, tirx.PrimFunc]]:
    """Return the kernels of a scheduled function, each with its condition; the last one has none."""
    if not is_table(func):
        return [(None, func)]
    parts = split_table(func)
    return list(zip([*parts.conditions, None], parts.kernels, strict=True))


def split_table(table: tirx.PrimFunc) -> SplitTable:
    """Return the parts of what `launch_first` made."""
    *checks, guard = table.body.seq
    count = int(table.attrs[KERNELS_ATTR]) if is_table(table) else 1
    conditions, bodies, rest = [], [], guard.then_case
    for _ in range(count - 1):
        conditions.append(rest.condition)
        bodies.append(rest.then_case)
        rest = rest.else_case
    bodies.append(rest)
    *others, body = (tirx.Evaluate(tirx.call_extern("int32", _PLACE, number)) for number in range(count))
    for condition, place in reversed(list(zip(conditions, others, strict=True))):
        body = tirx.IfThenElse(condition, place, body)
    chooses = tirx.SeqStmt([*checks, tirx.IfThenElse(guard.condition, body, None)])
    choice, *kernels = (
        _with_attrs(tirx.PrimFunc(table.params, one, table.ret_type), table) for one in (chooses, *bodies)
    )
    return SplitTable(choice, tuple(kernels), tuple(conditions))


def join_table(choice: tirx.PrimFunc, kernels: Sequence[tirx.PrimFunc]) -> tirx.PrimFunc:
    """Return the function that chooses, as host code, with the kernels' host code in its places."""
    bodies = [_with_params(kernel.body, kernel.params, choice.params) for kernel in kernels]

    def put(statement: tirx.Evaluate) -> tirx.Stmt:
        call = statement.value
        place = call.args[0] if isinstance(call, Call) and len(call.args) == 2 else None
        return bodies[int(call.args[1])] if isinstance(place, StringImm) and place.value == _PLACE else statement

    body = tvm_ffi.structural_map(choice.body, (tirx.Evaluate, put))
    return _with_attrs(tirx.PrimFunc(choice.params, body, choice.ret_type), choice)


def with_kernel_names(host: tirx.PrimFunc, names: Mapping[str, str]) -> tirx.PrimFunc:
    """Return host code with the kernels that it launches called by other names."""
    body = tvm_ffi.structural_map(
        host.body, (StringImm, lambda text: StringImm(names[text.value]) if text.value in names else text)
    )
    return _with_attrs(tirx.PrimFunc(host.params, body, host.ret_type), host)


def _with_params(body: tirx.Stmt, params: Sequence[tirx.Var], others: Sequence[tirx.Var]) -> tirx.Stmt:
    renamed = dict(zip(params, others, strict=True))
    return tvm_ffi.structural_map(body, (tirx.Var, lambda var: renamed.get(var, var)))


def _with_attrs(made: tirx.PrimFunc, source: tirx.PrimFunc) -> tirx.PrimFunc:
    for key, value in source.attrs.items() if source.attrs else ():
        made = made.with_attr(key, value)
    return made
