"""A node's server: it tells the facts of the node, and forks children for all who ask."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import psutil
import pytest

from relaxtune.pipeline.processes.fork_client import ForkServer, JoinedServer
from relaxtune.pipeline.processes.process import ChildProcess
from relaxtune.pipeline.tuning.ray.backend import new_run
from relaxtune.pipeline.tuning.ray.node_server import fork_socket, join_server
from tests.pipeline.processes.asking import asked

pytestmark = pytest.mark.skipif(not ForkServer.available(), reason="processes are forked on Linux only")

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
    words = ["relaxtune.pipeline.tuning.ray.node_server", run, module, str(os.getpid())]
    search_path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
    environment = {**os.environ, "PYTHONPATH": search_path}
    process = subprocess.Popen([sys.executable, "-m", *words], stdout=subprocess.PIPE, env=environment)
    assert process.stdout is not None
    facts = json.loads(process.stdout.readline())
    assert facts["versions"]["relaxtune"]
    assert facts["cores"] > 0
    return process


def join(run: str) -> JoinedServer:
    server = join_server(run)
    assert server is not None
    return server


def test_a_nodes_server_forks_for_several_and_ends_what_a_lost_one_left(module: str) -> None:
    run = new_run()
    with start(run, module) as process:
        ours, lost = join(run), join(run)
        kept = ChildProcess(module, {"RELAXTUNE_TEST": "kept"}, ours)
        left = ChildProcess(module, {"RELAXTUNE_TEST": "left"}, lost)
        assert asked(kept, "RELAXTUNE_TEST") == "kept"
        assert asked(left, "RELAXTUNE_TEST") == "left"
        assert {psutil.Process(one.pid).ppid() for one in (kept, left)} == {process.pid}
        # A Ray worker that is killed closes its connection, and what it had forked may hang.
        left.send("hang")
        orphan = psutil.Process(left.pid)
        lost.close()
        orphan.wait(30)
        left.kill()
        assert asked(kept, "RELAXTUNE_TEST") == "kept"
        kept.kill()
        ours.close()
        process.terminate()
        assert process.wait(30) == 0
    assert not fork_socket(run).parent.exists()


def test_without_a_nodes_server_children_are_started_afresh(module: str) -> None:
    run = new_run()
    assert join_server(run) is None
    with start(run, module) as process:
        with closing(join(run)) as server:
            os.kill(process.pid, signal.SIGKILL)
            process.wait()
            child = ChildProcess(module, {"RELAXTUNE_TEST": "afresh"}, server)
            assert asked(child, "RELAXTUNE_TEST") == "afresh"
            assert psutil.Process(child.pid).ppid() == os.getpid()
            child.kill()
        # Its socket is still there.
        assert join_server(run, gpus=True) is None


def test_a_second_node_of_a_host_tells_its_facts_and_leaves_the_forking(module: str) -> None:
    run = new_run()
    with start(run, module) as first, start(run, module) as second:
        assert second.wait(30) == 0
        with closing(join(run)) as server:
            child = ChildProcess(module, {}, server)
            assert psutil.Process(child.pid).ppid() == first.pid
            child.kill()
        first.terminate()


def test_a_server_at_a_path_too_long_for_a_socket_tells_its_facts(
    module: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    long = tmp_path / ("x" * 120)
    long.mkdir()
    monkeypatch.setenv("TMPDIR", str(long))
    with start(new_run(), module) as process:
        assert process.wait(30) == 0
