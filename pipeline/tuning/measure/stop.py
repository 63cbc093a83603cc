"""When a run has to end: its deadline, Ctrl-C or SIGTERM, also while native code does not come back."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import logging
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Iterator
from types import FrameType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sys import UnraisableHookArgs

logger = logging.getLogger(__name__)

# Looks for a sign of life of Python: the seconds between two, how many there are while the main thread computes, and
# while it waits or gets no processor.
_LOOK_S, _LOOKS_BUSY, _LOOKS_MAX = 0.1, 15, 50
# The exit code of an interrupted command.
_EXIT_INTERRUPTED = 130
# Asks the main thread for a sign of life. Python's own default is to ignore it.
_PROBE = signal.SIGURG
# The watcher reads this when a handler's KeyboardInterrupt was lost. The seconds until it sends the signal again.
_LOST, _AGAIN_S = 0, 0.02
# Seconds in which an interrupt ends the command. After them it comes again, at most so often; then the process ends.
_LEAVES_S, _TIMES_MAX = 5.0, 4
# The signal that C code hears after Python's own handler got one; Linux has no use for it. Its number is also
# the seconds until the process ends, unless a thread of Python reads of the signal before: see `_end_without_python`.
_UNHEARD = signal.Signals(16)  # SIGSTKFLT
# By then the handler of `_UNHEARD` has run, on whichever thread: its alarm can be taken back.
_SETTLED_S = 1.0
_NATIVE = b"interrupted inside native code: the process ends at once; the next run sweeps what it leaves\n"
_KEPT = b"interrupted, and still going on: the process ends at once; the next run sweeps what it leaves\n"


class StopSignal:
    """Tells whether a tuning run has to end: by request of the user, or since its deadline has passed.

    `deadline` is on the clock of `time.monotonic`. A run `within` another one stops with it, and has its own deadline.
    """

    def __init__(self, deadline: float | None = None, within: StopSignal | None = None) -> None:
        self.deadline = deadline
        self.signals = 0
        self._requested: threading.Event = threading.Event() if within is None else within._requested

    def request(self) -> None:
        """Ask for the end; safe in a signal handler."""
        self._requested.set()

    @property
    def requested(self) -> bool:
        """Whether the user requested the end."""
        return self._requested.is_set()

    @property
    def due(self) -> bool:
        """Whether the run has to end."""
        return self.requested or (self.deadline is not None and time.monotonic() >= self.deadline)


@contextlib.contextmanager
def ctrl_c_requests(stop: StopSignal) -> Iterator[None]:
    """Let the first Ctrl-C or SIGTERM ask for the end and the second raise; only the main thread may change that."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def handle(number: int, frame: FrameType | None) -> None:
        if stop.requested:
            raise KeyboardInterrupt
        logger.warning("stopping: finished work is kept; press Ctrl-C again to stop at once")
        stop.request()

    previous = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    _patient.append(stop)
    try:
        yield
    finally:
        _patient.remove(stop)
        for number, handler in previous.items():
            signal.signal(number, handler)


# Runs that end in order at the first signal, and at once at the second.
_patient: list[StopSignal] = []


