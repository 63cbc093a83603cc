"""The candidates that kernel templates, and vendor libraries where asked for, offer for a task."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from itertools import zip_longest

from relaxtune.pipeline.tasks.task import TuningTask
from relaxtune.pipeline.tuning.candidates import Candidate
from relaxtune.pipeline.tuning.measure.recipe import Recipe
from relaxtune.schedules.registry import LIBRARIES, TEMPLATES, list_candidates
from relaxtune.schedules.targets import ResolvedTarget
from relaxtune.schedules.templates.base import Template
from relaxtune.tuning_db.records import Route

logger = logging.getLogger(__name__)

_MAKERS: Mapping[Route, Mapping[str, Template]] = {Route.TEMPLATE: TEMPLATES, Route.LIBRARY: LIBRARIES}
# The routes whose candidates are parameters, known before anything is measured.
OFFERED_ROUTES = frozenset(_MAKERS)


def template_candidates(
    task: TuningTask, target: ResolvedTarget, routes: Collection[Route] = (Route.TEMPLATE,)
) -> list[Candidate]:
    """Return what templates and libraries offer for a task, the most promising first.

    They alternate, so that a short run measures the first of each.

    Parameters
    ----------
    routes : collection of Route
        Routes outside `OFFERED_ROUTES` offer nothing here.
    """
    offers: list[list[Candidate]] = []
    for route, makers in _MAKERS.items():
        if route not in routes:
            continue
        found, refused = list_candidates(task.mod["main"], target, makers)
        for reason in refused:
            logger.debug("task %s: %s", task.name, reason)
        offers.append([_candidate(task, target, route, parameters.to_json()) for parameters in found])
    return [one for rank in zip_longest(*offers) for one in rank if one is not None]


def _candidate(task: TuningTask, target: ResolvedTarget, route: Route, decision: str) -> Candidate:
    return Candidate(route, decision, Recipe(task.packed, target, decision))
