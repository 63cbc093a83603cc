"""From a compiled module to an artifact directory."""

from __future__ import annotations

import hashlib
import platform
import shutil
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path

import numpy as np
import onnx
import safetensors
import safetensors.numpy
import tvm
import tvm_ffi

from relaxtune import __version__
from relaxtune.models.axes.relations import limits_of
from relaxtune.models.axes.windows import least_sizes
from relaxtune.models.buckets import Bucket, list_symbols
from relaxtune.models.files import companion_files
from relaxtune.models.inputs import describe_inputs, fill_values, index_limits, list_masks
from relaxtune.models.onnx_model import OnnxModel
from relaxtune.pipeline.artifact.compile import CompiledModule
from relaxtune.pipeline.artifact.directory import write_directory
from relaxtune.pipeline.artifact.entries import (
    BucketEntry,
    BucketsEntry,
    KernelEntry,
    MemoryEntry,
    PassEntry,
    TargetEntry,
)
from relaxtune.pipeline.artifact.kernel_choice import KernelChoice, kernel_work
from relaxtune.pipeline.artifact.manifest import ENCODER_FOLDER, MODULE_FILE, PARAMS_FILE, Manifest
from relaxtune.pipeline.artifact.recipe import recipe_of
from relaxtune.pipeline.codegen.cuda_compiler import compiler_release
from relaxtune.pipeline.codegen.cuda_libraries import CUDART, DRIVER
from relaxtune.pipeline.codegen.library_objects import compile_library_objects, list_library_sources
from relaxtune.pipeline.errors import LoweringError
from relaxtune.pipeline.passes.graph_decisions import decision_notes
from relaxtune.pipeline.passes.module import LoweredModule
from relaxtune.pipeline.precision.graph_dtypes import compute_dtype
from relaxtune.pipeline.precision.policy import PolicyEntry, policy_entry
from relaxtune.pipeline.temporary import temporary_folder
from relaxtune.pipeline.workers.linking import linker_in
from relaxtune.schedules.libraries.vendors import libraries_of
from relaxtune.schedules.targets.resolve import vector_features


@dataclass(frozen=True)
class CompiledBucket:
    """A model compiled for one shape bucket."""

    bucket: Bucket
    compiled: CompiledModule


def write_artifact(
    compiled: CompiledModule,
    destination: Path,
    buckets: Sequence[CompiledBucket] = (),
    beside: tuple[CompiledModule, Path] | None = None,
    encoder: Path | None = None,
) -> Manifest:
    """Write a compiled module as an artifact directory, whole or not at all; return its manifest.

    `compiled`, `destination`: what is written, and where.
    `buckets`: the same model compiled for other shapes: each adds a shared object, and what weights it has of its own.
    `beside`: another form of the model, and its artifact. If the weights are the same, their file gets a second name.
    `encoder`: the artifact of a decoder's encoder, which moves into this one.
    Raises `ArtifactError`: the destination cannot be written, or exists and is no artifact; `LoweringError`: the C++
    compiler that links `model.so` is missing or failed.
    """

    def write_files(directory: Path) -> Manifest:
        path = compiled.lowered.graph.model.path
        for file in [] if path is None else companion_files(path):
            shutil.copyfile(file, directory / file.name)
        link_seconds = _link(compiled, directory / MODULE_FILE)
        weights = {name: np.asarray(array, order="C") for name, array in compiled.lowered.weights.items()}
        named = [share_weights(weights, one.compiled.lowered.weights, one.bucket.name) for one in buckets]
        for number, one in enumerate(buckets):
            link_seconds += _link(one.compiled, directory / _bucket_file(number))
        others = beside[0].lowered.weights if beside is not None and not buckets else {}
        mine = compiled.lowered.weights
        if beside and mine and mine.keys() == others.keys() and all(mine[name] is others[name] for name in mine):
            source, file = beside[1] / PARAMS_FILE, directory / PARAMS_FILE
            try:
                file.hardlink_to(source)
            except OSError:  # a file system without second names
                shutil.copyfile(source, file)
        elif weights:
            write_weights(weights, directory / PARAMS_FILE)
        manifest = build_manifest(compiled, link_seconds)
        if encoder is not None:
            encoder.rename(directory / ENCODER_FOLDER)
        if not buckets:
            return manifest
        entries = tuple(_bucket_entry(n, one, names) for n, (one, names) in enumerate(zip(buckets, named, strict=True)))
        rules = describe_inputs(compiled.lowered.graph.model)
        memory = memory_entry(compiled.planned_bytes, weights, compiled.lowered.graph.model)
        found = BucketsEntry(entries, fill_values(rules), masks=list_masks(rules))
        return replace(manifest, memory=memory, buckets=found)

    return write_directory(destination, write_files, None if beside is None else beside[1])


