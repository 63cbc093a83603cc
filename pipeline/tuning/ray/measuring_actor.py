"""The measuring side on a node: an actor with one device to itself, chosen and pinned by Ray.

A candidate runs in a child of the actor, which may crash or hang; the actor kills and replaces it, as on one machine.
References are computed here, where the device is; actors of one machine share the files.

Ray imports this file before anything else of ours, so nothing here is imported that imports TVM, and PyTorch with it.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import socket
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from relaxtune.pipeline.errors import PipelineError
from relaxtune.pipeline.temporary import shared_folder, temporary_folder
from relaxtune.pipeline.tuning.measure.device_turn import turn_of
from relaxtune.pipeline.tuning.ray.objects import unpacked
from relaxtune.pipeline.workers.child import leave_out_torch

if TYPE_CHECKING:
    from relaxtune.pipeline.tuning.measure.backend import Outcome
    from relaxtune.pipeline.tuning.measure.timing import MeasureOptions
    from relaxtune.pipeline.tuning.measure.workload_spec import BuiltArtifact, WorkloadSpec
    from relaxtune.schedules.targets import ResolvedTarget
    from relaxtune.tuning_db.records import Environment


@dataclass(frozen=True)
class ActorSettings:
    """What an actor is made with."""

    run: str  # Of the tuning run; its references are shared under this name.
    # What is measured for, and the environment that outcomes are stamped with.
    target: ResolvedTarget
    environment: Environment
    # See `MeasuringProcess`.
    options: MeasureOptions
    timeout_s: float
    seed: int
    forks: str = ""  # The run whose server on the host forks the measuring process; without, it is started afresh.


class MeasuringActor:
    """Measures candidates that come as packed bytes, one after another, on its device.

    Parameters
    ----------
    pickled : bytes
        The `ActorSettings`.

    Raises
    ------
    PipelineError
        The device is of another model than the run's.
    """

    def __init__(self, pickled: bytes) -> None:
        leave_out_torch()
        from relaxtune.pipeline.environment import detect_environment
        from relaxtune.pipeline.tuning.local.devices import pinned
        from relaxtune.pipeline.tuning.local.measuring_process import MeasuringProcess
        from relaxtune.pipeline.tuning.measure.stop import StopSignal
        from relaxtune.pipeline.tuning.ray.node_server import join_server

        settings: ActorSettings = pickle.loads(pickled)
        gpu = settings.target.kind == "cuda"
        with contextlib.ExitStack() as stack:
            references = stack.enter_context(shared_folder(settings.run))
            # Actors that work on cells time them on the same device.
            turn = stack.enter_context(contextlib.closing(turn_of(references, own_gpu()))) if gpu else None
            self._directory = Path(stack.enter_context(temporary_folder()))
            # It starts while this process looks at the device.
            self._process = stack.enter_context(
                contextlib.closing(
                    MeasuringProcess(
                        pinned("cuda:0" if gpu else "cpu:0"),
                        settings.environment,
                        settings.options,
                        settings.timeout_s,
                        StopSignal(),
                        settings.seed,
                        self._directory,
                        join_server(settings.forks),
                        references=references,
                        turn=turn,
                    )
                )
            )
            found = detect_environment(settings.target)
            if found != settings.environment:
                raise PipelineError(
                    f"{socket.gethostname()} measures for another environment than the run's: expected "
                    f"{settings.environment}, got {found}"
                )
            self._stack = stack.pop_all()

    def begin(self) -> str:
        """Set the device up; return the host's name."""
        self._process.ready()
        return socket.gethostname()

    def prepare_reference(self, spec: WorkloadSpec, *references: bytes | None) -> int:
        """Compute a workload's reference; return how often the child was replaced."""
        self._process.prepare_reference(_with_code(spec, references))
        return self._process.restarts

    def measure(
        self, artifact: BuiltArtifact, spec: WorkloadSpec, code: bytes, *references: bytes | None
    ) -> tuple[Outcome, int]:
        """Check and time a candidate."""
        with self._placed([artifact], [code]) as placed:
            return self._process.measure(placed[0], _with_code(spec, references)), self._process.restarts

    def compare(
        self,
        artifacts: Sequence[BuiltArtifact],
        spec: WorkloadSpec,
        rounds: int,
        reference: bytes | None,
        host_reference: bytes | None,
        *codes: bytes,
    ) -> tuple[list[Outcome] | None, int]:
        """Check candidates of one workload and time them alternately."""
        with self._placed(artifacts, codes) as placed:
            found = self._process.compare(placed, _with_code(spec, (reference, host_reference)), rounds)
            return found, self._process.restarts

    def leave(self) -> None:
        """End the child and remove the files."""
        self._stack.close()

    @contextlib.contextmanager
    def _placed(self, artifacts, codes):  # type: ignore[no-untyped-def]
        """Give the artifacts with their code; the files that are made of it are removed."""
        try:
            yield [replace(one, content=unpacked(code)) for one, code in zip(artifacts, codes, strict=True)]
        finally:
            for one in artifacts:
                (self._directory / f"{one.sha256}.so").unlink(missing_ok=True)


def own_gpu() -> str:
    """Return the name that all actors on this process's GPU have for it; Ray says which it is."""
    return f"cuda:{os.environ.get('CUDA_VISIBLE_DEVICES', '')}"


def _with_code(spec: WorkloadSpec, references: Sequence[bytes | None]) -> WorkloadSpec:
    reference, host_reference = references
    return replace(
        spec, reference=_filled(spec.reference, reference), host_reference=_filled(spec.host_reference, host_reference)
    )


def _filled(artifact: BuiltArtifact | None, code: bytes | None) -> BuiltArtifact | None:
    return None if artifact is None or code is None else replace(artifact, content=unpacked(code))
