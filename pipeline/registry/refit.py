"""Give an artifact other weights without compiling or tuning: the passes run again, the code stays.

All changes of weights (packing, transposing, folding, quantisation, two matrices side by side) are passes, and the
manifest has the options that they ran with. They run on the new weights, and must end with the code that the artifact
has: its recipe holds the hashes of each kernel before it was scheduled, and of each constant inside the code.
"""

from __future__ import annotations

import shutil
import time
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from relaxtune.models import OnnxModel, load_model, save_model
from relaxtune.pipeline.artifact.compile import runs_here
from relaxtune.pipeline.artifact.directory import (
    check_destination,
    record_validation,
    stage_beside,
    verify_artifact,
    write_directory,
)
from relaxtune.pipeline.artifact.entries import BucketEntry, KernelEntry
from relaxtune.pipeline.artifact.export import memory_entry, policy_of, write_weights
from relaxtune.pipeline.artifact.loading import read_weights
from relaxtune.pipeline.artifact.manifest import PARAMS_FILE, Manifest
from relaxtune.pipeline.artifact.module import Module
from relaxtune.pipeline.artifact.recipe import find_obstacles
from relaxtune.pipeline.errors import ArtifactError, UsageError
from relaxtune.pipeline.passes.module import LoweredModule
from relaxtune.pipeline.prepare import stage
from relaxtune.pipeline.registry.lora import merge_lora
from relaxtune.pipeline.registry.rebuild import lower_again
from relaxtune.pipeline.validate.acceptance import FAILED, check_key, settle, validate_written
from relaxtune.pipeline.validate.report import ValidationReport
from relaxtune.schedules.targets import resolve_target

_SHOWN = 5


@dataclass(frozen=True)
class Refit:
    """An artifact with other weights."""

    #: Where it is and what it says about itself.
    directory: Path
    manifest: Manifest
    #: Weights that have other values than before, and those that do not.
    changed: tuple[str, ...]
    same: tuple[str, ...]
    seconds: float  #: Seconds without the validation.
    #: The comparison with ONNX Runtime; None where the target cannot run here or it was left out.
    validation: ValidationReport | None


def refit_artifact(
    directory: Path,
    weights: str | Path | None = None,
    out: Path | None = None,
    *,
    lora: Path | None = None,
    seed: int = 0,
    samples: int = 3,
    sign: Path | None = None,
) -> Refit:
    """Write an artifact with the weights of another model of the same graph, whole or not at all.

    The code is that of the artifact in `directory`, whose place the new one takes without `out`. `weights` is the ONNX
    model with the new weights, or a name of the zoo (with weights by `seed`); with `lora`, None is the artifact's own
    model. `lora` is an adapter that is merged into the weights first. The merged model is written to `OUT.merged.onnx`:
    what compares the artifact with its model later reads it there. 0 `samples` leave the validation out; `sign` is the
    private key (PEM) that the artifact is signed with, None leaves it unsigned.

    Raises `UsageError`: neither `weights` nor `lora` is given, or the merged model would be written over its base;
    `ArtifactError`: the new weights do not fit the code: each kernel, constant or weight that is another is named, with
    its ONNX nodes and initialisers, and nothing is written; `ModelError`, `ScheduleError`, `PipelineError`: the model
    cannot be loaded or lowered, or the directory is no artifact.
    """
    out = out or directory
    check_destination(out)
    check_key(sign)
    began = time.perf_counter()
    manifest = verify_artifact(directory)
    if manifest.recipe is None:
        raise ArtifactError(
            f"artifact {directory} has no recipe for other weights: relaxtune {manifest.versions['relaxtune']} did not "
            "write one; compile the model once with this version"
        )
    if manifest.generation is not None:
        raise UsageError(
            f"artifact {directory} generates tokens, and refit does not know such steps yet; compile again"
        )
    target, shapes = resolve_target(manifest.target.config), manifest.model_shapes
    if lora is not None:
        base, seed = (manifest.source, manifest.seed or 0) if weights is None else (weights, seed)
        weights = _merged(load_model(base, shapes=shapes, seed=seed), lora, out)
    if weights is None:
        raise UsageError("refit needs other weights; name an ONNX model of them, or a LoRA adapter")
    with stage("lower"):
        model = load_model(weights, shapes=shapes, seed=seed)
        modules = [lowered for lowered, _ in lower_again(manifest, model, weights, target)]
    _check(manifest, modules, directory, weights)
    arrays = _named(manifest, modules, directory)
    before = read_weights(directory / PARAMS_FILE, manifest)
    changed = tuple(name for name, array in before if array.tobytes() != arrays[name].tobytes())
    seconds = time.perf_counter() - began
    again = _with_weights(manifest, modules, arrays, model, seconds)
    runs = bool(samples) and runs_here(target)
    with stage_beside(out.absolute()) as folder:
        place = folder / out.name
        with stage("export"):
            written = write_directory(place, lambda staging: _write(directory, staging, again, arrays))
        seconds = time.perf_counter() - began
        validation = None
        if runs:
            with stage("validate"):
                validation = validate_written(Module.load(place), place, model, samples)
            written = record_validation(place, validation.to_json())
        missed = FAILED if validation is not None and not validation.passed else None
        settled = settle(place, out, missed, sign)
    same = tuple(name for name in arrays if name not in changed)
    return Refit(settled, written, changed, same, seconds, validation)


