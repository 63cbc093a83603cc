"""Ctrl-C and SIGTERM before the command line is imported, and when the command is done."""

from __future__ import annotations

import subprocess
import sys

import pytest

_IMPORTED = """
import signal, sys

class Finder:
    def find_spec(self, name, *_):
        if name == "relaxtune.pipeline.cli.app":
            signal.raise_signal(signal.{signal})

sys.meta_path.insert(0, Finder())
"""
_DONE = """
import os, signal, threading, time

def signal_the_end():
    threading.main_thread().join()
    # One that comes as Python begins to wait for this thread is heard of with the next.
    while True:
        os.kill(os.getpid(), signal.{signal})
        time.sleep(0.1)

threading.Thread(target=signal_the_end).start()
"""
_LAST = """
import atexit, signal
atexit.register(lambda: signal.raise_signal(signal.{signal}))
"""
# TVM searches for minutes in a thread of a pool; another that comes back from it then finds no interpreter.
_WAITED_FOR = """
import threading, time
from relaxtune.pipeline.cli import app
threading.Thread(target=time.sleep, args=(60,)).start()
app.main = lambda: signal.raise_signal(signal.{signal})
import signal
"""


@pytest.mark.parametrize("signal", ["SIGINT", "SIGTERM"])
@pytest.mark.parametrize(
    ("before", "code"), [(_IMPORTED, 130), (_DONE, 0), (_LAST, 0), (_WAITED_FOR, 130)],
    ids=["imported", "done", "last", "waited for"],
)  # fmt: skip
def test_a_signal_from_the_first_line_to_the_end_is_130_or_changes_nothing(before: str, code: int, signal: str) -> None:
    program = before.format(signal=signal) + "from relaxtune.pipeline.cli import main; main()"
    command = [sys.executable, "-c", program, "--version"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=50, check=False)
    assert (ended.returncode, ended.stderr) == (code, "")
    assert ended.stdout.startswith("relaxtune ") == (code == 0)
