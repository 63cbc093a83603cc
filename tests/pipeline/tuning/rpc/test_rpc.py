"""Measuring through a real tracker and a real server on this machine's CPU."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
from tvm.rpc.server import Server
from tvm.rpc.tracker import Tracker

from relaxtune.pipeline.environment import detect_environment
from relaxtune.pipeline.errors import UsageError
from relaxtune.pipeline.tuning.local.build_pool import BuildPool
from relaxtune.pipeline.tuning.measure.backend import Unmeasured
from relaxtune.pipeline.tuning.rpc.backend import RpcBackend, count_boards
from relaxtune.pipeline.tuning.rpc.measurer import boards_of
from relaxtune.schedules.targets import resolve_target
from relaxtune.tuning_db.records import Status
from tests.pipeline.tuning.tuning_cases import add_one_mod, built, extern_mod, measure, spec_of

KEY = "board"
TARGET = resolve_target("llvm")


@pytest.fixture(scope="module")
def tracker() -> Iterator[tuple[str, int]]:
    started = Tracker(host="127.0.0.1", port=9190, port_end=9290)
    yield "127.0.0.1", started.port
    started.terminate()


@pytest.fixture(scope="module")
def servers(tracker: tuple[str, int]) -> Iterator[list[Server]]:
    started = [Server(host="127.0.0.1", port=9091, port_end=9189, key=KEY, tracker_addr=tracker) for _ in range(2)]
    until = time.monotonic() + 60
    while boards_of(tracker, KEY) < len(started) and time.monotonic() < until:
        time.sleep(0.05)
    yield started
    for one in started:
        one.terminate()


@pytest.fixture(scope="module")
def backend(tracker: tuple[str, int], servers: list[Server]) -> Iterator[RpcBackend]:
    with closing(RpcBackend(tracker, KEY, detect_environment(TARGET), timeout_s=5.0)) as opened:
        yield opened


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BuildPool]:
    with closing(BuildPool(1, tmp_path_factory.mktemp("artifacts"))) as opened:
        yield opened


def test_a_candidate_is_checked_and_timed_on_a_board(backend: RpcBackend, pool: BuildPool) -> None:
    right, wrong = (built(pool, TARGET.target, add_one_mod(offset)) for offset in (1.0, 2.0))
    carried = replace(right, content=Path(str(right.content)).read_bytes())
    spec = spec_of(add_one_mod(), reference=right)
    first, second, third = measure(backend, (right, spec), (wrong, spec), (carried, spec))
    assert (first.status, second.status, third.status) == (Status.OK, Status.WRONG_RESULT, Status.OK)
    assert all(0 < one < 1e-3 for one in first.seconds)
    assert first.environment == detect_environment(TARGET)


def test_a_crash_counts_as_the_candidates_while_another_board_answers(backend: RpcBackend, pool: BuildPool) -> None:
    crash, right = (built(pool, TARGET.target, mod) for mod in (extern_mod("abort"), add_one_mod()))
    spec = spec_of(add_one_mod(), "unchecked")
    first, second = measure(backend, (crash, spec), (right, spec))
    assert (first.status, second.status) == (Status.RUN_ERROR, Status.OK)


def test_no_board_of_a_key_is_a_usage_error(tracker: tuple[str, int], servers: list[Server]) -> None:
    assert count_boards(tracker, KEY) >= 1
    with pytest.raises(UsageError, match="no board is registered as other at 127"):
        count_boards(tracker, "other")


def test_a_board_that_is_gone_fails_no_candidate(
    tracker: tuple[str, int], backend: RpcBackend, servers: list[Server], pool: BuildPool
) -> None:
    right = built(pool, TARGET.target, add_one_mod())
    for one in servers:
        one.terminate()
    (outcome,) = measure(backend, (right, spec_of(add_one_mod(), "gone")))
    assert outcome.status is Unmeasured.LOST
