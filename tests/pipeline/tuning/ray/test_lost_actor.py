"""What a lost actor had in hand, and who asks the next one."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from types import SimpleNamespace

import ray
from ray.exceptions import ActorDiedError

from relaxtune.pipeline.tuning.measure.backend import Outcome, Unmeasured
from relaxtune.pipeline.tuning.measure.stop import StopSignal
from relaxtune.pipeline.tuning.measure.workload_spec import BuiltArtifact
from relaxtune.pipeline.tuning.ray.backend import ActorMeasurer
from relaxtune.tuning_db.records import Status
from tests.pipeline.tuning.tuning_cases import add_one_mod, spec_of

DONE = Outcome(Status.OK, (1.0,))


def ended(with_: object) -> SimpleNamespace:
    future: Future[object] = Future()
    if isinstance(with_, BaseException):
        future.set_exception(with_)
    else:
        future.set_result(with_)
    return SimpleNamespace(future=lambda: future)


class Actor:
    """Answers what a test says; `begun` counts its lives."""

    def __init__(self) -> None:
        self.begun = 0
        self.answer: Callable[[], object] = lambda: DONE
        self.begin = SimpleNamespace(remote=self._begin)
        self.call = SimpleNamespace(remote=lambda *_: ended(self.answer()))

    def _begin(self) -> str:
        self.begun += 1
        return "host"


def measurer(actor: Actor) -> ActorMeasurer:
    stand_in = SimpleNamespace(exceptions=ray.exceptions, wait=lambda asked, timeout: (asked, []), get=lambda one: one)
    return ActorMeasurer(stand_in, actor, "a device", StopSignal())  # type: ignore[arg-type]


def measure(one: ActorMeasurer) -> Outcome:
    return one.measure(BuiltArtifact(b"code", "0" * 64), spec_of(add_one_mod(), "any"))


def test_a_thread_that_did_not_see_the_loss_waits_for_the_next_actor_too() -> None:
    actor = Actor()
    one = measurer(actor)
    assert one.ready()
    actor.answer = ActorDiedError
    assert measure(one).status is Unmeasured.LOST
    # It comes from a thread that was told of the first actor only.
    actor.answer = lambda: DONE if actor.begun == 2 else ActorDiedError()
    assert measure(one).status is Status.OK
    assert one.restarts == 1


def test_what_a_lost_actor_had_in_hand_does_not_end_the_next_one() -> None:
    actor = Actor()
    one = measurer(actor)
    assert one.ready()

    def late() -> object:
        # While this answer is on its way, another thread loses the actor and finds the next one.
        actor.answer = ActorDiedError
        assert measure(one).status is Unmeasured.LOST
        assert one.ready()
        return ActorDiedError()

    actor.answer = late
    assert measure(one).status is Unmeasured.LOST
    actor.answer = lambda: DONE
    assert measure(one).status is Status.OK
    assert (actor.begun, one.restarts) == (2, 1)
