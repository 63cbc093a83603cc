"""A Ray worker has a child do its work: what ends the child is told, or done again."""

from __future__ import annotations

import pickle
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from relaxtune.pipeline.errors import PipelineError
from relaxtune.pipeline.tuning.ray.node_side import PackedWork, answer_by
from relaxtune.pipeline.workers.worker import Worker

WORKER = """
import os, pickle, signal

def start():
    return answer

def answer(request):
    work = pickle.loads(request.work)
    if work == "refuse":
        raise ValueError("this is no work")
    if work == "crash":
        os.kill(os.getpid(), signal.SIGSEGV)
    if work != "pid":
        # The memory killer comes as often as the file has lines left.
        left = open(work).read().splitlines()
        if left:
            open(work, "w").write("\\n".join(left[1:]))
            os.kill(os.getpid(), signal.SIGKILL)
    return pickle.dumps((os.getpid(), request.device, request.keep))
"""


@pytest.fixture
def child(tmp_path: Path) -> Iterator[Worker]:
    (tmp_path / "cell_worker.py").write_text(WORKER)
    sys.path.insert(0, str(tmp_path))
    made = Worker("cell_worker")
    yield made
    made.close()
    sys.path.remove(str(tmp_path))


def asked(child: Worker, work: str) -> tuple[int, str, bool]:
    answer = answer_by(child, PackedWork(pickle.dumps(work), None, "cuda:7", keep=False))
    assert isinstance(answer, bytes)
    found: tuple[int, str, bool] = pickle.loads(answer)
    return found


def test_a_child_is_kept_and_another_one_does_what_a_killed_one_had(child: Worker, tmp_path: Path) -> None:
    pid, device, keep = asked(child, "pid")
    assert (device, keep) == ("cuda:7", False)
    with pytest.raises(PipelineError, match="this is no work"):
        asked(child, "refuse")
    assert asked(child, "pid")[0] == pid
    kills = tmp_path / "kills"
    kills.write_text("1")
    assert asked(child, str(kills))[0] != pid
    kills.write_text("1\n2\n3")
    with pytest.raises(PipelineError, match=r"that worked on the cell is gone: .* SIGKILL"):
        asked(child, str(kills))


def test_a_crash_is_the_works_own(child: Worker) -> None:
    pid = asked(child, "pid")[0]
    with pytest.raises(PipelineError, match="SIGSEGV"):
        asked(child, "crash")
    assert asked(child, "pid")[0] != pid
