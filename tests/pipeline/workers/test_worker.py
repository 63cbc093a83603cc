"""Children under supervision, started afresh and forked: deadlines, memory, deaths, and the one retry."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from relaxtune.pipeline.workers import limits as limits_module
from relaxtune.pipeline.workers.child import has_gpu_open
from relaxtune.pipeline.workers.fork_server import Forks, ForkServer
from relaxtune.pipeline.workers.limits import Limit, Limits
from relaxtune.pipeline.workers.pool import WorkerPool
from relaxtune.pipeline.workers.replies import WorkerDiedError, WorkerKilledError, WorkerStartError, WorkerStoppedError
from relaxtune.pipeline.workers.worker import Worker
from tests.warm_python import workers_start

pytestmark = pytest.mark.skipif(not Forks.available(), reason="processes are forked on Linux only")

MODULE = """
import os, re, signal, subprocess, sys, threading, time

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
        case "hang in native code":
            re.match(r"(a+)+$", "a" * 60 + "b")
        case "grow":
            held = bytearray(200 << 20)
            time.sleep(600)
        case "start another":
            return subprocess.Popen(["sleep", "600"]).pid
        case ("kill yourself", path):
            with open(path, "a") as file:
                file.write("x")
            if os.path.getsize(path) <= 1:
                os.kill(os.getpid(), signal.SIGKILL)
            return "done"
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
    (folder / "some_worker.py").write_text(MODULE)
    sys.path.insert(0, str(folder))
    yield "some_worker"
    sys.path.remove(str(folder))


@pytest.fixture
def server(module: str) -> Iterator[ForkServer]:
    with closing(ForkServer([module])) as opened:
        yield opened


@pytest.fixture(params=["forked", "afresh"])
def worker(request: pytest.FixtureRequest, module: str, server: ForkServer) -> Iterator[Worker]:
    with closing(Worker(module, server=server if request.param == "forked" else None)) as opened:
        yield opened


def gone(pid: int) -> bool:
    until = time.monotonic() + 10
    with suppress(psutil.NoSuchProcess):  # It may end between two looks.
        while psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
            if time.monotonic() > until:
                return False
            time.sleep(0.01)
    return True


def after(seconds: float, do: Callable[[], object]) -> None:
    threading.Timer(seconds, do).start()


def test_a_child_answers_and_tells_errors_as_text(worker: Worker) -> None:
    assert worker.ask("pid").value == worker.pid
    assert "what is this?" in str(worker.ask("this").error)
    assert worker.ask("threads").value == 1
    assert worker.answered == 3
    assert os.getpgid(worker.pid) == os.getsid(worker.pid) == worker.pid


def test_children_have_environments_of_their_own(server: ForkServer, module: str) -> None:
    given = [{"RELAXTUNE_TEST": name} for name in "ab"]
    with closing(Worker(module, given[0], server=server)) as first, closing(Worker(module, given[1])) as second:
        found = [dict(each.ask("environment").value) for each in (first, second)]  # type: ignore[call-overload]
        assert [one["RELAXTUNE_TEST"] for one in found] == ["a", "b"]
        # The variable that keeps the server on one thread is not its children's.
        assert all(one.get("OMP_NUM_THREADS") == os.environ.get("OMP_NUM_THREADS") for one in found)


