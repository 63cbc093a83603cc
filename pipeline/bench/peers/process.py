"""The process of a peer, seen from the outside: start, request, end."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

import numpy as np

from relaxtune.pipeline.bench.peers.callers import PeerError, PeerOrder
from relaxtune.pipeline.bench.peers.worker import Failed, Generate, Missing, Prepare, Run, RunTogether
from relaxtune.pipeline.workers.limits import Limits
from relaxtune.pipeline.workers.replies import WorkerError
from relaxtune.pipeline.workers.worker import Worker

_MODULE = "relaxtune.pipeline.bench.peers.worker"
# A library may compile for long before it answers.
_ANSWER_CPU_S = 7200.0


class PeerMissingError(PeerError):
    """A package that the peer needs is not installed; `package` is its name."""

    def __init__(self, package: str) -> None:
        super().__init__(f"{package} is not installed")
        self.package = package


class PeerProcess:
    """One peer in a process of its own, under any Python interpreter that has NumPy and the peer's package."""

    def __init__(self, order: PeerOrder, folder: Path, python: Path | None = None) -> None:
        """Start it and wait until its library has loaded.

        Its inputs and outputs lie in `folder`; `python` is the interpreter, by default the one that runs this.

        Raises `PeerMissingError`: its package is not installed there; `PeerError`: it does not load the model, or the
        interpreter does not start.
        """
        self.order = order
        self._folder = folder
        environment = {"OMP_NUM_THREADS": str(order.threads), "ORT_DISABLE_TELEMETRY": "1"}
        self._worker = Worker(_MODULE, environment, gpu=True, python=python)
        try:
            self.version = str(self._ask(order))
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        """Return it."""
        return self

    def __exit__(self, *_: object) -> None:
        """End the process."""
        self.close()

    def close(self) -> None:
        """End the process."""
        self._worker.close()

    def prepare(self, inputs: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Give it inputs to run on from now on; return its outputs for them.

        Raises `PeerError`: it does not compute them.
        """
        given, made = self._folder / f"{self.order.peer}-in.npz", self._folder / f"{self.order.peer}-out.npz"
        # By their places: a name may hold what a file's name may not.
        np.savez(given, *inputs.values())
        self._ask(Prepare(str(given), str(made), tuple(inputs)))
        with np.load(made, allow_pickle=False) as archive:
            return {name: archive[f"arr_{place}"] for place, name in enumerate(self.order.outputs)}

    def run_ms(self) -> float:
        """Return the latency of one call, by the clock of its process."""
        return float(self._ask(Run()))

    def generate(self, ids: list[list[int]], new: int) -> tuple[list[float], list[list[int]]]:
        """Return when each of the tokens after some prompts came, in seconds after the start, and the tokens."""
        arrivals_s, tokens = self._ask(Generate(ids, new))
        return list(arrivals_s), list(tokens)

    def run_together(self, seconds: float) -> tuple[list[float], float]:
        """Return the latencies (ms) of all callers at once, for so many seconds, and the seconds that it took."""
        latencies_ms, took_s = self._ask(RunTogether(seconds))
        return list(latencies_ms), float(took_s)

    def _ask(self, request: object) -> Any:
        try:
            reply = self._worker.ask(request, Limits(cpu_s=_ANSWER_CPU_S), again=False)
        except WorkerError as error:
            raise PeerError(error.short) from error
        if reply.error is not None:
            raise PeerError(reply.error.strip().splitlines()[-1])
        if isinstance(reply.value, Missing):
            raise PeerMissingError(reply.value.package)
        if isinstance(reply.value, Failed):
            raise PeerError(reply.value.reason)
        return reply.value
