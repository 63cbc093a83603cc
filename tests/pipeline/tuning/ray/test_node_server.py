"""A node's server: it tells the facts of the node, and forks children for all who ask."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing

import psutil
import pytest

from relaxtune.pipeline.tuning.ray.cluster import new_run
from relaxtune.pipeline.tuning.ray.node_server import fork_socket, join_server
from relaxtune.pipeline.workers.fork_server import Forks
from relaxtune.pipeline.workers.worker import Worker

pytestmark = pytest.mark.skipif(not Forks.available(), reason="processes are forked on Linux only")

WORKER = """
import os, time

def start():
    return lambda request: time.sleep(600) if request == "hang" else os.environ.get(request)
"""


@pytest.fixture(scope="module")
def module(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("worker")
    (folder / "node_worker.py").write_text(WORKER)
    sys.path.insert(0, str(folder))
    yield "node_worker"
    sys.path.remove(str(folder))


def start(run: str, module: str) -> subprocess.Popen[bytes]:
    words = ["relaxtune.pipeline.tuning.ray.node_server", run, module]
    search_path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
    environment = {**os.environ, "PYTHONPATH": search_path}
    process = subprocess.Popen(
        [sys.executable, "-m", *words], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment
    )
    assert process.stdout is not None
    facts = json.loads(process.stdout.readline())
    assert facts["versions"]["relaxtune"]
    return process


def worker(run: str, module: str, value: str = "") -> Worker:
    server = join_server(run)
    assert server is not None
    return Worker(module, {"RELAXTUNE_TEST": value}, server=server)


def test_a_nodes_server_forks_for_several(module: str) -> None:
    run = new_run()
    with start(run, module) as process:
        workers = [worker(run, module, value) for value in "ab"]
        assert [each.ask("RELAXTUNE_TEST").value for each in workers] == ["a", "b"]
        assert {psutil.Process(each.pid).ppid() for each in workers} == {process.pid}
        for each in workers:
            each.close()
        process.terminate()
        assert process.wait(30) == 0
    assert not fork_socket(run).parent.exists()


def test_what_a_lost_ray_worker_left_ends(module: str) -> None:
    run = new_run()
    code = f"""
import sys
sys.path[:] = {sys.path!r}
from relaxtune.pipeline.tuning.ray.node_server import join_server
from relaxtune.pipeline.workers.worker import Worker
worker = Worker({module!r}, server=join_server({run!r}))
worker.ask("HOME")
print(worker.pid, flush=True)
worker.ask("hang")
"""
    with start(run, module) as process:
        with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as lost:
            assert lost.stdout is not None
            orphan = psutil.Process(int(lost.stdout.readline()))
            lost.kill()
        orphan.wait(30)
        process.terminate()


def test_a_nodes_server_ends_with_its_starter(module: str) -> None:
    run = new_run()
    with start(run, module) as process:
        assert process.stdin is not None
        process.stdin.close()
        assert process.wait(30) == 0
    assert not fork_socket(run).parent.exists()


def test_without_a_nodes_server_children_are_started_afresh(module: str) -> None:
    run = new_run()
    assert join_server(run) is None
    with start(run, module) as process:
        process.kill()
        process.wait()
        # Its socket is still there.
        with closing(worker(run, module, "afresh")) as child:
            assert child.ask("RELAXTUNE_TEST").value == "afresh"
            assert psutil.Process(child.pid).ppid() == os.getpid()


@pytest.mark.slow
def test_a_second_node_of_a_host_tells_its_facts_and_leaves_the_forking(module: str) -> None:
    run = new_run()
    with start(run, module) as first, start(run, module) as second:
        assert second.wait(30) == 0
        with closing(worker(run, module)) as child:
            child.ask("HOME")
            assert psutil.Process(child.pid).ppid() == first.pid
        first.terminate()