@contextlib.contextmanager
def signals_end_native_code() -> Iterator[None]:
    """End the process where Ctrl-C or SIGTERM does not end the command.

    Python runs its handlers between its own instructions, and TVM may compile for minutes without one. A thread gets
    the signal at once, looks for a sign of life of the main thread, and ends the process without one. Nothing is left
    half-written: artifacts are renamed into place, records are committed whole, children end with their parent. The
    limit is 1.5 s of the main thread's own computing: a process whose Python collects garbage is not inside native
    code. Where it computes nothing, native code may wait: 50 looks, 5 s.

    Code that is interrupted may also take the KeyboardInterrupt for an error of its own: TVM tries rules under a bare
    `except:`. The command would go on as if nothing had happened, so the thread sends the signal again, and in the end
    ends the process.

    A handler may also run where Python drops what it raises: in a weak reference's callback, a destructor or a callback
    of C. Python tells `sys.unraisablehook` of it, and the thread sends the signal again.

    Native code may hold Python's lock, so that no thread of Python runs: an alarm of the system ends the process then.
    """
    reader, writer = os.pipe()
    _end_without_python(reader)
    os.set_blocking(writer, False)
    alive = threading.Event()
    probed = signal.signal(_PROBE, lambda _number, _frame: alive.set())
    before = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    main = threading.main_thread().ident or 0
    report = sys.unraisablehook

    def interrupt_again(dropped: UnraisableHookArgs) -> None:
        if issubclass(dropped.exc_type, KeyboardInterrupt):
            os.write(writer, bytes([_LOST]))
        else:
            report(dropped)

    def end(why: bytes) -> None:
        os.write(2, why)
        os._exit(_EXIT_INTERRUPTED)

    def watch() -> None:
        # A traced thread of CPython 3.11 loops before its next call for as long as a signal waits for the main one.
        sys.settrace(None)
        # How often a KeyboardInterrupt was raised that has to end the command.
        raised, alarmed = 0, False
        while True:
            wait = _SETTLED_S if alarmed else _LEAVES_S if raised else None
            if not select.select([reader], [], [], wait)[0]:
                if alarmed:
                    signal.alarm(0)
                    alarmed = False
                    continue
                raised += 1
                if raised > _TIMES_MAX:
                    end(_KEPT)
                signal.pthread_kill(main, signal.SIGINT)
                continue
            number = os.read(reader, 1)
            if not number:
                return
            alarmed = True
            if number[0] == _LOST:
                time.sleep(_AGAIN_S)
                signal.pthread_kill(main, signal.SIGINT)
                continue
            if number[0] not in (signal.SIGINT, signal.SIGTERM):
                continue
            if _patient:
                _patient[-1].signals += 1
                if _patient[-1].signals == 1:
                    # The first signal of a run that ends in order.
                    continue
            alive.clear()
            if not _shows_life(alive, main):
                end(_NATIVE)
            raised = raised or 1

    thread = threading.Thread(target=watch, name="signals", daemon=True)
    thread.start()
    sys.unraisablehook = interrupt_again
    try:
        yield
    finally:
        sys.unraisablehook = report
        signal.set_wakeup_fd(before)
        fcntl.fcntl(reader, fcntl.F_SETFL, 0)
        os.close(writer)
        thread.join()
        signal.alarm(0)
        os.close(reader)
        signal.signal(_PROBE, probed)


def _end_without_python(reader: int) -> None:
    """Let a byte in a pipe set an alarm, by C code alone; SIGALRM ends the process where nobody reads the byte.

    The kernel sends `_UNHEARD` at each byte. Its handler is the C library's `alarm`, which takes the signal's number
    for seconds.
    """
    libc = ctypes.CDLL(None)
    libc.signal.argtypes, libc.signal.restype = (ctypes.c_int, ctypes.c_void_p), ctypes.c_void_p
    libc.signal(_UNHEARD, ctypes.cast(libc.alarm, ctypes.c_void_p))
    fcntl.fcntl(reader, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(reader, fcntl.F_SETSIG, _UNHEARD)
    fcntl.fcntl(reader, fcntl.F_SETFL, fcntl.fcntl(reader, fcntl.F_GETFL) | os.O_ASYNC)


def _shows_life(alive: threading.Event, main: int) -> bool:
    """Return whether the event comes, which a probe is to set, before the main thread has computed for too long."""
    clock = time.pthread_getcpuclockid(main)
    computed, before = 0.0, time.clock_gettime(clock)
    for _ in range(_LOOKS_MAX):
        # At each look: a signal that comes right before the main thread begins to wait does not end that wait.
        signal.pthread_kill(main, _PROBE)
        # Not what `wait` returns: it knows nothing of an event that came after its time was up.
        alive.wait(_LOOK_S)
        if alive.is_set():
            return True
        now = time.clock_gettime(clock)
        # Between two looks the main thread may have held Python's lock for long. It counts as one.
        computed, before = computed + min(now - before, _LOOK_S), now
        if computed >= _LOOKS_BUSY * _LOOK_S:
            return False
    return False
