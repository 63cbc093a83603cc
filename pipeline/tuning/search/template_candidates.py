"""The candidates that kernel templates, and vendor libraries where asked for, offer for a task."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from itertools import zip_longest

from relaxtune.pipeline.tasks.task import TuningTask
from relaxtune.pipeline.tuning.measure.recipe import Recipe
from relaxtune.schedules.registry import LIBRARIES, TEMPLATES, list_candidates
from relaxtune.schedules.targets import ResolvedTarget
from relaxtune.schedules.templates.base import Template
from relaxtune.tuning_db.records import Route

logger = logging.getLogger(__name__)

_MAKERS: Mapping[Route, Mapping[str, Template]] = {Route.TEMPLATE: TEMPLATES, Route.LIBRARY: LIBRARIES}
# The routes whose candidates are parameters, known before anything is measured.
OFFERED_ROUTES = frozenset(_MAKERS)


@dataclass(frozen=True)
class TemplateCandidate:
    """Parameters of a template for a task: the decision that is recorded; the kernel is made where it is built."""

    task: TuningTask
    decision: str
    route: Route = Route.TEMPLATE

    def recipe(self, target: ResolvedTarget) -> Recipe:
        """Return what a builder makes the kernel of."""
        return Recipe(self.task.packed, target, self.decision)


def template_candidates(
    task: TuningTask,
    target: ResolvedTarget,
    routes: Collection[Route] = (Route.TEMPLATE,),
) -> list[TemplateCandidate]:
    """Return what templates and libraries offer for a task, the most promising first.

    They take turns, so that a short run measures the first of each.

    Parameters
    ----------
    routes : collection of Route
        Routes outside `OFFERED_ROUTES` offer nothing here.
    """
    offers: list[list[TemplateCandidate]] = []
    for route, makers in _MAKERS.items():
        if route not in routes:
            continue
        found, refused = list_candidates(task.mod["main"], target, makers)
        for reason in refused:
            logger.debug("task %s: %s", task.name, reason)
        offers.append([TemplateCandidate(task, parameters.to_json(), route) for parameters in found])
    return [one for turn in zip_longest(*offers) for one in turn if one is not None]
