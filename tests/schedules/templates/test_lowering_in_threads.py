"""TVM's work in threads has the settings of the thread that starts it."""

from __future__ import annotations

import threading

import pytest
from tvm.ir.transform import PassContext
from tvm.target import Target

from relaxtune.schedules.templates import lowering
from relaxtune.schedules.templates.lowering import context_like, map_side_by_side


@pytest.fixture(autouse=True)
def _two_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lowering, "usable_cpus", lambda: [0, 1])


def test_results_keep_their_order_when_the_first_call_ends_last() -> None:
    second_ended = threading.Event()

    def call(number: int) -> tuple[int, bool]:
        if number == 0:
            # Two calls run at a time, or this one waits in vain.
            return number, second_ended.wait(60)
        second_ended.set()
        return number, threading.current_thread() is threading.main_thread()

    assert map_side_by_side(call, [0, 1, 2]) == [(0, True), (1, False), (2, False)]


def test_calls_have_the_pass_context_and_the_target_of_the_caller() -> None:
    def seen(_item: int) -> tuple[int, list[str], dict[str, object], str]:
        now = PassContext.current()
        return int(now.opt_level), list(now.disabled_pass), dict(now.config), str(Target.current())

    target, config = Target("cuda"), {"tirx.disable_vectorize": True}
    with PassContext(opt_level=1, disabled_pass=["tirx.UnrollLoop"], config=config), target:
        here = seen(0)
        assert map_side_by_side(seen, [0, 1]) == [here, here]
    assert here[:2] == (1, ["tirx.UnrollLoop"])


def test_calls_have_no_target_when_the_caller_has_none() -> None:
    assert map_side_by_side(lambda _item: Target.current(allow_none=True), [0, 1]) == [None, None]


def test_error_of_a_call_is_the_callers() -> None:
    def refuse(number: int) -> None:
        raise ValueError(f"call {number}")

    with pytest.raises(ValueError, match="call 0"):
        map_side_by_side(refuse, [0, 1])


def test_context_like_another_adds_settings_and_leaves_passes_out() -> None:
    one = PassContext(opt_level=2, disabled_pass=["a"], config={"tirx.disable_vectorize": True})
    made = context_like(one, {"tirx.use_async_copy": True}, disabled=("b",))
    assert (int(made.opt_level), list(made.disabled_pass)) == (2, ["a", "b"])
    assert dict(made.config) == {"tirx.disable_vectorize": True, "tirx.use_async_copy": True}
