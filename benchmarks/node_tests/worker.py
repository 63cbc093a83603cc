"""The process that runs cases: `python -m benchmarks.node_tests.worker ARM`, keys in on stdin, JSON lines on stdout.

A case may end its process: TVM's generated code reads past a buffer, or LLVM aborts. `outcomes` starts another one.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator, Sequence
from typing import IO

from benchmarks.node_tests.arms import Arm, Outcome, Stage, run_case
from benchmarks.node_tests.cases import NodeCase, list_cases
from benchmarks.node_tests.operators import OPERATORS

# A whole node takes well under a second; a loop that hangs is a failure of its own.
TIMEOUT_S = 60.0
_START_S = 120.0
_ERROR_CHARS = 600


def outcomes(cases: Sequence[NodeCase], arm: Arm) -> Iterator[tuple[NodeCase, Outcome]]:
    """Yield each case with its outcome in one arm, in other processes."""
    process: _Process | None = None
    try:
        for case in cases:
            process = process or _Process(arm)
            outcome = process.ask(case.key)
            if outcome.stage is Stage.CRASH:
                process.end()
                process = None
            yield case, outcome
    finally:
        if process is not None:
            process.end()


class _Process:
    """One worker and its pipes."""

    def __init__(self, arm: Arm) -> None:
        self._log: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - closed by `end`
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.node_tests.worker", arm.value],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
        )
        self._limit_s = _START_S

    def ask(self, key: str) -> Outcome:
        """Return a case's outcome; `CRASH` if the process ended or took too long."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(f"{key}\n".encode())
            self._process.stdin.flush()
        ready, _, _ = select.select([self._process.stdout], [], [], self._limit_s)
        self._limit_s = TIMEOUT_S
        line = self._process.stdout.readline() if ready else b""
        if not line:
            return Outcome(Stage.CRASH, self._last_words(timed_out=not ready))
        answer = json.loads(line)
        return Outcome(Stage(answer["stage"]), answer["error"])

    def end(self) -> None:
        """Kill the process and wait for it."""
        self._process.kill()
        self._process.wait()
        self._log.close()

    def _last_words(self, *, timed_out: bool) -> str:
        if timed_out:
            return f"no result after {TIMEOUT_S:.0f} s"
        self._log.seek(0)
        lines = self._log.read().decode(errors="replace").strip().splitlines()
        return f"the process ended with code {self._process.wait()}: {lines[-1] if lines else 'it said nothing'}"


def main() -> None:
    """Answer keys until stdin ends."""
    arm = Arm(sys.argv[1])
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w", buffering=1)
    # What libraries print must not come between the answers.
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    warnings.simplefilter("ignore")
    cases = {case.key: case for case in list_cases(OPERATORS)}
    for line in sys.stdin:
        started = time.perf_counter()
        outcome = run_case(cases[line.strip()], arm)
        answer = {
            "stage": outcome.stage.value,
            "error": outcome.error[-_ERROR_CHARS:],
            "seconds": round(time.perf_counter() - started, 3),
        }
        answers.write(json.dumps(answer) + "\n")


if __name__ == "__main__":
    main()