def share_weights(stored: dict[str, np.ndarray], added: Mapping[str, np.ndarray], prefix: str) -> tuple[str, ...]:
    """Add the weights of another shape to those stored, equal ones once; return the name of each there.

    Shapes of one model hold the same weights, packed the same unless a pass decided by the shape.
    """
    names = []
    for name, array in added.items():
        same = stored.get(name)
        if same is None or not _equal(same, array):
            same_name = next((other for other, kept in stored.items() if _equal(kept, array)), None)
            name = same_name or f"{prefix}/{name}"
            stored.setdefault(name, np.asarray(array, order="C"))
        names.append(name)
    return tuple(names)


def _equal(a: np.ndarray, b: np.ndarray) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == np.ascontiguousarray(b).tobytes()


def _bucket_file(number: int) -> str:
    return f"bucket-{number}.so"


def _bucket_entry(number: int, one: CompiledBucket, weights: tuple[str, ...]) -> BucketEntry:
    compiled = one.compiled
    graph = compiled.lowered.graph
    return BucketEntry(
        sizes=dict(one.bucket.sizes),
        file=_bucket_file(number),
        inputs=graph.inputs,
        outputs=graph.outputs,
        weights=weights,
        kernels=tuple(_kernel_entry(compiled, choice) for choice in compiled.choices),
        cuda_graph=compiled.cuda_graph,
        planned_bytes=compiled.planned_bytes,
        recipe=recipe_of(compiled.lowered),
    )


def write_weights(weights: Mapping[str, np.ndarray], path: Path) -> None:
    """Write the weights beside the code; a full disk is an OSError, as for every other file, and not the library's."""
    try:
        safetensors.numpy.save_file(dict(weights), path)
    except safetensors.SafetensorError as e:
        raise OSError(f"{path.name}: {e}") from e
    # safetensors makes private files.
    path.chmod((path.parent / MODULE_FILE).stat().st_mode & 0o666)


def memory_entry(planned_bytes: int | None, weights: Mapping[str, np.ndarray], model: OnnxModel) -> MemoryEntry:
    """Return the memory of an artifact whose weights are these, made of a model."""
    of_dtype: Counter[str] = Counter()
    for array in weights.values():
        of_dtype[str(array.dtype)] += array.nbytes
    dtypes = tuple(dtype for dtype, _ in of_dtype.most_common())
    return MemoryEntry(planned_bytes, of_dtype.total(), dtypes, model.weight_bytes)