def _merged(base: OnnxModel, adapter: Path, out: Path) -> Path:
    """Write the model with an adapter merged into it, and return where."""
    place = out.with_name(f"{out.name}.merged.onnx")
    if base.path is not None and place.exists() and place.samefile(base.path):
        raise UsageError(
            f"{place} has an adapter in it already; name the model without it, or another place for the new"
        )
    with stage("merge"):
        return save_model(merge_lora(base, adapter), place)


def _check(manifest: Manifest, modules: list[LoweredModule], directory: Path, weights: str | Path) -> None:
    """Check that the new graph makes the code of the artifact, in each of its shapes."""
    graph = modules[0].graph
    if (graph.inputs, graph.outputs) != (manifest.inputs, manifest.outputs):
        texts = [
            f"{', '.join(map(str, one.inputs))} -> {', '.join(map(str, one.outputs))}" for one in (manifest, graph)
        ]
        raise ArtifactError(
            f"{weights} is another graph than artifact {directory} has code of: expected {texts[0]}, got {texts[1]}; "
            "compile it"
        )
    recipes = [manifest.recipe, *(entry.recipe for entry in _buckets(manifest))]
    found = [
        (one, lowered)
        for recipe, lowered in zip(recipes, modules, strict=True)
        if recipe is not None
        for one in find_obstacles(recipe, lowered)
    ]
    if not found:
        return
    listed = "; ".join(str(one) for one, _ in found[:_SHOWN])
    more = f"; and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
    embedded = "" if manifest.weights else " It was compiled with its weights inside the code (--embed-weights)."
    raise ArtifactError(
        f"the weights of {weights} do not fit the code of artifact {directory}: {listed}{more}.{embedded} Either a "
        "value that the code holds has changed, or the graph is another, or the passes are (it was compiled by "
        f"relaxtune {manifest.versions['relaxtune']} with TVM {manifest.versions['tvm']}); compile the model"
    )


def _named(manifest: Manifest, modules: list[LoweredModule], directory: Path) -> dict[str, np.ndarray]:
    """Return the new weights by the artifact's names, which come in the order of the code's parameters."""
    arrays: dict[str, np.ndarray] = {}
    orders = [manifest.weights, *(entry.weights for entry in _buckets(manifest))]
    for names, lowered in zip(orders, modules, strict=True):
        for name, array in zip(names, lowered.weights.values(), strict=True):
            new = np.asarray(array, order="C")
            if name in arrays and arrays[name].tobytes() != new.tobytes():
                raise ArtifactError(
                    f"weight {name} of artifact {directory} is one for several of its shape buckets, and the new "
                    "weights differ there; compile the model"
                )
            arrays[name] = new
    return arrays


def _with_weights(
    manifest: Manifest, modules: list[LoweredModule], arrays: dict[str, np.ndarray], model: OnnxModel, seconds: float
) -> Manifest:
    """Return what the artifact says with other weights."""
    first, memory = modules[0], manifest.memory
    buckets = manifest.buckets
    if buckets is not None:
        entries = tuple(
            replace(entry, kernels=_kernels(entry.kernels, lowered))
            for entry, lowered in zip(buckets.entries, modules[1:], strict=True)
        )
        buckets = replace(buckets, entries=entries, padding=())
    return replace(
        manifest,
        model=first.graph.name,
        source=str(model.path.absolute()) if model.path is not None else model.name,
        seed=model.seed,
        model_sha256=first.graph.source_sha256,
        kernels=_kernels(manifest.kernels, first),
        compile_seconds={**manifest.compile_seconds, "refit": seconds},
        policy=policy_of(first),
        memory=None if memory is None else memory_entry(memory.planned_bytes, arrays, model),
        validation=None,
        buckets=buckets,
    )


def _kernels(entries: tuple[KernelEntry, ...], lowered: LoweredModule) -> tuple[KernelEntry, ...]:
    """Return the kernels with the ONNX nodes of the new graph, whose names may be others."""
    return tuple(
        replace(
            entry,
            onnx_nodes=tuple(dict.fromkeys(n for call in lowered.kernels[entry.function] for n in call.onnx_nodes)),
        )
        for entry in entries
    )


def _write(directory: Path, staging: Path, manifest: Manifest, arrays: dict[str, np.ndarray]) -> Manifest:
    # Copies: the loader takes two names of one file for the same code, with one state.
    for name in manifest.files:
        if name != PARAMS_FILE:
            shutil.copyfile(directory / name, staging / name)
    if arrays:
        write_weights(arrays, staging / PARAMS_FILE)
    return manifest


def _buckets(manifest: Manifest) -> tuple[BucketEntry, ...]:
    return () if manifest.buckets is None else manifest.buckets.entries
