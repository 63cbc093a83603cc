from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import psutil
import pytest

from relaxtune.pipeline.processes.fork_client import ForkServer
from relaxtune.pipeline.processes.fork_server import has_gpu_open
from relaxtune.pipeline.processes.process import ChildDiedError, ChildProcess
from tests.pipeline.processes.asking import asked
from tests.warm_python import workers_start

pytestmark = pytest.mark.skipif(not ForkServer.available(), reason="processes are forked on Linux only")

WORKER = """
import os, signal, sys, threading, time

def start():
    return answer

def answer(request):
    match request:
        case "pid":
            return os.getpid()
        case "environment":
            return dict(os.environ)
        case "threads":
            return threading.active_count()
        case "torch":
            import torch
        case "die":
            print("last words", file=sys.stderr, flush=True)
            os.kill(os.getpid(), signal.SIGSEGV)
        case "exit":
            os._exit(3)
        case "hang":
            time.sleep(600)
        case _:
            raise ValueError(f"what is {request}?")
"""


@pytest.fixture(autouse=True)
def _as_users_start_them() -> Iterator[None]:
    with workers_start(subprocess.Popen):
        yield


@pytest.fixture(scope="module")
def module(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("worker")
    (folder / "forked_worker.py").write_text(WORKER)
    sys.path.insert(0, str(folder))
    yield "forked_worker"
    sys.path.remove(str(folder))


@pytest.fixture
def server(module: str) -> Iterator[ForkServer]:
    with closing(ForkServer([module])) as opened:
        yield opened


def gone(pid: int) -> bool:
    until = time.monotonic() + 10
    while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
        if time.monotonic() > until:
            return False
        time.sleep(0.01)
    return True


def test_a_server_that_has_a_gpu_open_forks_nothing_that_uses_one(server: ForkServer, tmp_path: Path) -> None:
    assert server.can_use_gpus()
    (tmp_path / "0").symlink_to("/dev/null")
    assert not has_gpu_open(tmp_path)
    (tmp_path / "1").symlink_to("/dev/nvidia-uvm")
    assert has_gpu_open(tmp_path)


def test_forked_children_answer_in_an_environment_of_their_own(server: ForkServer, module: str) -> None:
    first, second = (ChildProcess(module, {"RELAXTUNE_TEST": name}, server) for name in ("a", "b"))
    environments = [asked(child, "environment") for child in (first, second)]
    assert [one["RELAXTUNE_TEST"] for one in environments if isinstance(one, dict)] == ["a", "b"]
    # What keeps the server on one thread is not its children's.
    assert all(one.get("OMP_NUM_THREADS") == os.environ.get("OMP_NUM_THREADS") for one in environments)  # type: ignore[attr-defined]
    assert asked(first, "pid") == first.pid != second.pid
    assert asked(first, "threads") == 1
    assert "what is this?" in str(asked(second, "this"))
    assert os.getpgid(first.pid) == first.pid
    for child in (first, second):
        child.kill()
        assert gone(child.pid)


@pytest.mark.parametrize("forked", [False, True])
def test_no_child_imports_torch(
    server: ForkServer, module: str, forked: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "torch.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    child = ChildProcess(module, {}, server if forked else None)
    assert "import of torch halted" in str(asked(child, "torch"))
    child.kill()


@pytest.mark.parametrize(
    ("request_", "told"), [("die", "died of signal SIGSEGV; it wrote last:\nlast words"), ("exit", "exit status 3")]
)
def test_the_death_of_a_forked_child_is_told(server: ForkServer, module: str, request_: str, told: str) -> None:
    child = ChildProcess(module, {}, server)
    with pytest.raises(ChildDiedError, match=told):
        asked(child, request_)
    child.kill()


def test_a_busy_forked_child_is_killed(server: ForkServer, module: str) -> None:
    child = ChildProcess(module, {}, server)
    pid = asked(child, "pid")
    assert isinstance(pid, int)
    child.send("hang")
    child.kill()
    assert gone(pid)


def test_children_die_with_the_server_and_it_starts_again(server: ForkServer, module: str) -> None:
    child = ChildProcess(module, {}, server)
    pid = asked(child, "pid")
    assert isinstance(pid, int)
    os.kill(psutil.Process(pid).ppid(), signal.SIGKILL)
    assert gone(pid)
    child.kill()
    again = ChildProcess(module, {}, server)
    assert asked(again, "pid") == again.pid
    server.close()
    assert gone(again.pid)
    again.kill()


def test_a_server_that_cannot_import_says_why(tmp_path: Path) -> None:
    with closing(ForkServer(["no_such_worker"])) as server:
        child = ChildProcess("no_such_worker", {}, server)
        assert child.connection.poll(30)
        with pytest.raises(ChildDiedError, match="No module named 'no_such_worker'"):
            child.receive()
        child.kill()


def test_children_end_at_the_same_time(server: ForkServer, module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    children = [ChildProcess(module, {}, server), ChildProcess(module, {}, server)]
    pids = [asked(child, "pid") for child in children]
    done: list[str] = []
    killpg, ask = os.killpg, ForkServer.ask
    monkeypatch.setattr(os, "killpg", lambda pid, number: (done.append("signal"), killpg(pid, number)))
    monkeypatch.setattr(ForkServer, "ask", lambda self, request: (done.append("wait"), ask(self, request))[1])
    ChildProcess.kill_all(children)
    assert done[:2] == ["signal", "signal"]
    assert "wait" in done
    assert all(gone(int(str(pid))) for pid in pids)
