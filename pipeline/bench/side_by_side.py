"""Artifacts beside peers on the same inputs: each peer in a process of its own, checked first, then all take turns."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import tvm

from relaxtune.models import OnnxModel, TensorSpec
from relaxtune.models.files import save_model
from relaxtune.pipeline.artifact.module import Module
from relaxtune.pipeline.bench.measure import Arm, BenchmarkReport, LoadArm, measure, measure_load, module_arm
from relaxtune.pipeline.bench.peers.callers import PeerError, PeerOrder, run_together
from relaxtune.pipeline.bench.peers.process import PeerMissingError, PeerProcess
from relaxtune.pipeline.bench.request import BenchRequest
from relaxtune.pipeline.temporary import temporary_folder
from relaxtune.pipeline.tvm_runtime.threads import default_threads
from relaxtune.pipeline.validate.reference import Reference
from relaxtune.pipeline.validate.report import ValidationReport
from relaxtune.pipeline.validate.validation import Observation, comparable, judge

logger = logging.getLogger(__name__)

# How to get what a peer's process misses.
_INSTALL = {
    "onnxruntime-gpu": "pip install onnxruntime-gpu in place of onnxruntime",
    "a torch with CUDA": "see https://pytorch.org/get-started",
}


@dataclass(frozen=True)
class LoadedArtifact:
    """An artifact with a module for each caller; modules share one copy of the weights where they can."""

    modules: tuple[Module, ...]

    @classmethod
    def load(cls, directory: Path, streams: int = 1) -> LoadedArtifact:
        """Load an artifact for so many callers at once, which have the CPU's threads together."""
        # Before anything else of this thread: a pool that exists cannot grow, and pins whatever starts after it.
        threads = threads_of_caller(streams)
        first = Module.load(directory, threads=threads)
        more = [Module.load(directory, threads=threads, verify=False, beside=first) for _ in range(streams - 1)]
        return cls((first, *more))

    @property
    def module(self) -> Module:
        """The first caller's module."""
        return self.modules[0]

    def arm(self, inputs: Mapping[str, np.ndarray]) -> Arm:
        """Return one caller as an arm. An artifact with buckets takes host arrays, as it pads there."""
        return _arm(self.module, inputs)

    def callers(self, inputs: Mapping[str, np.ndarray]) -> list[Arm]:
        """Return each caller as an arm."""
        return [_arm(module, inputs) for module in self.modules]

    def load_arm(self, inputs: Mapping[str, np.ndarray]) -> LoadArm:
        """Return all callers at once as an arm."""
        runs = self.callers(inputs)
        return lambda seconds: run_together(runs, seconds)


