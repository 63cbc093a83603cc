"""All templates there are, asked as one: what a function may be made from, and the kernel of a decision."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tvm.tirx import PrimFunc

from schedules.targets import ResolvedTarget
from schedules.templates.base import Parameters, Refusal, Template, TemplateError, template_of
from schedules.templates.gemm_sm90 import GemmSm90

TEMPLATES: Mapping[str, Template] = {template.name: template for template in (GemmSm90(),)}


def list_candidates(func: PrimFunc, target: ResolvedTarget) -> tuple[list[Parameters], list[str]]:
    """Return the parameters of every template worth measuring for a function, and why the other templates refused.

    Parameters
    ----------
    func : PrimFunc
        Unscheduled, as FuseTIR gives it.
    target : ResolvedTarget
        What the kernel is for.
    """
    found: list[Parameters] = []
    refused = []
    for name, template in TEMPLATES.items():
        offered: Sequence[Parameters] | Refusal = template.candidates(func, target)
        if isinstance(offered, Refusal):
            refused.append(f"{name}: {offered.reason}")
        else:
            found.extend(offered)
    return found, refused


def apply_decision(func: PrimFunc, target: ResolvedTarget, decision: str) -> PrimFunc:
    """Return the kernel that a recorded decision makes of an unscheduled function.

    Raises
    ------
    TemplateError
        The decision is of no template known here, or does not fit the function or the target.
    """
    name = template_of(decision)
    template = TEMPLATES.get(name)
    if template is None:
        raise TemplateError(f"template {name!r} is not known here, expected one of {', '.join(TEMPLATES)}; update.")
    made = template.apply(func, target, template.parse(decision))
    if isinstance(made, Refusal):
        raise TemplateError(f"template {name!r} does not make this function: {made.reason}; measure the task again.")
    return made
