"""The living nodes of a cluster, and the process of ours on each that reads what the node has."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from relaxtune.pipeline.printable import last_line
from relaxtune.pipeline.tuning.ray.facts import NodeFacts

_SERVER = "relaxtune.pipeline.tuning.ray.node_server"
_TIMEOUT_S = 120.0
_LEAVE_S = 3.0


@dataclass(frozen=True)
class Node:
    """A living node: Ray's id, its host, what it offers, and what it has or why that is unknown."""

    id: str
    host: str
    resources: dict[str, float]
    facts: NodeFacts | None
    fault: str = ""


class NodeProcesses:
    """A process on each living node; all start at the same time.

    They stay until `close`, and fork workers of the `modules` for the run (`pipeline.tuning.ray.node_server`).
    """

    def __init__(self, ray: ModuleType, run: str, modules: Sequence[str] = ()) -> None:
        self._ray = ray
        self._alive = [one for one in ray.nodes() if one["Alive"]]
        process = ray.remote(num_cpus=0, max_restarts=0)(_process_class())
        placed = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy
        self._actors: list[Any] = [
            process.options(scheduling_strategy=placed(one["NodeID"], soft=False)).remote() for one in self._alive
        ]
        words = (_SERVER, run, *modules)
        self._answers = [one.begin.remote(words, _TIMEOUT_S) for one in self._actors]

    def nodes(self) -> list[Node]:
        """Return the nodes, with what each has; waits for the answers."""
        self._ray.wait(self._answers, num_returns=len(self._answers), timeout=2 * _TIMEOUT_S)
        nodes = []
        for one, answer in zip(self._alive, self._answers, strict=True):
            try:
                text, fault = self._ray.get(answer, timeout=0)
            except self._ray.exceptions.RayError as e:
                text, fault = "", f"it does not answer: {last_line(e).rstrip('.')}"
            facts = NodeFacts.from_json(text) if text else None
            nodes.append(Node(one["NodeID"], one["NodeManagerHostname"], dict(one["Resources"]), facts, fault))
        return nodes

    def close(self) -> None:
        """End the processes on the nodes."""
        ended = [one.end.remote() for one in self._actors]
        self._ray.wait(ended, num_returns=len(ended), timeout=_LEAVE_S)
        for one in self._actors:
            self._ray.kill(one)


def _process_class() -> type:
    """Return a class that is sent by value: it runs where this package is missing too."""

    class NodeProcess:
        """Runs a module of ours on a node, outside of Ray's pinning: without a GPU of its own it would see none."""

        def begin(self, words: tuple[str, ...], timeout_s: float) -> tuple[str, str]:
            """Start a module, which ends with its stdin; return the JSON that it prints, or why there is none."""
            import os
            import selectors
            import subprocess
            import sys
            import tempfile
            import time

            environment = {name: value for name, value in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"}
            environment["PYTHONPATH"] = os.pathsep.join(one or os.getcwd() for one in sys.path)
            # One thread: what other threads hold at a fork stays held in the child.
            environment |= {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
            log = tempfile.TemporaryFile()  # noqa: SIM115
            self.process = subprocess.Popen(
                [sys.executable, "-m", *words],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env=environment,
            )
            assert self.process.stdout is not None
            read, until = b"", time.monotonic() + timeout_s
            with selectors.DefaultSelector() as selector:
                selector.register(self.process.stdout, selectors.EVENT_READ)
                while selector.select(max(0.0, until - time.monotonic())):
                    more = os.read(self.process.stdout.fileno(), 65536)
                    read += more
                    lines = [one for one in read.decode(errors="replace").split("\n")[:-1] if one.startswith("{")]
                    if lines:
                        return lines[-1], ""
                    if not more:
                        code = self.process.wait()
                        log.seek(0)
                        wrote = log.read().decode(errors="replace").strip().splitlines()
                        return "", wrote[-1] if wrote else f"{sys.executable} ended with exit status {code}"
            self.process.kill()
            return "", f"its facts were not there after {timeout_s:g} s"

        def end(self) -> None:
            """End it."""
            self.process.terminate()
            self.process.wait()

    return NodeProcess
