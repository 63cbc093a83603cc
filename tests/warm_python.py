"""Python processes that start warm: forks of one that has imported TVM and the stages.

Hundreds of tests start a process of ours, or a run of `tune`, which starts three. Each would spend two to three seconds
of a processor on its imports. `Popen` takes what `subprocess.Popen` takes. It forks what this interpreter is to
run from a server, and starts everything else as ever. The result is a child of its starter, with memory, streams,
environment, session, signals and exit code of its own. Tests of the start itself, or of what a fresh
process imports, use `subprocess`. So do all under coverage, where a fork writes no data, and beside an NVIDIA GPU:
importing TVM opens it, and no fork of a process that has it open can use it.

`multiprocessing`'s fork server with preloaded modules, on which the product's own rests, cannot take its place. Its
children are the server's: the test that starts one cannot wait for it, does not see it among its children, and leaves
it alive when it is killed. A child has no streams, descriptors, environment, folder or session of its own, and it runs
a pickled function, not `python -c`, `-m` or a file as a command line is. So this server forks twice. The middle process
ends at once. The system then gives its child to the nearest process above that adopts, which is the starter.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import gc
import importlib
import os
import pickle
import re
import runpy
import signal
import socket
import subprocess
import sys
import threading
import time
import types
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NoReturn

# What is imported before anything is forked: each of these alone would import TVM.
MODULES = (
    "relaxtune.pipeline.batch.worker",
    "relaxtune.pipeline.cli.app",
    "relaxtune.pipeline.jobs.compile_and_tune",
    "relaxtune.pipeline.onnx_runtime.worker",
    "relaxtune.pipeline.tuning.local.build_worker",
    "relaxtune.pipeline.workers.fork_server",
    "relaxtune.pipeline.tuning.local.measure_worker",
)
_LIBC = ctypes.CDLL(None)
_PR_SET_CHILD_SUBREAPER = 36
_MESSAGE_BYTES_MAX = 1 << 20
_DESCRIPTORS_MAX = 64
# Descriptors from here on are free.
_HIGH = 500


@dataclass(frozen=True)
class _Start:
    """What Python is to run, where, and under which descriptors."""

    words: list[str]
    environment: dict[str, str]
    folder: str
    descriptors: list[int]
    new_session: bool
    parent: int


class Server:
    """The process that forks."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._control: socket.socket | None = None
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, start: _Start, descriptors: list[int]) -> int:
        """Return the process id of a child of this process, which runs what is asked for."""
        with self._lock:
            control = self._control or self._open()
            _adopt(True)
            try:
                socket.send_fds(control, [pickle.dumps(start)], descriptors)
                answer = control.recv(_MESSAGE_BYTES_MAX)
            finally:
                _adopt(False)
            if not answer:
                raise RuntimeError("the server of warm processes ended; what it wrote is above")
            return int(answer)

    def close(self) -> None:
        if self._control is not None:
            self._control.close()
            self._control = None
        if self._process is not None:
            self._process.wait()
            self._process = None

    def _open(self) -> socket.socket:
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.warm_python", str(theirs.fileno())],
                pass_fds=(theirs.fileno(),),
                stdin=subprocess.DEVNULL,
                # One thread: what other threads hold at a fork stays held in the child.
                env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OPENBLAS_NUM_THREADS": "1"},
                start_new_session=True,
            )
        return self._control

    def nested(self, descriptors: list[int]) -> None:
        """Fork a server for this process; the descriptors are not the server's."""
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        if os.fork() == 0:
            self._control.close()
            nothing = os.open(os.devnull, os.O_RDWR)
            for number in descriptors:
                os.dup2(nothing, number)
            _serve(theirs)
        theirs.close()


_SERVER = Server()


def possible() -> bool:
    """Whether processes start warm here."""
    watched = "COVERAGE_PROCESS_CONFIG" in os.environ
    return sys.platform == "linux" and not watched and not os.path.exists("/dev/nvidiactl")


class Popen(subprocess.Popen):
    """A process, started warm where it is one of this interpreter's."""

    def _execute_child(self, args, executable, preexec_fn, close_fds, pass_fds, cwd, env, *rest) -> None:
        words = [os.fspath(word) for word in args] if isinstance(args, list | tuple) else []
        if not (possible() and words[:1] == [sys.executable] and preexec_fn is None):
            return super()._execute_child(args, executable, preexec_fn, close_fds, pass_fds, cwd, env, *rest)
        streams = rest[3:9]
        descriptors = {n: own if own >= 0 else n for n, own in enumerate((streams[0], streams[3], streams[5]))}
        descriptors |= {n: n for n in pass_fds}
        start = _Start(
            words[1:],
            dict(os.environ if env is None else env),
            os.fspath(cwd or os.getcwd()),
            list(descriptors),
            bool(rest[-2]),
            os.getpid(),
        )
        self.pid = _SERVER.start(start, list(descriptors.values()))
        self._child_created = True
        return self._close_pipe_fds(*streams)


