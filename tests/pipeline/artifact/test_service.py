"""An artifact for a CPU inside a service: threads that come and go, forks, and little time while nothing is asked."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import tvm

from relaxtune.pipeline.artifact import export
from relaxtune.pipeline.artifact.compile import CompiledModule
from relaxtune.pipeline.artifact.export import write_artifact
from relaxtune.pipeline.artifact.gpu import turns
from relaxtune.pipeline.artifact.gpu.turns import Turns
from relaxtune.pipeline.artifact.module import Module
from relaxtune.pipeline.errors import PipelineError

ROOT = Path(__file__).parents[3]
START = """
import json, os, signal, sys, threading, time
import numpy as np
from relaxtune.pipeline.artifact.module import Module
from relaxtune.pipeline.errors import PipelineError

feeds = dict(np.load(sys.argv[2]))

def threads():
    return len(os.listdir("/proc/self/task"))

def forked(work):
    child = os.fork()
    if child == 0:
        signal.alarm(30)
        try:
            work()
        except PipelineError as e:
            os.write(2, str(e).encode())
            os._exit(3)
        finally:
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

module = Module.load(sys.argv[1], threads=4)
expected = module.run(feeds) if len(sys.argv) < 4 else None

def check():
    found = module.run(feeds)
    assert expected is None or all((found[name] == expected[name]).all() for name in expected)
    os._exit(0)
"""


@pytest.fixture(scope="module")
def feeds(bert_inputs: Mapping[str, np.ndarray], tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("feeds") / "feeds.npz"
    np.savez(path, **bert_inputs)  # type: ignore[arg-type]
    return path


@pytest.fixture(scope="module")
def earlier(compiled: CompiledModule, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An artifact whose code uses TVM's thread pools, as those of earlier versions."""
    directory = tmp_path_factory.mktemp("earlier") / "bert-tiny"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(export, "list_library_sources", lambda *_: [])
        write_artifact(compiled, directory)
    return directory


Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def run(feeds: Path) -> Run:
    def answer(artifact: Path, code: str, *more: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-c", START + textwrap.dedent(code), str(artifact), str(feeds), *more]
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "OPENBLAS_NUM_THREADS": "1"}
        return subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=120)

    return answer


def test_threads_that_called_leave_no_threads_and_no_work(artifact: Path, run: Run) -> None:
    done = run(
        artifact,
        """
        before = threads()
        for _ in range(30):
            caller = threading.Thread(target=module.run, args=(feeds,))
            caller.start()
            caller.join()
        time.sleep(0.1)
        after, used = threads(), time.process_time()
        time.sleep(1)
        print(json.dumps([before, after, time.process_time() - used]))
        """,
    )
    assert done.returncode == 0, done.stderr
    before, after, idle_s = json.loads(done.stdout)
    assert after <= before
    assert before <= 2 + 4
    assert idle_s < 0.05


@pytest.mark.parametrize("more", [(), ("never-run",)], ids=["run_before", "never_run"])
def test_a_forked_process_answers(artifact: Path, run: Run, more: tuple[str, ...]) -> None:
    done = run(artifact, "sys.exit(forked(lambda: forked(check) or check()))", *more)
    assert done.returncode == 0, done.stderr


def test_a_process_forked_while_others_call_answers(artifact: Path, run: Run) -> None:
    done = run(
        artifact,
        """
        ended = threading.Event()
        def call():
            while not ended.is_set():
                module.run(feeds)
        callers = [threading.Thread(target=call) for _ in range(2)]
        for caller in callers:
            caller.start()
        codes = [forked(check) for _ in range(10)]
        ended.set()
        for caller in callers:
            caller.join()
        sys.exit(any(codes))
        """,
    )
    assert done.returncode == 0, done.stderr


def test_code_of_earlier_versions_runs_and_says_that_it_does_not_fork(
    earlier: Path, artifact: Path, bert_inputs: Mapping[str, np.ndarray], run: Run
) -> None:
    results = [Module.load(one).run(bert_inputs) for one in (earlier, artifact)]
    for name, array in results[0].items():
        np.testing.assert_array_equal(array, results[1][name])
    done = run(earlier, "sys.exit(forked(check))")
    assert done.returncode == 3, done.stderr
    assert "load it after the fork, or compile the model again" in done.stderr


def test_a_gpu_refuses_after_a_fork(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turns, "is_cpu", lambda _device: False)
    monkeypatch.setattr(turns, "_shared_on", lambda _device: turns._Shared(None))
    turn = Turns(tvm.cpu())
    with turn.alone, turn:
        pass
    monkeypatch.setattr(os, "getpid", lambda: -1)
    for use in (lambda: turn.alone, turn.__enter__):
        with pytest.raises(PipelineError, match="load artifacts after the fork only"):
            use()


def test_threads_are_those_asked_for(artifact: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert Module.load(artifact, threads=3).threads == 3
    monkeypatch.setenv("TVM_NUM_THREADS", "5")
    assert Module.load(artifact).threads == 5


def test_eight_callers_get_right_answers(artifact: Path, bert_inputs: Mapping[str, np.ndarray]) -> None:
    modules = [Module.load(artifact, threads=1 + number) for number in range(4)]
    expected = modules[0].run(bert_inputs)

    def call(number: int) -> None:
        for _ in range(10):
            for name, array in modules[number % 4].run(bert_inputs).items():
                np.testing.assert_array_equal(array, expected[name])

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(call, range(8)))
