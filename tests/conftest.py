"""What every test has: bytecode that its processes share, loggers and signal handlers of its own."""

from __future__ import annotations

import dataclasses
import gc
import logging
import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.command_line import Ended, exit_code
from tests.warm_python import warm_workers

if sys.dont_write_bytecode:
    # The tests start hundreds of Python processes. Without bytecode each compiles 3,000 modules: 4 s of CPU time.
    # It goes to a folder of its own, since whoever sets PYTHONDONTWRITEBYTECODE wants none beside the sources.
    sys.dont_write_bytecode = False
    sys.pycache_prefix = os.environ["PYTHONPYCACHEPREFIX"] = str(Path(__file__).parents[1] / ".pytest_cache/bytecode")
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)


if "PYTEST_XDIST_WORKER" in os.environ:
    # As many processes as cores. Further threads that wait for work spin: NumPy's BLAS took four times the CPU time.
    os.environ.update(OPENBLAS_NUM_THREADS="1", TVM_THREAD_POOL_SPIN_COUNT="0")

# Garbage is collected after 5,000 new objects, not 700: TVM, SymPy and the tests make many that live on.
gc.set_threshold(5_000, 10, 10)

# A shell without job control starts what runs in the background with Ctrl-C ignored.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark the cases of a test slow that its marker `quick_cases` does not name."""
    unknown: dict[str, set[str]] = {}
    for item in items:
        marker = item.get_closest_marker("quick_cases")
        if marker is not None and isinstance(item, pytest.Function):
            test, case = item.nodeid.partition("[")[0], item.callspec.id
            unknown.setdefault(test, set(marker.args)).discard(case)
            if case not in marker.args:
                item.add_marker(pytest.mark.slow)
    # An argument with "::" may have selected cases.
    wrong = [f"{test} has no case {name!r}" for test, names in unknown.items() for name in sorted(names)]
    if wrong and not any("::" in argument for argument in config.args):
        raise pytest.UsageError("; ".join(wrong))


def pytest_collection_finish() -> None:
    """Leave what was imported out of all later collections of garbage: it lives as long as the process."""
    gc.freeze()


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """Fail a session that skipped every test: it has shown nothing."""
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    # A process of pytest-xdist has no reporter; the session that started it does.
    if reporter is None or exitstatus != pytest.ExitCode.OK or session.config.option.collectonly:
        return
    ran = any(reporter.stats.get(outcome) for outcome in ("passed", "xfailed", "xpassed"))
    if reporter.stats.get("skipped") and not ran:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


@pytest.fixture(autouse=True, scope="session")
def _caches_are_of_this_session(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(autouse=True, scope="session")
def _workers_start_warm() -> Iterator[None]:
    with warm_workers():
        yield


@pytest.fixture(autouse=True, scope="session")
def _what_ships_is_decided_soon() -> Iterator[None]:
    """Give the comparison of a tuned with an untuned model a second: hundreds of tests tune."""
    from relaxtune.pipeline.choose import shipping

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shipping, "_QUESTION", dataclasses.replace(shipping._QUESTION, seconds=1.0))
        yield


@pytest.fixture(autouse=True)
def _process_as_it_was() -> Iterator[None]:
    """Undo what a command of the test configured: the command line owns its process, a test does not."""
    logger = logging.getLogger("relaxtune")
    level, disabled = logger.level, logging.root.manager.disable
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    logger.handlers = []
    logger.setLevel(level)
    logging.disable(disabled)
    for number, handler in handlers.items():
        signal.signal(number, handler)


@pytest.fixture
def relaxtune(capsys: pytest.CaptureFixture[str]) -> Callable[..., Ended]:
    """Run `relaxtune ARGUMENTS` in this process."""

    def run(*arguments: object) -> Ended:
        capsys.readouterr()
        return Ended(exit_code(*arguments), *capsys.readouterr())

    return run
