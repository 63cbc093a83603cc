"""The subject of a bisection: a loaded artifact, and the same model lowered again as its manifest says."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import tvm

from relaxtune.models import OnnxModel
from relaxtune.pipeline.artifact.compile import compile_module
from relaxtune.pipeline.artifact.entries import KernelEntry
from relaxtune.pipeline.artifact.export import write_artifact
from relaxtune.pipeline.artifact.manifest import Manifest
from relaxtune.pipeline.artifact.module import Module
from relaxtune.pipeline.bisect.trace import CallSite, KernelWatch, Replacement, TracedCall, kernel_calls
from relaxtune.pipeline.choose.selection import select_kernels
from relaxtune.pipeline.environment import detect_environment
from relaxtune.pipeline.importer import import_model
from relaxtune.pipeline.passes import lower
from relaxtune.pipeline.passes.module import LoweredModule, LoweringOptions
from relaxtune.pipeline.tasks.extract import extract_tasks
from relaxtune.pipeline.temporary import temporary_folder
from relaxtune.schedules.targets import ResolvedTarget, resolve_target
from relaxtune.tuning_db.records import Mode, Route
from relaxtune.tuning_db.store import TuningDatabase
from relaxtune.tuning_db.urls import DatabasePlace

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Subject:
    """An artifact under suspicion."""

    module: Module  # Loaded, its kernels called one by one.
    # The lowered model of today's passes, with the artifact's options and target.
    lowered: LoweredModule
    target: ResolvedTarget
    calls: tuple[CallSite, ...]  # The kernels it runs, in order.

    @property
    def host(self) -> tvm.target.Target:
        """The CPU that references are computed on."""
        target = self.target.target
        return target.host if target.host is not None else target

    def entry(self, function: str) -> KernelEntry | None:
        """Return what the manifest says of a kernel."""
        return next((kernel for kernel in self.module.manifest.kernels if kernel.function == function), None)

    def run(
        self,
        inputs: Mapping[str, np.ndarray],
        *,
        poison: bool = False,
        replacements: Mapping[str, Replacement] | None = None,
        after: Callable[[CallSite, Sequence[object]], None] | None = None,
    ) -> tuple[dict[str, np.ndarray], list[TracedCall]]:
        """Return the artifact's outputs and what each of its kernels wrote, some of them replaced.

        Raises `PipelineError`: its kernels are not those that the passes make now.
        """
        watch = KernelWatch(self.calls, poison=poison, replacements=replacements, after=after)
        with self.module.instrumented(watch):
            outputs = self.module.run(inputs)
        watch.verify()
        return outputs, watch.trace


def make_subject(module: Module, model: OnnxModel, database: DatabasePlace | None) -> Subject:
    """Return an artifact as it can be bisected; one that runs as a CUDA graph is compiled again without.

    The model is at the artifact's shapes. `database` has the records of a module that runs as a CUDA graph.
    Raises `PipelineError`: the model cannot be lowered as the manifest says.
    """
    manifest = module.manifest
    target = resolve_target(manifest.target.config)
    lowered = lower(import_model(model), target.target, lowering_options(manifest))
    if manifest.target.cuda_graph:
        module = _without_graph(lowered, target, manifest, database)
    sources = {call.binding: call.onnx_nodes for calls in lowered.kernels.values() for call in calls}
    return Subject(module, lowered, target, kernel_calls(lowered.mod, sources))


def lowering_options(manifest: Manifest) -> LoweringOptions:
    """Return the options that an artifact was lowered with."""
    disabled = frozenset(entry.name for entry in manifest.passes if not entry.enabled)
    policy = manifest.policy
    grouped = manifest.precision is not None and policy is not None and policy.weight_bits is not None
    return LoweringOptions(
        precision=manifest.precision,
        disabled_passes=disabled,
        embed_weights=not manifest.weights,
        group_size=policy.group_size if grouped and policy is not None else None,
        calibration=policy.static if policy is not None else None,
        rows_max=manifest.rows_max,
        maxima=manifest.maxima,
        unpad=manifest.unpadding is not None,
        one_packing=manifest.buckets is not None,
    )


def _without_graph(
    lowered: LoweredModule, target: ResolvedTarget, manifest: Manifest, database: DatabasePlace | None
) -> Module:
    tasks = extract_tasks([lowered])
    records = nullcontext() if database is None else TuningDatabase.open(database, mode=Mode.READ_ONLY, create=False)
    with records as opened:
        here, routes = detect_environment(target), frozenset(Route)
        choices = select_kernels(lowered, tasks, database=opened, target=target, environment=here, routes=routes)
    compiled = compile_module(lowered, choices, target, cuda_graph=False)
    with temporary_folder() as folder:
        again = write_artifact(compiled, Path(folder) / "artifact")
        made = {kernel.function: kernel.decision_sha256 for kernel in again.kernels}
        others = [kernel.function for kernel in manifest.kernels if made.get(kernel.function) != kernel.decision_sha256]
        if others:
            cure = "name the database of its records with --db" if opened is None else f"{opened.url} has others by now"
            logger.warning(
                "compiled again without a CUDA graph, %d kernels are not the artifact's: %s; %s",
                len(others), ", ".join(others), cure,
            )  # fmt: skip
        return Module.load(Path(folder) / "artifact")
