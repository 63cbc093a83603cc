"""Where the candidates of a plan are built and measured: this machine, or a cluster.

    plan ── open_executors(cluster) ──▶ Executors ── machine(target, ...) ──▶ Machine(builder, backend)

A new place to measure is a class with the methods of `LocalExecutors`, and a line in `open_executors`.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack, closing
from typing import TypeAlias

from relaxtune.pipeline.batch.worker import WORKER_MODULE
from relaxtune.pipeline.batch.workers import CellWorkers, ClusterWorkers, DeviceWorkers, LocalWorkers
from relaxtune.pipeline.environment import UNKNOWN_DEVICE, detect_environment
from relaxtune.pipeline.temporary import temporary_folder
from relaxtune.pipeline.tuning.local.backend import Machine, this_machine
from relaxtune.pipeline.tuning.local.devices import choose_devices
from relaxtune.pipeline.tuning.measure.stop import StopSignal
from relaxtune.pipeline.tuning.options import TuningOptions
from relaxtune.pipeline.tuning.ray.cluster import Reservation, find_place, new_run
from relaxtune.pipeline.tuning.ray.machine import RayCluster, require_server
from relaxtune.pipeline.workers.fork_server import ForkServer
from relaxtune.schedules.targets import ResolvedTarget
from relaxtune.tuning_db.records import Environment
from relaxtune.tuning_db.urls import DatabasePlace, DatabaseUrl


class LocalExecutors:
    """The machine that drives the plan: build processes on its cores, a measuring process for each device."""

    def __init__(self) -> None:
        self._stack = ExitStack()
        self._locks = self._stack.enter_context(temporary_folder())
        self._server: ForkServer | None = None

    def find_environment(self, target: ResolvedTarget) -> Environment | None:
        """Return the environment that measurements for a target are true for; None where no device of it is here."""
        if target.kind == "cuda" and self._server is None and ForkServer.available():
            # It does the imports of the processes that will work on cells, while this one looks for the devices.
            self._server = self._stack.enter_context(closing(ForkServer([WORKER_MODULE])))
        found = detect_environment(target)
        return None if found.device_name == UNKNOWN_DEVICE else found

    def count_devices(self, target: ResolvedTarget) -> int:
        """Return how many devices measure for a target that has an environment."""
        return len(choose_devices(target))

    def apart(self, targets: Sequence[ResolvedTarget]) -> list[list[int]]:
        """Return the positions of targets in lists: targets of one list are tuned one after another."""
        return [list(range(len(targets)))]

    def machine(
        self, target: ResolvedTarget, environment: Environment, options: TuningOptions, stop: StopSignal
    ) -> AbstractContextManager[Machine]:
        """Start build and measuring processes for a target; leaving the context ends them."""
        return this_machine(target, environment, options, stop, locks=self._locks if target.kind == "cuda" else None)

    def workers(self, target: ResolvedTarget) -> CellWorkers | None:
        """Return processes that import and finish cells while others are tuned; None on a CPU.

        Its clock would be disturbed: there the tuning thread itself imports and finishes cells, at moments in which
        nothing is built or measured.
        """
        if target.kind != "cuda":
            return None
        return self._stack.enter_context(closing(LocalWorkers(choose_devices(target), self._locks, self._server)))

    def close(self) -> None:
        """End all that was started here."""
        self._stack.close()


class ClusterExecutors(RayCluster):
    """A Ray cluster: builders on all its cores, a measuring actor for each device; the driver needs none."""

    def __init__(self, address: str) -> None:
        super().__init__(address, [WORKER_MODULE])
        self._reserved: dict[str, Reservation] = {}

    def count_devices(self, target: ResolvedTarget) -> int:
        """Return how many of the cluster's devices are a target's."""
        return self.get_place(target).devices

    def apart(self, targets: Sequence[ResolvedTarget]) -> list[list[int]]:
        """Return targets by the device that they are measured on, where building elsewhere disturbs none of them."""
        places = [find_place(self.nodes, target) for target in targets]
        if not all(place is None or place.undisturbed for place in places):
            return [list(range(len(targets)))]
        found: dict[str, list[int]] = {}
        for position, place in enumerate(places):
            found.setdefault("" if place is None else place.environment.device_name, []).append(position)
        return list(found.values())

    def machine(
        self, target: ResolvedTarget, environment: Environment, options: TuningOptions, stop: StopSignal
    ) -> AbstractContextManager[Machine]:
        """Start builders and measuring actors for a target, on its reserved devices."""
        return self.open_machine(target, environment, options, stop, self._reserved.get(target.arch))

    def workers(self, target: ResolvedTarget) -> CellWorkers:
        """Return actors on the target's GPUs, which are reserved from now on; tasks for a CPU."""
        if target.kind != "cuda":
            return ClusterWorkers(self, target)
        if target.arch not in self._reserved:
            self._reserved[target.arch] = self._stack.enter_context(
                closing(Reservation(self.ray, self.get_place(target), new_run()))
            )
        return self._stack.enter_context(closing(DeviceWorkers(self, self._reserved[target.arch])))


Executors: TypeAlias = LocalExecutors | ClusterExecutors


def open_executors(cluster: str | None = None, database: DatabasePlace | None = None) -> closing[Executors]:
    """Return the place where a plan is carried out; leaving the context ends what was started there.

    `cluster`: address of a Ray cluster; None is this machine. `database`: where its records go: a cluster needs a
    server.
    Raises `UsageError`: the cluster cannot be used, or the database is a file.
    """
    if cluster is None:
        return closing(LocalExecutors())
    if database is not None:
        require_server(DatabaseUrl.of(database))
    return closing(ClusterExecutors(cluster))