def threads_of_caller(streams: int) -> int:
    """Return how many CPU threads each of so many callers computes with."""
    return max(1, default_threads() // streams)


@dataclass(frozen=True)
class SideBySide:
    """Peers that run, and why others do not."""

    model: OnnxModel
    artifact: LoadedArtifact  # Compared with the peers; other artifacts of its model may be measured too.
    request: BenchRequest
    reference: Reference
    running: dict[str, PeerProcess] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)

    def measure(self, artifacts: Mapping[str, LoadedArtifact], inputs: Mapping[str, np.ndarray]) -> BenchmarkReport:
        """Return the latencies of artifacts and of all peers that compute the inputs right, taking turns.

        Raises `ValidationFailedError`: an artifact's outputs are not what ONNX Runtime gives on the CPU: its latency
        would mean nothing.
        """
        expected = self.check(artifacts, inputs)
        failed, wrong, right = dict(self.failed), {}, {}
        for name, peer in self.running.items():
            logger.info("%s prepares the model", name)
            try:
                got = peer.prepare(inputs)
            except PeerError as error:
                failed[name] = str(error)
                continue
            specs = [TensorSpec(one, str(array.dtype), array.shape) for one, array in got.items()]
            outputs = self._judged(self.artifact.module, expected, got, inputs, specs).outputs
            bad = [f"output {one.name!r}: {one.reason}" for one in outputs if not one.passed]
            if bad:
                wrong[name] = "; ".join(bad)
            else:
                right[name] = peer
        report = self._measured(artifacts, right, inputs)
        return replace(report, left_out=dict(self.left_out), failed=failed, wrong=wrong)

    def check(
        self, artifacts: Mapping[str, LoadedArtifact], inputs: Mapping[str, np.ndarray]
    ) -> Mapping[str, np.ndarray]:
        """Return what ONNX Runtime gives on the CPU.

        Raises `ValidationFailedError`: an artifact's outputs are another.
        """
        expected = self.reference.run(inputs)
        for artifact in artifacts.values():
            module = artifact.module
            self._judged(module, expected, module.run(inputs), inputs, module.outputs).raise_if_failed()
        return expected

    def _judged(
        self,
        module: Module,
        expected: Mapping[str, np.ndarray],
        got: Mapping[str, np.ndarray],
        inputs: Mapping[str, np.ndarray],
        specs: Sequence[TensorSpec],
    ) -> ValidationReport:
        seen = Observation(comparable(module, expected, inputs), got, inputs)
        return judge(module, self.model, self.reference, [seen], specs)[0]

    def _measured(
        self,
        artifacts: Mapping[str, LoadedArtifact],
        peers: Mapping[str, PeerProcess],
        inputs: Mapping[str, np.ndarray],
    ) -> BenchmarkReport:
        manifest, streams = self.artifact.module.manifest, self.request.streams
        conditions = {
            "device": str(self.artifact.module.device),
            "target": f"{manifest.target.kind} {manifest.target.arch}",
            "tvm": tvm.__version__,
            **{name: peer.version for name, peer in peers.items()},
            "threads": str(threads_of_caller(streams)),
            **({"callers at once": str(streams)} if streams > 1 else {}),
        }
        seconds, warmup = self.request.load_seconds, self.request.warmup
        if seconds is not None:
            loads = {name: one.load_arm(inputs) for name, one in artifacts.items()}
            loads |= {name: peer.run_together for name, peer in peers.items()}
            return measure_load(loads, seconds=seconds, warmup=warmup, conditions=conditions)
        arms = {name: one.arm(inputs) for name, one in artifacts.items()}
        arms |= {name: peer.run_ms for name, peer in peers.items()}
        return measure(arms, runs=self.request.runs, warmup=warmup, conditions=conditions)


@contextmanager
def side_by_side(artifact: LoadedArtifact, model: OnnxModel, request: BenchRequest) -> Iterator[SideBySide]:
    """Start the peers of a request, and end them with the context.

    Raises `UsageError`: a peer does not compute on the artifact's kind of device.
    """
    manifest = artifact.module.manifest
    request.check_device(manifest.target.kind)
    with ExitStack() as stack:
        made = SideBySide(model, artifact, request, Reference(model, policy=manifest.policy))
        if request.against:
            folder = stack.enter_context(temporary_folder())
            path = save_model(model, folder / "model.onnx")
        for name in request.against:
            order = PeerOrder(
                peer=name,
                model=str(path),
                kind=manifest.target.kind,
                threads=threads_of_caller(request.streams),
                streams=request.streams,
                outputs=tuple(spec.name for spec in model.outputs),
                factory=request.torch_module,
                tf32=manifest.precision == "tf32",
            )
            try:
                made.running[name] = stack.enter_context(PeerProcess(order, folder, request.python))
            except PeerMissingError as error:
                how = _INSTALL.get(error.package, f"pip install {error.package}")
                where = "" if request.python is None else f" for {request.python}"
                made.left_out[name] = f"{error.package} is not installed{where}: {how}"
                logger.warning("%s is left out: %s", name, made.left_out[name])
            except PeerError as error:
                made.failed[name] = str(error)
        yield made


def _arm(module: Module, inputs: Mapping[str, np.ndarray]) -> Arm:
    if module.manifest.buckets is None:
        return module_arm(module, inputs)

    def run() -> None:
        module.run(inputs)

    return run
