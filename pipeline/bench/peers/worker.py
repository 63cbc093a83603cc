"""The process of one peer: it loads the model, runs it on request, and returns latencies.

It imports NumPy and the peer's package alone: it may run under another interpreter.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from relaxtune.pipeline.bench.peers.callers import Caller, Peer, PeerError, PeerOrder, run_together, timed_ms

# Characters of a library's message that reach the user.
_SHOWN_MAX = 400


@dataclass(frozen=True)
class Prepare:
    """Run every caller once on inputs of a file, and write the outputs of the first to another one."""

    inputs: str
    outputs: str
    names: tuple[str, ...]


@dataclass(frozen=True)
class Run:
    """Ask for the latency of one call, in ms."""


@dataclass(frozen=True)
class RunTogether:
    """Ask for the latencies (ms) of all callers at once, for so many seconds, and the seconds that it took."""

    seconds: float


@dataclass(frozen=True)
class Generate:
    """Ask for so many tokens after prompts: the seconds after the start at which each came, and the tokens."""

    ids: list[list[int]]
    new: int


@dataclass(frozen=True)
class Missing:
    """A package that is not installed."""

    package: str


@dataclass(frozen=True)
class Failed:
    """The reason why the peer does not do it, in one line."""

    reason: str


def start() -> Callable[[object], object]:
    """Return the function that answers: for a `PeerOrder`, which comes first, the peer's version."""
    # PyTorch is kept out of other children.
    if sys.modules.get("torch", sys) is None:
        del sys.modules["torch"]
    worker = _PeerWorker()

    def answer(request: object) -> object:
        try:
            return worker.answer(request)
        except ImportError as error:
            traceback.print_exc()
            return Missing((error.name or str(error)).partition(".")[0])
        except PeerError as error:
            return Failed(" ".join(str(error).split()) or "no message")
        # The border of the process: whatever a library raises becomes one line; the process's log has all.
        except Exception as error:
            traceback.print_exc()
            return Failed(f"{type(error).__name__}: {(' '.join(str(error).split()) or 'no message')[:_SHOWN_MAX]}")

    return answer


class _PeerWorker:
    def __init__(self) -> None:
        self._order: PeerOrder
        self._peer: Peer
        self._callers: list[Caller] = []

    def answer(self, request: object) -> object:
        if isinstance(request, PeerOrder):
            self._order, self._peer = request, load_peer(request)
            return self._peer.version
        if isinstance(request, Prepare):
            self._callers.clear()
            with np.load(request.inputs) as archive:
                inputs = {name: archive[f"arr_{place}"] for place, name in enumerate(request.names)}
            self._callers += self._peer.callers(inputs, self._order.streams)
            for caller in self._callers:
                caller.run()
            outputs, names = self._callers[0].outputs(), self._order.outputs
            missing = [name for name in names if name not in outputs]
            if missing:
                raise PeerError(f"it has no output {missing[0]!r}; it gave {', '.join(outputs)}")
            with open(request.outputs, "wb") as file:
                np.savez(file, *[outputs[name] for name in names])
            return None
        if isinstance(request, Run):
            return timed_ms(self._callers[0].run)
        if isinstance(request, RunTogether):
            return run_together([caller.run for caller in self._callers], request.seconds)
        if isinstance(request, Generate):
            from relaxtune.pipeline.bench.peers.torch_peer import TorchPeer

            assert isinstance(self._peer, TorchPeer)
            return self._peer.generate(request.ids, request.new)
        raise TypeError(f"expected a request to a peer, got {type(request).__name__}")


def load_peer(order: PeerOrder) -> Peer:
    """Return the model as a peer has it.

    Raises `ImportError`: its package is not installed here; `PeerError`: it is, and does not take the model.
    """
    if order.peer in {"ort", "ort-cuda"}:
        from relaxtune.pipeline.bench.peers.onnxruntime_peer import OnnxRuntimePeer

        return OnnxRuntimePeer(order)
    from relaxtune.pipeline.bench.peers.torch_peer import TorchPeer

    return TorchPeer(order)
