"""An object store without room is the cluster's fault: what it turned away is built again, and no candidate fails."""

from __future__ import annotations

import time
from concurrent.futures import Future
from contextlib import closing
from queue import SimpleQueue
from types import SimpleNamespace

import pytest
import ray

from relaxtune.pipeline.tuning.local.build_pool import BuilderLimits
from relaxtune.pipeline.tuning.measure.backend import Built, Unmeasured
from relaxtune.pipeline.tuning.measure.stop import StopSignal
from relaxtune.pipeline.tuning.measure.workload_spec import BuiltArtifact
from relaxtune.pipeline.tuning.ray import builder as builder_module
from relaxtune.pipeline.tuning.ray.backend import ActorMeasurer
from relaxtune.pipeline.tuning.ray.builder import RayBuilder
from relaxtune.pipeline.tuning.ray.node_side import build as build_candidate
from relaxtune.schedules.targets import ResolvedTarget
from relaxtune.tuning_db.records import Status
from tests.pipeline.tuning.tuning_cases import add_one_mod, spec_of

FULL = ray.exceptions.OutOfDiskError("node n has no room")
DONE = Built(Status.OK, BuiltArtifact(b"", "0" * 64))


class Answer:
    """What Ray returns of a call: a value or an error, at once."""

    def __init__(self, found: object, *_: object) -> None:
        self._future: Future[object] = Future()
        if isinstance(found, BaseException):
            self._future.set_exception(found)
        else:
            self._future.set_result(found)

    def future(self) -> Future[object]:
        return self._future


class Cluster:
    """A stand-in for Ray whose builds end as told, one after another."""

    exceptions = ray.exceptions

    def __init__(self, *ends: object) -> None:
        self.ends = list(ends)
        self.builds: list[tuple[bytes, ...]] = []

    def remote(self, **_: object) -> object:
        return lambda function: SimpleNamespace(remote=self._build if function is build_candidate else Answer)

    def _build(self, *given: bytes) -> Answer:
        self.builds.append(given)
        return Answer(self.ends.pop(0))

    def cancel(self, answer: object, *, force: bool) -> None:
        """Do nothing: it has ended."""

    def cluster_resources(self) -> dict[str, float]:
        return {"CPU": 4.0}


def build(cluster: Cluster, target: ResolvedTarget, stop: StopSignal | None = None) -> Built:
    done: SimpleQueue[Built] = SimpleQueue()
    opened = RayBuilder(cluster, BuilderLimits(), stop or StopSignal())  # type: ignore[arg-type]
    with closing(opened) as builder:
        builder.submit(add_one_mod(), target.target, done.put)
        return done.get(timeout=20)


def test_what_found_no_room_is_built_again(llvm_target: ResolvedTarget, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(builder_module, "_FULL_WAIT_S", 0.01)
    cluster = Cluster(FULL, ray.exceptions.ObjectStoreFullError("full"), DONE)
    assert build(cluster, llvm_target).status is Status.OK
    assert len(cluster.builds) == 3
    assert len(set(cluster.builds)) == 1


def test_a_store_that_stays_full_loses_the_candidate(
    llvm_target: ResolvedTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(builder_module, "_FULL_WAIT_S", 0.0)
    monkeypatch.setattr(builder_module, "_FULL_MAX", 2)
    assert build(Cluster(FULL, FULL, FULL), llvm_target).status is Unmeasured.LOST


def test_a_stopped_run_waits_for_no_room(llvm_target: ResolvedTarget) -> None:
    stop = StopSignal(time.monotonic() + 0.2)
    assert build(Cluster(FULL), llvm_target, stop).status is Unmeasured.STOPPED


def test_a_measurement_that_found_no_room_is_lost_and_its_device_stays() -> None:
    errors = [ray.exceptions.RayTaskError("measure", "trace", cause) for cause in (FULL, OSError("no child"))]
    answers = [Answer(error.as_instanceof_cause()) for error in errors]
    actor = SimpleNamespace(call=SimpleNamespace(remote=lambda *_: answers.pop(0)))
    measurer = ActorMeasurer(ray, actor, "device", StopSignal())
    measurer._there = True
    candidate = (BuiltArtifact(b"code", "0" * 64), spec_of(add_one_mod()))
    assert measurer.measure(*candidate).status is Unmeasured.LOST
    with pytest.raises(ray.exceptions.RayTaskError):
        measurer.measure(*candidate)
