"""All makers of kernels from a few numbers, asked as one: what a function may be made from, the kernel of a decision.

Templates are kernels of our own; libraries are a vendor's, asked for by name, since an artifact then needs them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import TypeAlias

from tvm.tirx import PrimFunc
from tvm_ffi import StructuralKey

from relaxtune.schedules.cpu.any_size.template import CpuAnySize
from relaxtune.schedules.errors import Refusal
from relaxtune.schedules.libraries.cublaslt import CublasLt
from relaxtune.schedules.libraries.cudnn_attention import CudnnAttention
from relaxtune.schedules.targets import ResolvedTarget
from relaxtune.schedules.templates.attention_sm80.template import AttentionSm80
from relaxtune.schedules.templates.attention_sm90.table import AttentionTable
from relaxtune.schedules.templates.attention_sm90.template import AttentionSm90
from relaxtune.schedules.templates.base import Parameters, Template, TemplateError, template_of
from relaxtune.schedules.templates.gemm_sm80.template import GemmSm80
from relaxtune.schedules.templates.gemm_sm90.template import GemmSm90
from relaxtune.schedules.templates.gemv.template import Gemv, GemvStream
from relaxtune.schedules.templates.ranges import Ranges
from relaxtune.schedules.templates.rows.elementwise import Elementwise
from relaxtune.schedules.templates.rows.template import Rows
from relaxtune.schedules.tir.blocks import shape_of

# Where several make a function and none was measured, the first one's first proposal is taken. Of 8- and 4-bit weights
# with K from 2048 on, those that stream were faster in each case on an H200 (`benchmarks/results/h200-gemv.json`); of
# 16-bit weights where there is no wgmma, in nearly each on an H100 (`h100-decode-sm80.json`).
_KERNELS: Mapping[str, Template] = {
    template.name: template
    for template in (
        GemmSm90(),
        GemvStream(),
        Gemv(),
        GemmSm80(),
        AttentionSm90(),
        AttentionSm80(),
        Rows(),
        Elementwise(),
    )
}
RANGES = Ranges(_KERNELS)
#: Maker of a table of kernels for functions of symbolic sizes.
Table: TypeAlias = AttentionTable | Ranges
_TABLES: Sequence[Table] = (AttentionTable(), RANGES)
ANY_SIZE = CpuAnySize()
# Functions, and kernels, that are kept: those of a large model with free axes.
_KEPT = 256
TEMPLATES: Mapping[str, Template] = {**_KERNELS, **{one.name: one for one in (*_TABLES, ANY_SIZE)}}

LIBRARIES: Mapping[str, Template] = {library.name: library for library in (CublasLt(), CudnnAttention())}


def table_of(func: PrimFunc, target: ResolvedTarget) -> Table | None:
    """Return what makes a function's table of kernels for symbolic sizes; None where nothing does."""
    return next((table for table in _TABLES if table.refuses(func, target) is None), None)


def list_candidates(
    func: PrimFunc, target: ResolvedTarget, makers: Mapping[str, Template] = TEMPLATES
) -> tuple[list[Parameters], list[str]]:
    """Return the parameters of every maker worth measuring for an unscheduled function, and why the others refused.

    `makers` are `TEMPLATES` or `LIBRARIES`.
    """
    found, refused = _candidates(*_key(func), target, tuple(makers.items()))
    return list(found), list(refused)


@lru_cache(maxsize=_KEPT)
def _candidates(
    func: StructuralKey, _names: tuple[str, ...], target: ResolvedTarget, makers: tuple[tuple[str, Template], ...]
) -> tuple[list[Parameters], list[str]]:
    found: list[Parameters] = []
    refused = []
    for name, template in makers:
        offered: Sequence[Parameters] | Refusal = template.candidates(func.key, target)
        if isinstance(offered, Refusal):
            refused.append(f"{name}: {offered.reason}")
        else:
            found.extend(offered)
    return found, refused


def list_refusals(func: PrimFunc, target: ResolvedTarget) -> list[str]:
    """Return why no template makes an unscheduled function; empty where one does."""
    reasons = []
    for name, template in TEMPLATES.items():
        refused = template.refuses(func, target)
        if refused is None:
            return []
        reasons.append(f"{name}: {refused.reason}")
    return reasons


def apply_decision(func: PrimFunc, target: ResolvedTarget, decision: str) -> PrimFunc:
    """Return the kernel that a recorded decision makes of an unscheduled function.

    Raises `TemplateError`: the decision is of no template or library known here, or does not fit the function or the
    target.
    """
    return _kernel(*_key(func), target, decision)


def _key(func: PrimFunc) -> tuple[StructuralKey, tuple[str, ...]]:
    """Return what tells functions apart: their structure, and the names that decisions and kernels take from them."""
    return StructuralKey(func), tuple(f"{param.name}{list(shape_of(param) or ())}" for param in func.params)


# A model is compiled untuned, tuned, and again where some sizes stay untuned: most of its kernels are the same.
@lru_cache(maxsize=_KEPT)
def _kernel(func: StructuralKey, _names: tuple[str, ...], target: ResolvedTarget, decision: str) -> PrimFunc:
    name = template_of(decision)
    makers = {**TEMPLATES, **LIBRARIES}
    template = makers.get(name)
    if template is None:
        raise TemplateError(f"template {name!r} is not known here, expected one of {', '.join(makers)}; update.")
    made = template.apply(func.key, target, template.parse(decision))
    if isinstance(made, Refusal):
        raise TemplateError(f"template {name!r} does not make this function: {made.reason}; measure the task again.")
    return made
