"""Measuring on a cluster: an actor for each device, side by side."""

from __future__ import annotations

import logging
import pickle
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from types import ModuleType
from typing import Any

from relaxtune.pipeline.errors import MeasuringBrokenError
from relaxtune.pipeline.printable import last_line
from relaxtune.pipeline.tuning.measure.backend import Outcome, Unmeasured
from relaxtune.pipeline.tuning.measure.side_by_side import SideBySide
from relaxtune.pipeline.tuning.measure.stop import StopSignal
from relaxtune.pipeline.tuning.measure.workload_spec import BuiltArtifact, WorkloadSpec
from relaxtune.pipeline.tuning.ray.cluster import MeasuringPlace, Reservation
from relaxtune.pipeline.tuning.ray.node_side import ActorSettings, MeasuringActor

logger = logging.getLogger(__name__)

# A device is waited for so long: at the start, and when its node is lost and Ray looks for another.
AWAY_S = 300.0
_POLL_S = 0.2
# One candidate is measured while the next one is on its way.
_DEPTH = 2
_LEAVE_S = 5.0
_STOPPED = Outcome(Unmeasured.STOPPED, error="the run was stopped")


class ActorMeasurer:
    """A measuring actor, which Ray starts again where there is such a device when it is lost.

    When the user stops the run, a call in flight is given up; a deadline lets it finish. The actor may be away for
    `away_s`, and longer as long as one of its `peers` is there. Its `name` is for logs, until the host is known.
    """

    def __init__(self, ray: ModuleType, actor: Any, name: str, stop: StopSignal, away_s: float = AWAY_S) -> None:
        self._ray, self._actor, self._stop = ray, actor, stop
        self.name, self.host, self.restarts = name, "", 0
        self._away_s = away_s
        self._lock = threading.Lock()
        self._there = False
        # A call to an actor that is lost meanwhile says nothing about the next actor.
        self._life = 0
        self._left = threading.Event()
        self.peers: Sequence[ActorMeasurer] = ()

    def ready(self) -> bool:
        """Wait until the actor lives on a device; False once it was left.

        Raises `MeasuringBrokenError`: it is away for too long and so are all others, or its device is not the run's.
        """
        with self._lock:
            began = time.monotonic()
            # When the run is stopped, what waits for the device is answered at once.
            while not (self._there or self._left.is_set() or self._stop.due):
                begun = self._actor.begin.remote()
                try:
                    while not self._ray.wait([begun], timeout=_POLL_S)[0]:
                        if self._left.is_set() or self._stop.due:
                            return not self._left.is_set()
                        if time.monotonic() - began > self._away_s:
                            why = (
                                f"no device for {self.name} in {self._away_s:g} s: its node is lost, or others use it "
                                "(`ray status` shows requests and resources)"
                            )
                            if not any(one._there for one in self.peers):
                                raise MeasuringBrokenError(why)
                            logger.warning("%s; the other devices go on, and it joins them when it is back", why)
                            began = time.monotonic()
                    self.host = self._ray.get(begun)
                    self._there = True
                except self._ray.exceptions.ActorUnavailableError:
                    time.sleep(_POLL_S)
                except self._ray.exceptions.RayError as e:
                    if self._left.is_set():
                        return False
                    raise MeasuringBrokenError(f"{self.name} cannot be used: {e}") from e
            return not self._left.is_set()

    def prepare_reference(self, spec: WorkloadSpec) -> None:
        """Compute a workload's reference; the first candidate reports a failure."""
        if not self._stop.due:
            self._ask("prepare_reference", spec)

    def measure(self, artifact: BuiltArtifact, spec: WorkloadSpec) -> Outcome:
        """Check and time a candidate."""
        # Since this thread last looked, another one may have lost the actor.
        if self._stop.due or not self.ready():
            return _STOPPED
        answer = self._ask("measure", artifact, spec)
        return answer if isinstance(answer, Outcome) else _STOPPED

    def compare(self, artifacts: Sequence[BuiltArtifact], spec: WorkloadSpec, rounds: int) -> Sequence[Outcome] | None:
        """Check candidates of one workload and time them alternately; after a loss once more on the next actor."""
        for _ in range(2):
            if not self._there:
                break
            answer = self._ask("compare", artifacts, spec, rounds)
            if not isinstance(answer, Outcome):
                return answer if isinstance(answer, list) else None
            if answer.status is not Unmeasured.LOST or not self.ready():
                break
        return None

    def leave(self) -> None:
        """Give up what is in hand and everything after it."""
        self._left.set()

    def close(self) -> None:
        """End the actor."""
        if self._there:
            # Its folders are removed; what hangs is killed with it.
            self._ray.wait([self._actor.leave.remote()], timeout=_LEAVE_S)
        self._ray.kill(self._actor)

    def _ask(self, method: str, *arguments: object) -> object:
        """Return what a method of the actor's `MeasuringProcess` returns, or as an outcome why there is nothing.

        It raises where the actor does: its child cannot be started, or a defect of ours. The device is left alone.
        """
        exceptions = self._ray.exceptions
        life = self._life
        try:
            # A future waits without polling Ray: with a hundred threads that would be most of their work.
            answer: Future[object] = self._actor.call.remote(method, *arguments).future()
            while True:
                try:
                    return answer.result(timeout=_POLL_S)
                except TimeoutError:
                    if answer.done():
                        raise
                    if self._left.is_set() or self._stop.requested:
                        return _STOPPED
        except exceptions.RayTaskError as e:
            if not isinstance(e.cause, (exceptions.ObjectStoreFullError, exceptions.OutOfDiskError)):
                raise
            return Outcome(Unmeasured.LOST, error=f"Ray: {last_line(str(e))}")
        except exceptions.RayActorError as e:
            with self._lock:
                if self._life == life:
                    self._there = False
                    self._life += 1
                    self.restarts += 1
                    logger.warning("%s is lost; Ray looks for another device", self.name)
            return Outcome(Unmeasured.LOST, error=f"{self.name} on {self.host} was lost: {type(e).__name__}")
        except exceptions.RayError as e:
            return Outcome(Unmeasured.LOST, error=f"Ray: {type(e).__name__}: {e}")


class RayBackend(SideBySide):
    """Measures on the devices of a cluster that `place` names; the actors end with it.

    With a `reservation`, actors for other work use the devices too.
    """

    def __init__(
        self,
        ray: ModuleType,
        place: MeasuringPlace,
        settings: ActorSettings,
        stop: StopSignal,
        reservation: Reservation | None = None,
    ) -> None:
        environment = place.environment
        actor = ray.remote(max_restarts=-1, max_task_retries=0)(MeasuringActor)
        options = [
            place.actor if reservation is None else reservation.measuring(number) for number in range(place.devices)
        ]
        actors = [actor.options(**one).remote(pickle.dumps(settings)) for one in options]
        measurers = [
            ActorMeasurer(ray, actor, f"{environment.device_name} {number}", stop)
            for number, actor in enumerate(actors)
        ]
        for one in measurers:
            one.peers = measurers
        super().__init__(measurers, place.undisturbed, depth=_DEPTH)
