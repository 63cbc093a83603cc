"""TVM's compiler on all cores: threads, each with the settings of the one that starts them.

Passes and code generators let go of Python's lock. Kernels that are lowered in two threads take 0.67 of the time that
one thread needs, and 1.25 of its processor time (39 matmuls of BERT-base for Hopper with symbolic rows, 2 cores).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from tvm.ir.transform import PassContext
from tvm.target import Target

from relaxtune.schedules.targets.host import usable_cpus

Item = TypeVar("Item")
Result = TypeVar("Result")


def map_side_by_side(call: Callable[[Item], Result], items: Sequence[Item]) -> list[Result]:
    """Return the results of all calls, in the order of the items; those first in line begin first.

    Each call has the caller's pass context and target.
    """
    threads = min(len(usable_cpus()), len(items))
    if threads < 2:
        return [call(one) for one in items]
    context, target = PassContext.current(), Target.current(allow_none=True)

    def within(item: Item) -> Result:
        # Both are of the thread.
        with context_like(context):
            if target is None:
                return call(item)
            with target:
                return call(item)

    with ThreadPoolExecutor(threads) as pool:
        return list(pool.map(within, items))


def context_like(
    context: PassContext, config: Mapping[str, object] | None = None, disabled: Sequence[str] = ()
) -> PassContext:
    """Return a pass context with the settings of another, with further ones, and without some passes."""
    return PassContext(
        context.opt_level,
        required_pass=context.required_pass,
        disabled_pass=[*context.disabled_pass, *disabled],
        instruments=context.instruments,
        config={**dict(context.config), **(config or {})},
    )
