"""Plain kernels in the place of those that the compiler refuses: one of many must not end a compilation."""

from __future__ import annotations

import logging
import re
from collections.abc import Collection, Sequence

import tvm
from tvm import tirx

from relaxtune.pipeline.artifact.kernel_choice import KernelChoice
from relaxtune.pipeline.codegen.finish import device_toolchain, finish_kernels
from relaxtune.pipeline.codegen.tvm_errors import TVM_ERRORS
from relaxtune.pipeline.errors import LoweringError
from relaxtune.pipeline.passes.module import LoweredModule
from relaxtune.pipeline.printable import last_line
from relaxtune.schedules.errors import UnscheduledError
from relaxtune.schedules.fallback import apply_fallback, apply_plainest
from relaxtune.schedules.targets import ResolvedTarget
from relaxtune.schedules.templates.lowering import tir_pipeline_for
from relaxtune.tuning_db.records import Route

logger = logging.getLogger(__name__)


def plain_instead(
    lowered: LoweredModule,
    choices: Sequence[KernelChoice],
    target: ResolvedTarget,
    said: str,
    before: Collection[str] = (),
) -> list[KernelChoice]:
    """Return choices of the plainest schedule for the kernels that the compiler refused; none where that is no remedy.

    Parameters
    ----------
    said : str
        The compiler's error. Kernels that it does not name are compiled one by one.
    before : collection of str
        Functions that are plain already.
    """
    others = [name for name in lowered.kernels if name not in before]
    refused = {name: last_line(said) for name in others if re.search(rf"\b{re.escape(name)}_kernel(_\d+)?\b", said)}
    if not refused:
        made = {choice.function: choice.scheduled for choice in choices}
        functions = {name: made.get(name) or lowered.mod[name] for name in others}
        refused = {name: error for name, func in functions.items() if (error := _refusal(func, target))}
    tasks = {choice.function: choice.task for choice in choices}
    found = []
    for name, error in refused.items():
        try:
            plain = apply_plainest(name, lowered.mod[name], target.target)
        except UnscheduledError:
            continue
        if _refusal(plain, target) is None:
            note = f"its own schedule did not compile, so it takes the plain default, which is slow: {error}"
            logger.warning("kernel %s: %s", name, note)
            found.append(KernelChoice(name, tasks.get(name), Route.FALLBACK, note=note, scheduled=plain))
    return found


def _refusal(func: tirx.PrimFunc, target: ResolvedTarget) -> str | None:
    """Return why a kernel does not compile alone, None where it does; without a schedule, it takes the default one."""
    try:
        mod = tvm.IRModule({"main": func.with_attr("global_symbol", "main")})
        mod = finish_kernels(apply_fallback(mod, target.target), target.target)
        with device_toolchain(target.target), tvm.transform.PassContext(opt_level=3), target.target:
            tvm.compile(mod, target.target, tir_pipeline=tir_pipeline_for(mod))
    except (LoweringError, *TVM_ERRORS) as e:
        return last_line(str(e))
    return None
