"""A Ray worker has a child do its work: what ends the child is told, or done again."""

from __future__ import annotations

import pickle
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from relaxtune.pipeline.errors import PipelineError
from relaxtune.pipeline.tuning.ray.backend import new_run
from relaxtune.pipeline.tuning.ray.child_actor import PackedWork, WorkingChild

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
def child(tmp_path: Path) -> Iterator[WorkingChild]:
    (tmp_path / "cell_worker.py").write_text(WORKER)
    sys.path.insert(0, str(tmp_path))
    made = WorkingChild("cell_worker", new_run(), {}, gpu=False)
    yield made
    made.close()
    sys.path.remove(str(tmp_path))


def asked(child: WorkingChild, work: str) -> tuple[int, str, bool]:
    found = pickle.loads(child.answer(PackedWork(pickle.dumps(work), None, "cuda:7", keep=False)))
    assert isinstance(found, tuple)
    return found


def test_a_child_is_kept_and_another_one_does_what_a_killed_one_had(child: WorkingChild, tmp_path: Path) -> None:
    pid, device, keep = asked(child, "pid")
    assert (device, keep) == ("cuda:7", False)
    with pytest.raises(PipelineError, match="this is no work"):
        asked(child, "refuse")
    assert asked(child, "pid")[0] == pid
    kills = tmp_path / "kills"
    kills.write_text("1\n2")
    assert asked(child, str(kills))[0] != pid
    kills.write_text("1\n2\n3\n4")
    with pytest.raises(PipelineError, match=r"that worked on the cell is gone: .* SIGKILL"):
        asked(child, str(kills))


def test_a_crash_is_the_works_own(child: WorkingChild) -> None:
    pid = asked(child, "pid")[0]
    with pytest.raises(PipelineError, match="SIGSEGV"):
        asked(child, "crash")
    assert asked(child, "pid")[0] != pid
