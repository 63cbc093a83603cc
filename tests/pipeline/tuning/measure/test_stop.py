"""A signal ends a process that is inside native code; one that runs Python is left to its own handlers."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable

import pytest

from relaxtune.pipeline.tuning.measure import stop as stop_module
from relaxtune.pipeline.tuning.measure.stop import StopSignal, ctrl_c_requests, signals_end_native_code

# TVM visits what is in a minimum twice: a chain of forty is never simplified.
_NATIVE = """
import signal
from tvm import tirx
from tvm.sym import Analyzer
from relaxtune.pipeline.tuning.measure.stop import signals_end_native_code

signal.signal(signal.SIGTERM, lambda *_: None)
value, scale, low, high = (tirx.Var(name, "float32") for name in "xslh")
for _ in range(40):
    value = tirx.nearbyint(tirx.min(tirx.max(value / scale, low), high)).astype("int32").astype("float32")
with signals_end_native_code():
    print("ready", flush=True)
    Analyzer().simplify(value)
"""


def test_a_signal_ends_native_code() -> None:
    with subprocess.Popen([sys.executable, "-c", _NATIVE], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.readline() == b"ready\n"
        until = time.monotonic() + 30
        # The first may come before the native code begins, where Python takes it.
        while process.poll() is None and time.monotonic() < until:
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(0.3)
        assert (process.returncode, b"interrupted inside native code" in process.stderr.read()) == (130, True)


# Native code that keeps Python's lock, as onnx's inference of shapes does: no thread of Python can end the process.
_LOCKED = """
import ctypes, signal
from relaxtune.pipeline.tuning.measure import stop

stop._UNHEARD = signal.Signals({number})
libc = ctypes.PyDLL(None)
with stop.signals_end_native_code():
    print("ready", flush=True)
    lock = ctypes.create_string_buffer(64)
    libc.pthread_mutex_lock(lock)
    libc.pthread_mutex_lock(lock)  # waits for itself
"""


@pytest.mark.parametrize("number", [3, pytest.param(stop_module._UNHEARD.value, marks=pytest.mark.slow)])
def test_a_signal_ends_native_code_that_keeps_the_lock_of_python(number: int) -> None:
    """The number of the signal is also the seconds until the end."""
    program = _LOCKED.format(number=number)
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        time.sleep(1)
        process.send_signal(signal.SIGINT)
        try:
            assert process.wait(40) == -signal.SIGALRM
        finally:
            process.kill()


# Python itself answers late, as while it collects garbage: it holds its lock. The thread that watches asks between two
# such times, and its own clock runs on.
_LATE = """
import ctypes, signal
from relaxtune.pipeline.tuning.measure.stop import signals_end_native_code

taken = []
hold = ctypes.PyDLL(None).usleep
def late(number, frame):
    hold(1_900_000); hold(1_900_000)
    taken.append(number)

signal.signal(signal.SIGTERM, late)
with signals_end_native_code():
    print("ready", flush=True)
    while not taken:
        signal.pause()
print("went on")
"""


@pytest.mark.slow
def test_python_that_answers_late_is_left_to_its_handlers() -> None:
    with subprocess.Popen([sys.executable, "-c", _LATE], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.readline() == b"ready\n"
        process.terminate()
        assert (process.stdout.read(), process.stderr.read()) == (b"went on\n", b"")
    assert process.returncode == 0


# What takes an interrupt for an error of its own and goes on, as TVM's rules for GPUs do under a bare `except:`.
_TAKEN = """
import signal, time
from relaxtune.pipeline.tuning.measure import stop

stop._LEAVES_S, stop._SETTLED_S = 0.05, 0.3
taken = []
signal.signal(signal.SIGINT, lambda *_: taken.append(1))
with stop.signals_end_native_code():
    print("ready", flush=True)
    while len(taken) < {times}:
        time.sleep(0.01)
"""


@pytest.mark.parametrize(("times", "code"), [(3, 0), (100, 130)])
def test_an_interrupt_that_is_taken_for_an_error_comes_again_until_the_process_ends(times: int, code: int) -> None:
    program = _TAKEN.format(times=times)
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.readline() == b"ready\n"
        process.send_signal(signal.SIGINT)
        told = process.stderr.read()
    assert (process.returncode, b"interrupted, and still going on" in told) == (code, code == 130)


def test_python_that_runs_is_left_to_its_handlers() -> None:
    stop = StopSignal()
    with signals_end_native_code(), ctrl_c_requests(stop):
        signal.raise_signal(signal.SIGTERM)
        assert stop.requested
    assert signal.getsignal(signal.SIGURG) is signal.SIG_DFL


def test_a_probe_that_came_right_before_a_wait_comes_again(monkeypatch: pytest.MonkeyPatch) -> None:
    alive, sent = threading.Event(), list[int]()

    def kill(_thread: int, number: int) -> None:
        # The first is seen by nobody.
        sent.append(number)
        if len(sent) == 2:
            alive.set()

    monkeypatch.setattr(signal, "pthread_kill", kill)
    assert stop_module._shows_life(alive, threading.get_ident())
    assert sent == [signal.SIGURG, signal.SIGURG]


class _Interrupts:
    """Interrupts in its destructor, where Python drops what is raised."""

    def __init__(self, interrupt: Callable[[], None]) -> None:
        self.interrupt = interrupt

    def __del__(self) -> None:
        self.interrupt()


def test_an_interrupt_that_a_destructor_drops_comes_again(capsys) -> None:
    for patient in (False, True):
        stop = StopSignal()
        with contextlib.ExitStack() as stack:
            stack.enter_context(signals_end_native_code())
            if patient:  # The first asks for the end, the second raises.
                stack.enter_context(ctrl_c_requests(stop))
                signal.raise_signal(signal.SIGINT)
                assert stop.requested
            dropped = _Interrupts(lambda: signal.raise_signal(signal.SIGINT))
            with pytest.raises(KeyboardInterrupt):  # noqa: PT012 - it comes later
                del dropped
                time.sleep(30)
    assert "Traceback" not in capsys.readouterr().err


def test_parts_of_a_run_end_together_and_each_by_its_own_deadline() -> None:
    whole = StopSignal()
    first, second = StopSignal(deadline=0.0, within=whole), StopSignal(within=whole)
    assert [one.due for one in (first, second, whole)] == [True, False, False]
    second.request()
    assert [one.requested for one in (first, second, whole)] == [True, True, True]
