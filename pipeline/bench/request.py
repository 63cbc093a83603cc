"""The request of a benchmark: peers, how long, how many callers, which sizes."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from relaxtune.pipeline.bench.measure import DEFAULT_RUNS, DEFAULT_WARMUP, ORT_ARM
from relaxtune.pipeline.errors import UsageError

#: Peers of `--against`, and the kinds of device that each computes on.
PEERS: Mapping[str, frozenset[str]] = {
    ORT_ARM: frozenset({"llvm", "cuda"}),
    "ort-cuda": frozenset({"cuda"}),
    "torch": frozenset({"llvm", "cuda"}),
    "torch-compile": frozenset({"llvm", "cuda"}),
}
_TORCH = frozenset({"torch", "torch-compile"})
# Seconds of each arm where several callers run and none are given.
_LOAD_SECONDS = 3.0


@dataclass(frozen=True)
class BenchRequest:
    """How artifacts and peers are measured."""

    against: tuple[str, ...] = (ORT_ARM,)  #: Peers, out of `PEERS`.
    #: Timed runs of each arm, and untimed ones before.
    runs: int = DEFAULT_RUNS
    warmup: int = DEFAULT_WARMUP
    duration_s: float | None = None  #: Seconds that each arm runs, in place of `runs`.
    streams: int = 1  #: Callers at once; latencies are then those under load, taken for `duration_s` (3 by default).
    #: The function that returns the `torch.nn.Module` for `torch` and `torch-compile`, as `--torch` names it.
    torch_module: str | None = None
    python: Path | None = None  #: The interpreter of the peers' processes; None is the one that runs this.
    dims: Mapping[str, int] = field(default_factory=dict)  #: Sizes of symbolic axes.
    seed: int = 0  #: Of the random inputs.

    def __post_init__(self) -> None:
        """Refuse what cannot be measured.

        Raises `UsageError`: names the option.
        """
        unknown = [name for name in self.against if name not in PEERS]
        if unknown:
            raise UsageError(f"cannot measure against {', '.join(unknown)}; expected {', '.join(PEERS)}")
        if len(set(self.against)) < len(self.against):
            raise UsageError(f"--against names a peer twice: {', '.join(self.against)}")
        torch = [name for name in self.against if name in _TORCH]
        if torch and not self.torch_module:
            raise UsageError(
                f"{' and '.join(torch)} need the model as a torch.nn.Module, since torch reads no ONNX: give a "
                "function that returns it with --torch MODULE:FACTORY or --torch FILE.py:FACTORY"
            )
        if self.torch_module and not all(self.torch_module.rpartition(":")[::2]):
            raise UsageError(f"--torch {self.torch_module!r}: expected MODULE:FACTORY or FILE.py:FACTORY")
        if self.duration_s is not None and not 0 < self.duration_s < math.inf:
            raise UsageError(f"a duration of {self.duration_s:g} seconds is none; expected more than 0")
        if self.streams < 1:
            raise UsageError(f"{self.streams} streams; expected 1 or more")

    @property
    def load_seconds(self) -> float | None:
        """How long each arm runs under load; None where its runs are counted."""
        return _LOAD_SECONDS if self.duration_s is None and self.streams > 1 else self.duration_s

    def check_device(self, kind: str) -> None:
        """Check that the peers compute on the artifact's kind of device: a ratio over another device means nothing.

        Raises `UsageError`: names the peer that does not.
        """
        for name in self.against:
            if kind not in PEERS[name]:
                fitting = ", ".join(peer for peer, kinds in PEERS.items() if kind in kinds)
                raise UsageError(
                    f"{name} does not compute on the artifact's device (target {kind}), and a ratio over another "
                    f"device means nothing; expected {fitting}"
                )
