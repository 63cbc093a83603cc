"""The candidates that kernel templates offer for a task."""

from __future__ import annotations

import logging
from collections.abc import Container
from dataclasses import dataclass

import tvm

from pipeline.tuning.task import TuningTask
from schedules.targets import ResolvedTarget
from schedules.templates.registry import apply_decision, list_candidates

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class TemplateCandidate:
    """Parameters of a template for a task: the decision that is recorded; the kernel is made when it is measured."""

    task: TuningTask
    decision: str

    def make(self, target: ResolvedTarget) -> tvm.ir.IRModule:
        """Return the module with the kernel as `main`.

        Raises
        ------
        TemplateError
            The template does not make it after all.
        """
        return tvm.IRModule({"main": apply_decision(self.task.mod["main"], target, self.decision)})


def template_candidates(
    task: TuningTask, target: ResolvedTarget, decided: Container[str] = ()
) -> list[TemplateCandidate]:
    """Return what templates offer for a task, the most promising first, less what was decided before."""
    found, refused = list_candidates(task.mod["main"], target)
    for reason in refused:
        logger.debug("task %s: %s", task.name, reason)
    decisions = [parameters.to_json() for parameters in found]
    return [TemplateCandidate(task, decision) for decision in decisions if decision not in decided]
