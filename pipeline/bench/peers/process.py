"""A peer's process, seen from the outside: started, asked, ended."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np

from relaxtune.pipeline.bench.peers.callers import PeerError, PeerOrder
from relaxtune.pipeline.processes.watch import Watch

# The project's folder goes last: packages are those of the interpreter that is asked for.
_ROOT = str(Path(__file__).resolve().parents[3])
_CODE = f"import sys; sys.path.append({_ROOT!r}); from relaxtune.pipeline.bench.peers.worker import main; main()"
_END_S = 10.0
_LOOK_S = 1.0
# A library may compile for long before it answers.
_ANSWER_CPU_S = 7200.0


class PeerMissingError(PeerError):
    """A package that the peer needs is not installed; `package` is its name."""

    def __init__(self, package: str) -> None:
        """Hold the package's name."""
        super().__init__(f"{package} is not installed")
        self.package = package


class PeerProcess:
    """One peer in a process of its own, under any Python interpreter that has NumPy and the peer's package."""

    def __init__(self, order: PeerOrder, folder: Path, python: Path | None = None) -> None:
        """Start it and wait until its library has loaded.

        Parameters
        ----------
        order : PeerOrder
            What it is to do.
        folder : Path
            For inputs, outputs and its log.
        python : Path or None
            The interpreter; by default the one that runs this.

        Raises
        ------
        PeerMissingError
            Its package is not installed there.
        PeerError
            It does not load the model, or the interpreter does not start.
        """
        self.order = order
        self._folder = folder
        self._log = folder / f"{order.peer}.log"
        environment = {**os.environ, "OMP_NUM_THREADS": str(order.threads), "ORT_DISABLE_TELEMETRY": "1"}
        try:
            with self._log.open("wb") as log:
                self._process = subprocess.Popen(
                    [str(python or sys.executable), "-c", _CODE, json.dumps(asdict(order))],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=log,
                    text=True,
                    env=environment,
                )
        except OSError as error:
            raise PeerError(f"the interpreter {python} does not start: {error.strerror}") from error
        try:
            self.version = str(self._answer()["ready"])
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        """Return it."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End the process."""
        self.close()

    def close(self) -> None:
        """End the process; it is killed where it does not end by itself."""
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()
        try:
            self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def prepare(self, inputs: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Give it inputs to run on from now on; return its outputs for them.

        Raises
        ------
        PeerError
            It does not compute them.
        """
        given, made = self._folder / f"{self.order.peer}-in.npz", self._folder / f"{self.order.peer}-out.npz"
        # By their places: a name may hold what a file's name may not.
        np.savez(given, *inputs.values())
        self._ask(prepare=str(given), outputs=str(made), names=list(inputs))
        with np.load(made, allow_pickle=False) as archive:
            return {name: archive[f"arr_{place}"] for place, name in enumerate(self.order.outputs)}

    def run_ms(self) -> float:
        """Return the latency of one call, by the clock of its process."""
        return float(self._ask(run=0)["latencies_ms"][0])

    def run_together(self, seconds: float) -> tuple[list[float], float]:
        """Return the latencies (ms) of all callers at once, for so many seconds, and the seconds that it took."""
        answer = self._ask(together=seconds)
        return list(answer["latencies_ms"]), float(answer["seconds"])

    def _ask(self, **request: object) -> dict[str, Any]:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
        except OSError as error:
            raise PeerError(self._ended()) from error
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        watch: Watch | None = None
        # Each answer is one line, so that none waits in a buffer of ours.
        while not select.select([self._process.stdout], [], [], _LOOK_S)[0]:
            watch = watch or Watch(self._process.pid, _ANSWER_CPU_S)
            stuck = watch.stuck()
            if stuck is not None:
                self._process.kill()
                raise PeerError(stuck)
        line = self._process.stdout.readline()
        if not line:
            raise PeerError(self._ended())
        answer: dict[str, Any] = json.loads(line)
        if "missing" in answer:
            raise PeerMissingError(answer["missing"])
        if "failed" in answer:
            raise PeerError(answer["failed"])
        return answer

    def _ended(self) -> str:
        """Return why there is no answer: how the process ended, and its last words."""
        code = self._process.wait()
        words = [line for line in self._log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
        how = f"by signal {-code}" if code < 0 else f"with code {code}"
        return f"its process ended {how}: {words[-1].strip() if words else 'it said nothing'}"
