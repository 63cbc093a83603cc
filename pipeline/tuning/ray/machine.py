"""A cluster as what builds and measures for a run: the same shape as `relaxtune.pipeline.tuning.local.backend`."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from types import ModuleType

from relaxtune.pipeline.errors import UsageError
from relaxtune.pipeline.tuning.local.backend import Machine, timing_options
from relaxtune.pipeline.tuning.local.build_pool import BUILD_MODULE, BuilderLimits
from relaxtune.pipeline.tuning.measure.stop import StopSignal
from relaxtune.pipeline.tuning.options import TuningOptions
from relaxtune.pipeline.tuning.ray.backend import RayBackend
from relaxtune.pipeline.tuning.ray.builder import RayBuilder
from relaxtune.pipeline.tuning.ray.cluster import (
    MeasuringPlace,
    Reservation,
    connected,
    find_place,
    new_run,
    require_equal,
)
from relaxtune.pipeline.tuning.ray.facts import list_versions
from relaxtune.pipeline.tuning.ray.node_side import ActorSettings
from relaxtune.pipeline.tuning.ray.nodes import NodeProcesses
from relaxtune.schedules.targets import ResolvedTarget
from relaxtune.tuning_db.records import Environment
from relaxtune.tuning_db.urls import DatabaseUrl


class RayCluster:
    """A connection to a cluster, whose nodes all have what this process has.

    `address`: such as `10.0.0.1:6379`, or `auto` on a node of the cluster. `modules`: modules that a process on each
    node imports too, to fork children that have done so.
    Raises `UsageError`: ray is missing, or no cluster answers; `PipelineError`: a node lacks this package or has
    another version of something.
    """

    def __init__(self, address: str, modules: Sequence[str] = ()) -> None:
        self.forks = new_run()
        with contextlib.ExitStack() as stack:
            self.ray: ModuleType = stack.enter_context(connected(address))
            processes = stack.enter_context(
                contextlib.closing(NodeProcesses(self.ray, self.forks, [BUILD_MODULE, *modules]))
            )
            # This process imports TVM and reads its own versions while the nodes do.
            list_versions()
            self.nodes = processes.nodes()
            require_equal(self.nodes)
            self._stack = stack.pop_all()

    def find_environment(self, target: ResolvedTarget) -> Environment | None:
        """Return what measurements for a target are true for; None where no node has such a device."""
        place = find_place(self.nodes, target)
        return None if place is None else place.environment

    @contextlib.contextmanager
    def open_machine(
        self,
        target: ResolvedTarget,
        environment: Environment,
        options: TuningOptions,
        stop: StopSignal,
        reservation: Reservation | None = None,
    ) -> Iterator[Machine]:
        """Start builders and measuring actors for a target, on devices that may be reserved, and end them.

        Raises `UsageError`: no node has a device for the target.
        """
        place = self.get_place(target)
        settings = ActorSettings(
            new_run() if reservation is None else reservation.run,
            target,
            environment,
            timing_options(target, options),
            options.run_timeout_s,
            options.seed,
            self.forks,
        )
        with contextlib.ExitStack() as stack:
            backend = stack.enter_context(contextlib.closing(RayBackend(self.ray, place, settings, stop, reservation)))
            limits = BuilderLimits(timeout_s=options.build_timeout_s)
            builder = stack.enter_context(
                contextlib.closing(RayBuilder(self.ray, limits, stop, place.cpus, self.forks))
            )
            yield Machine(builder, backend)

    def close(self) -> None:
        """Leave the cluster."""
        self._stack.close()

    def get_place(self, target: ResolvedTarget) -> MeasuringPlace:
        """Return what measures for a target.

        Raises `UsageError`: no node has a device for it.
        """
        place = find_place(self.nodes, target)
        if place is None:
            raise UsageError(f"no node of the cluster measures for {target.arch}; see `relaxtune cluster check`")
        return place


def require_server(database: DatabaseUrl) -> None:
    """Check that a database serves a cluster.

    Raises `UsageError`: it is a SQLite file.
    """
    if not database.on_server:
        raise UsageError(
            f"--cluster needs a PostgreSQL database, got the SQLite file {database}. A file belongs to one machine: "
            "its locks do not hold over network file systems, and a driver on another host would not see it. Start a "
            "server and give postgresql://USER@HOST/NAME; `relaxtune db merge` takes the file's records over"
        )
