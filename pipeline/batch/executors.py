"""Where the candidates of a plan are built and measured: this machine, or a cluster.

    plan ── open_executors(cluster) ──▶ Executors ── backends(target, ...) ──▶ Machine(builder, backend)

A batch asks for builders and backends here and nowhere else. A new place to measure is a class in this file's shape and
a line in `open_executors`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack, closing
from types import TracebackType
from typing import Self

from relaxtune.pipeline.batch.cluster_workers import ClusterWorkers, DeviceWorkers
from relaxtune.pipeline.batch.worker import WORKER_MODULE
from relaxtune.pipeline.batch.workers import CellWorkers, LocalWorkers
from relaxtune.pipeline.environment import UNKNOWN_DEVICE, detect_environment
from relaxtune.pipeline.temporary import temporary_folder
from relaxtune.pipeline.tuning.local.backend import Machine, this_machine
from relaxtune.pipeline.tuning.local.devices import choose_devices
from relaxtune.pipeline.tuning.measure.stop import StopSignal
from relaxtune.pipeline.tuning.options import TuningOptions
from relaxtune.pipeline.tuning.ray.cluster import find_place
from relaxtune.pipeline.tuning.ray.machine import RayCluster, require_server
from relaxtune.pipeline.tuning.ray.reservation import Reservation
from relaxtune.pipeline.workers.fork_server import ForkServer
from relaxtune.schedules.targets import ResolvedTarget
from relaxtune.tuning_db.records import Environment
from relaxtune.tuning_db.urls import DatabasePlace, DatabaseUrl


class Executors(ABC):
    """Gives each target of a plan its builder and its backend. A context manager: leaving it ends what it started."""

    def __enter__(self) -> Self:
        """Return itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Close."""
        self.close()

    @abstractmethod
    def find_environment(self, target: ResolvedTarget) -> Environment | None:
        """Return what measurements for a target are true for; None where no device of it can be had."""

    @abstractmethod
    def count_devices(self, target: ResolvedTarget) -> int:
        """Return how many devices measure for a target that has an environment."""

    def apart(self, targets: Sequence[ResolvedTarget]) -> list[list[int]]:
        """Return the positions of targets: those of different lists may be tuned at the same time, others in turn."""
        return [list(range(len(targets)))]

    @abstractmethod
    def backends(
        self, target: ResolvedTarget, environment: Environment, options: TuningOptions, stop: StopSignal
    ) -> AbstractContextManager[Machine]:
        """Start what builds and measures candidates of a target; leaving the context ends it.

        Parameters
        ----------
        environment : Environment
            What `find_environment` returned for the target.
        options, stop : TuningOptions, StopSignal
            Of the tuning run.
        """

    @abstractmethod
    def workers(self, target: ResolvedTarget) -> CellWorkers | None:
        """Return where cells of a target are imported and finished while others are tuned.

        None where that would disturb measurements: cells are then imported and finished by the tuning thread itself,
        at moments in which nothing is built or measured.
        """

    @abstractmethod
    def close(self) -> None:
        """End what was started here."""


class LocalExecutors(Executors):
    """The machine that drives the plan: build processes on its cores, a measuring process for each device."""

    def __init__(self) -> None:
        """Start nothing yet."""
        self._stack = ExitStack()
        self._turns = self._stack.enter_context(temporary_folder())
        self._server: ForkServer | None = None

    def find_environment(self, target: ResolvedTarget) -> Environment | None:
        """Return this machine's environment."""
        if target.kind == "cuda" and self._server is None and ForkServer.available():
            # It does the imports of the processes that will work on cells, while this one looks for the devices.
            self._server = self._stack.enter_context(closing(ForkServer([WORKER_MODULE])))
        found = detect_environment(target)
        return None if found.device_name == UNKNOWN_DEVICE else found

    def count_devices(self, target: ResolvedTarget) -> int:
        """Return how many of this machine's devices are a target's."""
        return len(choose_devices(target))

    def backends(
        self, target: ResolvedTarget, environment: Environment, options: TuningOptions, stop: StopSignal
    ) -> AbstractContextManager[Machine]:
        """Start build and measuring processes."""
        return this_machine(target, environment, options, stop, turns=self._turns if target.kind == "cuda" else None)

    def workers(self, target: ResolvedTarget) -> CellWorkers | None:
        """Return processes pinned to the GPUs; none for a CPU, whose clock they would disturb."""
        if target.kind != "cuda":
            return None
        return self._stack.enter_context(closing(LocalWorkers(choose_devices(target), self._turns, self._server)))

    def close(self) -> None:
        """End the processes that work on cells."""
        self._stack.close()


class ClusterExecutors(Executors):
    """A Ray cluster: builders on all its cores, a measuring actor for each device; the driver needs none."""

    def __init__(self, address: str) -> None:
        self._cluster = RayCluster(address, [WORKER_MODULE])
        self._stack = ExitStack()
        self._reserved: dict[str, Reservation] = {}

    def find_environment(self, target: ResolvedTarget) -> Environment | None:
        """Return the environment of the cluster's devices for a target."""
        return self._cluster.find_environment(target)

    def count_devices(self, target: ResolvedTarget) -> int:
        """Return how many of the cluster's devices are a target's."""
        return self._cluster.get_place(target).devices

    def apart(self, targets: Sequence[ResolvedTarget]) -> list[list[int]]:
        """Return targets by the device that they are measured on, where building elsewhere disturbs none of them."""
        places = [find_place(self._cluster.nodes, target) for target in targets]
        if not all(place is None or place.undisturbed for place in places):
            return super().apart(targets)
        found: dict[str, list[int]] = {}
        for position, place in enumerate(places):
            found.setdefault("" if place is None else place.environment.device_name, []).append(position)
        return list(found.values())

    def backends(
        self, target: ResolvedTarget, environment: Environment, options: TuningOptions, stop: StopSignal
    ) -> AbstractContextManager[Machine]:
        """Start builders and measuring actors."""
        return self._cluster.machine(target, environment, options, stop, self._reserved.get(target.arch))

    def workers(self, target: ResolvedTarget) -> CellWorkers | None:
        """Return actors on the target's GPUs, which are reserved from now on; tasks for a CPU."""
        if target.kind != "cuda":
            return ClusterWorkers(self._cluster, target)
        if target.arch not in self._reserved:
            self._reserved[target.arch] = self._stack.enter_context(closing(self._cluster.reserve(target)))
        return self._stack.enter_context(closing(DeviceWorkers(self._cluster, self._reserved[target.arch])))

    def close(self) -> None:
        """End the actors, give the devices back, and leave the cluster."""
        self._stack.close()
        self._cluster.close()


def open_executors(cluster: str | None = None, database: DatabasePlace | None = None) -> Executors:
    """Return where a plan is carried out.

    Parameters
    ----------
    cluster : str or None
        Address of a Ray cluster; None is this machine.
    database : str, Path, DatabaseUrl or None
        Where its records go: a cluster needs a server.

    Raises
    ------
    UsageError
        The cluster cannot be used, or the database is a file.
    """
    if cluster is None:
        return LocalExecutors()
    if database is not None:
        require_server(DatabaseUrl.of(database))
    return ClusterExecutors(cluster)