def build_manifest(compiled: CompiledModule, link_seconds: float) -> Manifest:
    """Return what the artifact of a compiled module says about itself, without the hashes of its files."""
    lowered, target = compiled.lowered, compiled.target
    model, generation = lowered.graph.model, lowered.graph.generation
    host = target.target.host or target.target
    return Manifest(
        model=lowered.graph.name,
        source=str(model.path.absolute()) if model.path is not None else model.name,
        seed=model.seed,
        model_sha256=lowered.graph.source_sha256,
        inputs=lowered.graph.inputs,
        outputs=lowered.graph.outputs,
        target=TargetEntry(
            kind=target.kind,
            arch=target.arch,
            config=str(target.target),
            cpu_features=tuple(sorted(vector_features(host))),
            libraries=(CUDART, DRIVER, *(one.file for one in libraries_of(_library_sources(compiled))))
            if target.kind == "cuda"
            else (),
            cuda_graph=compiled.cuda_graph,
            ptx_cuda=compiler_release() if target.portable else None,
        ),
        precision=lowered.options.precision,
        passes=tuple(
            PassEntry(
                *(r.phase, r.name, r.enabled, r.seconds, r.bindings_removed, r.constants_folded),
                (*r.notes, *decision_notes(lowered.options, r.name)),
                r.failure,
            )
            for r in lowered.reports
        ),
        kernels=tuple(_kernel_entry(compiled, choice) for choice in compiled.choices),
        weights=tuple(lowered.weights),
        versions=versions(),
        compile_seconds={**compiled.seconds, "link": link_seconds},
        policy=policy_of(lowered),
        memory=memory_entry(compiled.planned_bytes, lowered.weights, lowered.graph.model),
        deterministic=compiled.determinism,
        rows_max=lowered.options.rows_max,
        maxima=lowered.options.maxima,
        unpadding=lowered.unpadding,
        recipe=recipe_of(lowered),
        minima=least_sizes(model.proto, list_symbols(lowered.graph.inputs)),
        limits=limits_of(model.relations) if generation is None else (),
        indices=index_limits(model) if generation is None else (),
        generation=generation,
    )


def policy_of(lowered: LoweredModule) -> PolicyEntry:
    """Return what the artifact of a lowered module says about its precision."""
    policy = lowered.options.policy
    return policy_entry(
        policy.of_rows() if policy is not None and lowered.rows_to_bytes else policy,
        lowered.graph.model,
        lowered.weights,
        lowered.quantised_nodes,
        compute_dtype(lowered.graph.model),
        lowered.float_nodes,
        lowered.float_reasons,
        lowered.static,
    )


def versions() -> dict[str, str]:
    """Return the versions that shape an artifact, and the kind of machine that made it."""
    return {
        "relaxtune": __version__,
        "tvm": tvm.__version__,
        "tvm_ffi": tvm_ffi.__version__,
        "onnx": onnx.__version__,
        "python": platform.python_version(),
        "machine": platform.machine(),
    }


def _kernel_entry(compiled: CompiledModule, choice: KernelChoice) -> KernelEntry:
    calls = compiled.lowered.kernels[choice.function]
    decision = choice.decision
    return KernelEntry(
        function=choice.function,
        calls=len(calls),
        onnx_nodes=tuple(dict.fromkeys(node for call in calls for node in call.onnx_nodes)),
        route=choice.route.value,
        record_id=choice.record_id,
        latency_us=choice.latency_us,
        table=decision if choice.of_sizes else None,
        decision_sha256=hashlib.sha256(decision.encode()).hexdigest() if decision is not None else None,
        note=choice.note,
        database=choice.database,
        work=kernel_work(compiled.lowered.mod[choice.function]),
        measured=choice.measured,
        launches=compiled.launches.get(choice.function),
        kernel_hash=compiled.kernel_hashes.get(choice.function),
    )


def _library_sources(compiled: CompiledModule) -> list[Path]:
    every = chain(compiled.choices, *compiled.variants)
    scheduled = [choice.scheduled for choice in every if choice.scheduled is not None]
    return list_library_sources(scheduled, compiled.target.kind)


def _link(compiled: CompiledModule, path: Path) -> float:
    started = time.perf_counter()
    try:
        with temporary_folder() as directory:
            objects = compile_library_objects(_library_sources(compiled), Path(directory))
            # TVM's own folder for the objects would be left by a killed run, and swept by none.
            compiled.executable.export_library(
                str(path),
                fcompile=linker_in(Path(directory)),
                workspace_dir=str(directory),
                addons=[str(made) for made in objects],
            )
    except (RuntimeError, ValueError, FileNotFoundError) as e:
        raise LoweringError(
            f"linking {MODULE_FILE} failed: {e}. It needs a C++ compiler on the path (Debian: apt install g++)"
        ) from e
    return time.perf_counter() - started
