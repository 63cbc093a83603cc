"""The cases' processes: an arm that kills its process is left out, a silent one is given up, and all are told."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from benchmarks.gpu_arms import children
from benchmarks.gpu_arms.children import Child, ChildError
from benchmarks.gpu_arms.order import Order
from benchmarks.whole_models.bench_gpu import child_environment
from relaxtune.pipeline.tuning.measure.device_lock import DeviceLock

# Stands in for the worker: dies in arm `bad`, hangs in arm `slow`, else reports which arms it timed.
WORKER = """
import json, os, sys, time
order = json.loads(sys.argv[1])
def emit(**event):
    print(json.dumps(event), flush=True)
for arm in order["arms"]:
    emit(event="preparing", arm=arm)
    if arm == "bad":
        os._exit(7)
    if arm == "slow":
        time.sleep(60)
emit(event="ready")
sys.stdin.readline()
if order["runs"] == 0:
    os._exit(3)
emit(event="result", result={"case": order["case"], "arms": {a: {} for a in order["arms"]}, "skipped": {"x": "y"}})
"""


@pytest.fixture
def environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    (tmp_path / "standin.py").write_text(WORKER)
    monkeypatch.setattr(children, "WORKER_MODULE", "standin")
    return {**os.environ, "PYTHONPATH": str(tmp_path)}


def order(*arms: str, runs: int = 1) -> Order:
    return Order("bert-tiny-1x8", arms, "", runs, 0, False, "", ())


def run(child: Child, timeout_s: float = 30.0) -> dict[str, object]:
    async def both() -> dict[str, object]:
        try:
            await child.prepare(timeout_s)
            return await child.time(timeout_s)
        finally:
            await child.stop()

    return asyncio.run(both())


def test_an_arm_that_ends_its_process_is_left_out_and_told(tmp_path: Path, environment: dict[str, str]) -> None:
    result = run(Child(order("good", "bad"), tmp_path / "log", environment))
    assert result["arms"] == {"good": {}}
    assert result["skipped"] == {"x": "y", "bad": "its process ended with code 7; see log"}


def test_a_case_whose_only_arm_ends_its_process_fails(tmp_path: Path, environment: dict[str, str]) -> None:
    with pytest.raises(ChildError, match="ended with code 7, while preparing bad; see "):
        run(Child(order("bad"), tmp_path / "log", environment))


@pytest.mark.slow
def test_a_process_that_is_not_ready_in_time_is_given_up(tmp_path: Path, environment: dict[str, str]) -> None:
    child = Child(order("good", "slow"), tmp_path / "log", environment)
    with pytest.raises(ChildError, match="not ready after 2 s, while preparing slow"):
        run(child, timeout_s=2.0)
    assert child.process is None


def test_a_process_that_ends_while_timing_is_told(tmp_path: Path, environment: dict[str, str]) -> None:
    with pytest.raises(ChildError, match="ended with code 3"):
        run(Child(order("good", runs=0), tmp_path / "log", environment))


def test_the_turn_may_be_taken_again_by_its_holder_and_keeps_others_out(tmp_path: Path) -> None:
    import fcntl

    turn = DeviceLock(tmp_path / "lock")
    with (tmp_path / "lock").open("r+") as other:
        with turn:
            with turn:
                pass
            with pytest.raises(BlockingIOError):
                fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
        fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_a_cases_process_gets_its_share_of_the_cores_and_the_libraries_first() -> None:
    environment = child_environment({"LD_LIBRARY_PATH": "/mine", "A": "b"}, jobs=10**6)
    assert environment["TORCHINDUCTOR_COMPILE_THREADS"] == "1"
    assert environment["LD_LIBRARY_PATH"].split(os.pathsep)[-1] == "/mine"
    assert environment["A"] == "b"
