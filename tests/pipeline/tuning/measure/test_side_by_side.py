"""Devices side by side: who takes which work, and what becomes of the work of a device that is gone."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import closing
from queue import SimpleQueue

from relaxtune.pipeline.tuning.measure.backend import Outcome, Unmeasured
from relaxtune.pipeline.tuning.measure.side_by_side import SideBySide
from relaxtune.pipeline.tuning.measure.workload_spec import BuiltArtifact, WorkloadSpec
from relaxtune.pipeline.validate.tolerances import EXACT_KERNEL
from relaxtune.tuning_db.records import Status

CODE = BuiltArtifact(b"code", "0")


class Device:
    """Answers once it is told to, and keeps a list of what it was given."""

    def __init__(self, name: str, host: str = "") -> None:
        self.name, self.host, self.restarts = name, host, 0
        self.usable, self.go, self.begun = threading.Event(), threading.Event(), threading.Event()
        self.usable.set()
        self.given: list[str] = []
        self.left = False
        self.gone: Exception | None = None

    def ready(self) -> bool:
        self.usable.wait(30)
        if self.gone is not None:
            raise self.gone
        return not self.left

    def prepare_reference(self, spec: WorkloadSpec) -> None:
        self._do(f"reference {spec.workload}")

    def measure(self, artifact: BuiltArtifact, spec: WorkloadSpec) -> Outcome:
        self._do(spec.workload)
        return Outcome(Unmeasured.STOPPED) if self.left else Outcome(Status.OK, (1e-6,))

    def compare(self, artifacts: Sequence[BuiltArtifact], spec: WorkloadSpec, rounds: int) -> Sequence[Outcome] | None:
        self._do(f"final {spec.workload}")
        return None

    def _do(self, what: str) -> None:
        self.given.append(what)
        self.begun.set()
        self.go.wait(30)

    def leave(self) -> None:
        self.left = True
        self.go.set()
        self.usable.set()

    def close(self) -> None:
        self.go.set()


def side_by_side(*devices: Device) -> SideBySide:
    return SideBySide(devices, undisturbed=False)


def workload(name: str) -> WorkloadSpec:
    return WorkloadSpec(name, (), (), tolerance=EXACT_KERNEL)


def test_a_reference_is_waited_for_on_its_host_only() -> None:
    first, same, other = Device("first", "a"), Device("same", "a"), Device("other", "b")
    same.usable.clear()
    other.usable.clear()
    with closing(side_by_side(first, same, other)) as backend:
        backend.prepare_reference(workload("w"))
        assert first.begun.wait(30)
        backend.submit(CODE, workload("w"), lambda _: None)
        backend.submit(CODE, workload("v"), lambda _: None)
        same.usable.set()
        assert same.begun.wait(30)
        other.usable.set()
        assert other.begun.wait(30)
        assert (first.given, same.given, other.given) == (["reference w"], ["v"], ["w"])
        assert all(backend.busy_s[one.name] > 0 for one in (first, same, other))


def test_a_device_that_is_not_ready_takes_no_work() -> None:
    away, here = Device("away"), Device("here")
    away.usable.clear()
    here.go.set()
    done: SimpleQueue[Outcome] = SimpleQueue()
    with closing(side_by_side(away, here)) as backend:
        for number in range(4):
            backend.submit(CODE, workload(str(number)), done.put)
        assert [done.get(timeout=30).status for _ in range(4)] == [Status.OK] * 4
        assert away.given == []
        assert backend.busy_s["away"] == 0.0


def test_work_fails_as_broken_once_every_device_is_gone() -> None:
    gone = Device("gone")
    gone.gone = OSError("no such device any more")
    done: SimpleQueue[Outcome] = SimpleQueue()
    with closing(side_by_side(gone)) as backend:
        backend.submit(CODE, workload("w"), done.put)
        outcome = done.get(timeout=30)
        assert outcome.status is Unmeasured.BROKEN
        assert outcome.error == "no such device any more"


def test_a_device_goes_on_with_its_workloads_and_takes_others_when_it_would_be_idle() -> None:
    first, second = Device("first", "one host"), Device("second", "another")
    second.usable.clear()
    with closing(side_by_side(first, second)) as backend:
        done: SimpleQueue[Outcome] = SimpleQueue()
        backend.submit(CODE, workload("a"), done.put)
        assert first.begun.wait(30)
        second.usable.set()
        for name in ("b", "a"):
            backend.submit(CODE, workload(name), done.put)
        assert second.begun.wait(30)
        assert (first.given, second.given) == (["a"], ["b"])
        backend.submit(CODE, workload("b"), done.put)
        # The other device is busy with its own: this one takes what it would leave waiting.
        first.go.set()
        assert [done.get(timeout=30).status for _ in range(3)] == [Status.OK] * 3
        assert first.given == ["a", "a", "b"]
        second.go.set()
        done.get(timeout=30)


def test_what_tasks_begin_with_and_finals_come_first_in_the_order_of_the_tasks() -> None:
    device = Device("only")
    with closing(side_by_side(device)) as backend:
        done: SimpleQueue[object] = SimpleQueue()
        backend.submit(CODE, workload("w"), done.put)
        assert device.begun.wait(30)
        backend.prepare_reference(workload("a"))
        backend.prepare_reference(workload("b"))
        for name in ("b", "a", "a", "a", "a", "b"):
            backend.submit(CODE, workload(name), done.put)
        backend.compare([CODE], workload("a"), 2, done.put)
        device.go.set()
        for _ in range(8):
            done.get(timeout=30)
        assert device.given == ["w", "reference a", "a", "a", "a", "final a", "reference b", "b", "b", "a"]


class Leaving(Device):
    """Ends only while the other devices do."""

    meeting = threading.Barrier(3, timeout=30)

    def leave(self) -> None:
        super().leave()
        self.meeting.wait()

    def close(self) -> None:
        self.meeting.wait()


def test_all_devices_end_at_the_same_time() -> None:
    side_by_side(*(Leaving(name) for name in "abc")).close()
    assert not Leaving.meeting.broken