def test_no_child_imports_torch(worker: Worker, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    assert "import of torch halted" in str(worker.ask("torch").error)


@pytest.mark.parametrize(
    ("request_", "text"), [("die", "died of signal SIGSEGV; it wrote last:\nlast words"), ("exit", "exit status 3")]
)
def test_a_death_is_told_and_the_next_request_has_another_child(worker: Worker, request_: str, text: str) -> None:
    first = worker.ask("pid").value
    with pytest.raises(WorkerDiedError, match=text) as raised:
        worker.ask(request_)
    assert not raised.value.from_outside
    assert worker.ask("pid").value != first
    assert worker.restarts == 1


def test_a_request_whose_child_the_machine_killed_is_tried_once_more(worker: Worker, tmp_path: Path) -> None:
    assert worker.ask(("kill yourself", str(tmp_path / "times"))).value == "done"
    assert worker.restarts == 1


def test_a_child_killed_while_it_is_idle_is_replaced(worker: Worker) -> None:
    first = worker.ask("pid").value
    assert isinstance(first, int)
    os.kill(first, signal.SIGKILL)
    assert gone(first)
    assert worker.ask("pid").value != first


def test_a_request_that_needs_its_child_is_not_tried_again(worker: Worker, tmp_path: Path) -> None:
    with pytest.raises(WorkerDiedError, match="SIGKILL") as raised:
        worker.ask(("kill yourself", str(tmp_path / "times")), again=False)
    assert raised.value.from_outside


@pytest.mark.parametrize("request_", ["hang", "hang in native code"])
def test_a_child_beyond_its_deadline_is_killed_with_its_group(worker: Worker, request_: str) -> None:
    first, other = worker.ask("pid").value, worker.ask("start another").value
    with pytest.raises(WorkerKilledError, match=r"killed after 0.3 s") as raised:
        worker.ask(request_, Limits(timeout_s=0.3))
    assert raised.value.limit is Limit.TIME
    assert gone(int(str(first)))
    assert gone(int(str(other)))
    assert 0.3 <= worker.seconds < 5


def test_a_child_that_takes_too_much_memory_is_killed(worker: Worker) -> None:
    with pytest.raises(WorkerKilledError, match="100 are allowed") as raised:
        worker.ask("grow", Limits(rss_bytes=100 << 20))
    assert raised.value.limit is Limit.MEMORY


@pytest.mark.quick_cases("forked")
def test_a_machine_that_slept_kills_nothing(worker: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock jumps by an hour, as when everything was stopped meanwhile."""
    worker.ask("pid")
    began = time.monotonic()
    jumping = SimpleNamespace(monotonic=lambda: time.monotonic() + (3600.0 if time.monotonic() - began > 0.3 else 0.0))
    monkeypatch.setattr(limits_module, "time", jumping)
    with pytest.raises(WorkerKilledError):
        worker.ask("hang", Limits(timeout_s=1.0))
    assert time.monotonic() - began >= 1.0


def test_a_request_is_given_up_when_the_run_is_stopped(module: str, server: ForkServer) -> None:
    stop = threading.Event()
    with closing(Worker(module, server=server, stop=stop.is_set)) as worker:
        worker.ask("pid")
        after(0.2, stop.set)
        with pytest.raises(WorkerStoppedError):
            worker.ask("hang")
        with pytest.raises(WorkerStoppedError):
            worker.ask("pid")


def test_a_worker_that_leaves_gives_up_its_request(worker: Worker) -> None:
    pid = worker.ask("pid").value
    after(0.2, worker.leave)
    with pytest.raises(WorkerStoppedError):
        worker.ask("hang")
    assert gone(int(str(pid)))


def test_an_interrupted_request_leaves_no_answer_behind(worker: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    worker.ask("pid")

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Worker, "_receive", interrupted)
        with pytest.raises(KeyboardInterrupt):
            worker.ask("environment")
    assert worker.ask("threads").value == 1


def test_a_module_that_cannot_be_imported_says_so() -> None:
    with (
        closing(ForkServer(["no_such_worker"])) as server,
        closing(Worker("no_such_worker", server=server)) as worker,
        pytest.raises(WorkerStartError, match="No module named 'no_such_worker'"),
    ):
        worker.ask("pid")


def test_children_go_on_without_their_server_and_later_ones_start_afresh(server: ForkServer, module: str) -> None:
    with closing(Worker(module, server=server)) as worker:
        first = worker.ask("pid").value
        server._process.kill()
        server._process.wait()
        assert worker.ask("pid").value == first
        with pytest.raises(WorkerDiedError):
            worker.ask("exit", again=False)
        assert worker.ask("pid").value == worker.pid != first


@pytest.mark.parametrize("request_", ["pid", "hang in native code"])
def test_children_die_with_their_parent(module: str, request_: str) -> None:
    """Also inside native code, and with a server that is still at its imports."""
    code = f"""
import sys, threading, time
sys.path[:] = {sys.path!r}
from relaxtune.pipeline.workers.fork_server import ForkServer
from relaxtune.pipeline.workers.worker import Worker
server = ForkServer(["some_worker"])
workers = [Worker("some_worker", server=server), Worker("some_worker")]
print(server._process.pid, *[each.ask("pid").value for each in workers], flush=True)
for each in workers:
    threading.Thread(target=each.ask, args=({request_!r},), daemon=True).start()
time.sleep(600)
"""
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        pids = [int(word) for word in parent.stdout.readline().split()]
        assert len(pids) == 3
        time.sleep(0.2)
        parent.kill()
    assert all(gone(pid) for pid in pids)


def test_a_server_at_a_long_path_is_reached(module: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    long = tmp_path / ("x" * 120)
    long.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(long))
    with closing(ForkServer([module])) as server, closing(Worker(module, server=server)) as worker:
        pid = worker.ask("pid").value
        assert psutil.Process(int(str(pid))).ppid() == server._process.pid
    assert list(long.iterdir()) == []


def test_a_child_for_a_gpu_is_no_fork_of_a_process_that_has_one_open(
    module: str, server: ForkServer, tmp_path: Path
) -> None:
    (tmp_path / "0").symlink_to("/dev/null")
    assert not has_gpu_open(tmp_path)
    (tmp_path / "1").symlink_to("/dev/nvidia-uvm")
    assert has_gpu_open(tmp_path)
    # This one replaces itself, as the server has a device open.
    (tmp_path / "opening_worker.py").write_text(
        "from relaxtune.pipeline.workers import child\n"
        "child.has_gpu_open = lambda: True\n"
        "import os\n"
        "def start():\n    return lambda request: os.getpid()\n"
    )
    sys.path.insert(0, str(tmp_path))
    try:
        with closing(ForkServer(["opening_worker"])) as opened:
            for gpu in (False, True):
                with closing(Worker("opening_worker", server=opened, gpu=gpu)) as worker:
                    pid = worker.ask("x").value
                    assert pid == worker.pid
                    assert psutil.Process(pid).ppid() == opened._process.pid
                    assert ("workers.child" in " ".join(psutil.Process(pid).cmdline())) == gpu
                    worker.close()
    finally:
        sys.path.remove(str(tmp_path))


def test_a_pool_gives_jobs_to_free_workers_in_order(module: str, server: ForkServer) -> None:
    pool = WorkerPool([Worker(module, server=server) for _ in range(2)], "test")
    with closing(pool):
        futures = [pool.submit(lambda worker: worker.ask("pid").value) for _ in range(8)]
        assert {future.result(30) for future in futures} <= {worker.pid for worker in pool.workers}
        assert isinstance(pool.submit(lambda worker: worker.ask("exit")).exception(30), WorkerDiedError)


def test_a_pool_that_is_closed_gives_up_its_jobs(module: str, server: ForkServer) -> None:
    pool = WorkerPool([Worker(module, server=server)], "test")
    pool.submit(lambda worker: worker.ask("pid")).result(30)
    pids = [worker.pid for worker in pool.workers]
    futures = [pool.submit(lambda worker: worker.ask("hang")) for _ in range(3)]
    time.sleep(0.2)
    pool.close()
    futures.append(pool.submit(lambda worker: worker.ask("pid")))
    assert all(isinstance(future.exception(1), WorkerStoppedError) for future in futures)
    assert all(gone(pid) for pid in pids)


def test_a_child_that_the_system_does_not_start_is_an_error_of_the_worker(tmp_path: Path) -> None:
    with closing(Worker("os", python=tmp_path / "no-python")) as worker:
        worker.start()  # fails in silence: the request says why
        with pytest.raises(WorkerStartError, match=r"the process of os failed to start: .*no-python"):
            worker.ask("pid")