def run(words: list[str], *, timeout: float | None = None, **options: object) -> subprocess.CompletedProcess[str]:
    """Do what `subprocess.run` does with captured text, warm."""
    with Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options) as process:
        try:
            stdout, stderr = process.communicate(timeout=timeout)
        except BaseException:
            process.kill()
            raise
    return subprocess.CompletedProcess(words, process.returncode, stdout, stderr)


@contextlib.contextmanager
def workers_start(popen: type[subprocess.Popen]) -> Iterator[None]:
    """Start the product's processes by this `Popen`."""
    from relaxtune.pipeline.workers import process

    kept = process.subprocess
    process.subprocess = types.SimpleNamespace(**{**vars(subprocess), "Popen": popen})
    try:
        yield
    finally:
        process.subprocess = kept


@contextlib.contextmanager
def warm_workers() -> Iterator[None]:
    """Let the product's processes start warm, and end their server."""
    with workers_start(Popen):
        yield
    _SERVER.close()


def server_pids() -> set[int]:
    """Return the process id of this process's server, if it has one by now."""
    return set() if _SERVER._process is None else {_SERVER._process.pid}


def keep_workers_warm() -> None:
    """Do the same until this process ends."""
    # A context that no name holds is left at once.
    _UNTIL_THE_END.enter_context(warm_workers())


def _adopt(whether: bool) -> None:
    _LIBC.prctl(_PR_SET_CHILD_SUBREAPER, int(whether), 0, 0, 0)


def _serve(control: socket.socket) -> NoReturn:
    """Fork what is asked for until the asker is gone."""
    # Out of the way of the descriptors that a process asks for.
    low = control.detach()
    control = socket.socket(fileno=fcntl.fcntl(low, fcntl.F_DUPFD_CLOEXEC, _HIGH))
    os.close(low)
    while True:
        message, descriptors, *_ = socket.recv_fds(control, _MESSAGE_BYTES_MAX, _DESCRIPTORS_MAX)
        if not message:
            os._exit(0)
        middle = os.fork()
        if not middle:
            if os.fork():
                os._exit(0)
            start = pickle.loads(message)
            _become(start, descriptors)
            # Only now: whoever has a process may kill its group.
            control.send(str(os.getpid()).encode())
            control.close()
            _prepare(start)
            try:
                _run(*start.words)
            finally:
                # An interrupt inside an exec of text (a dataclass is made by one) ends a process of `python -m` by
                # SIGINT whatever its exit code, until another text is executed (CPython's pythonrun.c).
                exec("")
            sys.exit()
        os.waitpid(middle, 0)
        for descriptor in descriptors:
            os.close(descriptor)


def _become(start: _Start, descriptors: list[int]) -> None:
    """Have the parent, descriptors, session and folder that were asked for."""
    while os.getppid() != start.parent:
        if not os.path.exists(f"/proc/{start.parent}"):
            # It was killed in the meantime, and nothing else knows of this process.
            os._exit(1)
        time.sleep(0.001)
    # Before what libraries do at exit: ONNX Runtime would wait for a thread that no fork has.
    _LIBC.on_exit(_LIBC._exit, None)
    kept = [fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, _HIGH) for descriptor in descriptors]
    for descriptor in descriptors:
        os.close(descriptor)
    for own, number in zip(kept, start.descriptors, strict=True):
        os.dup2(own, number)
        os.close(own)
    if start.new_session:
        os.setsid()
    os.chdir(start.folder)


def _prepare(start: _Start) -> None:
    """Have what Python makes of its surroundings when it starts."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.environ.clear()
    os.environ.update(start.environment)
    sys.stdin, sys.stdout = open(0, closefd=False), open(1, "w", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, errors="backslashreplace", closefd=False)  # noqa: SIM115
    if start.words[0] not in ("-c", "-m"):
        start.words.insert(0, "")
    option, what, *arguments = start.words
    given = [entry for entry in start.environment.get("PYTHONPATH", "").split(os.pathsep) if entry]
    first = {"-c": "", "-m": start.folder}.get(option, os.path.dirname(what))
    sys.path[:] = [first, *dict.fromkeys([*given, *_PATH])]
    sys.argv = [option or what, *arguments]
    if not re.search(r"pipeline\.workers\.(child|fork_server) import main", what):
        _SERVER.nested(start.descriptors)
        keep_workers_warm()


def _run(option: str, what: str, *_: str) -> None:
    if option == "-m":
        runpy.run_module(what, run_name="__main__", alter_sys=True)
    elif not option:
        runpy.run_path(what, run_name="__main__")
    else:
        main = sys.modules["__main__"] = types.ModuleType("__main__")
        exec(compile(what, "<string>", "exec"), vars(main))


_UNTIL_THE_END = contextlib.ExitStack()
# Where this server finds modules.
_PATH: list[str] = []


if __name__ == "__main__":
    from tests import warm_python

    for name in MODULES:
        importlib.import_module(name)
    gc.freeze()
    warm_python._PATH = [entry for entry in sys.path if entry]
    warm_python._serve(socket.socket(fileno=int(sys.argv[1])))
