"""Cells that are imported and finished by tasks of a Ray cluster.

A cell is imported on any node. It is finished on a device of its target that Ray gives to the task alone: measuring
actors hold theirs until the tuning is over, so that nothing is timed beside a measurement.
"""

from __future__ import annotations

import os
from concurrent.futures import Future
from dataclasses import replace
from typing import Any, cast

from relaxtune.pipeline.batch.finishing import FinishedCell
from relaxtune.pipeline.batch.worker import AheadWork, CellWorker, FinishWork, PrepareWork, Work
from relaxtune.pipeline.batch.workers import CellWorkers
from relaxtune.pipeline.tuning.ray.machine import RayCluster
from relaxtune.schedules.targets import ResolvedTarget
from relaxtune.tuning_db.cell_states import CellState


class ClusterWorkers(CellWorkers):
    """Tasks of a cluster.

    Parameters
    ----------
    cluster : RayCluster
        Whose nodes see the plan's models and its folder of artifacts at the same paths as the driver.
    target : ResolvedTarget
        Of the cells.
    """

    def __init__(self, cluster: RayCluster, target: ResolvedTarget) -> None:
        place = cluster.get_place(target)
        self._count = max(2, place.devices)
        # A lost node's task is done again elsewhere.
        self._prepare = cluster.ray.remote(num_cpus=1, max_retries=2)(_answer)
        self._finish = cluster.ray.remote(max_retries=2, **place.actor)(_answer)

    @property
    def count(self) -> int:
        """Cells that are imported at the same time."""
        return self._count

    def submit(self, work: Work) -> Future[object]:
        """Hand in work."""
        if isinstance(work, AheadWork):
            # No node keeps a model for later.
            future: Future[object] = Future()
            future.set_result(False)
            return future
        task: Any = self._prepare if isinstance(work, PrepareWork) else self._finish
        return cast("Future[object]", task.remote(work).future())

    def close(self) -> None:
        """Do nothing: what is not done ends with the connection."""


def _answer(work: Work) -> object:
    """Do work on a node; an error says which."""
    found = CellWorker().answer(work)
    if isinstance(work, FinishWork) and isinstance(found, FinishedCell) and found.state is CellState.FAILED:
        where = f"on {os.uname().nodename}: "
        return replace(found, facts=replace(found.facts, error=where + (found.facts.error or "")))
    return found
