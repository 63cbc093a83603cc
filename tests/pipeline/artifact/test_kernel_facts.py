"""What the manifest says of each kernel's work, and of the memory that the module takes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from relaxtune.models import load_model
from relaxtune.models.inputs import random_inputs
from relaxtune.pipeline.artifact.compile import CompiledModule, compile_module
from relaxtune.pipeline.artifact.directory import load_manifest
from relaxtune.pipeline.artifact.entries import KernelEntry, WorkEntry
from relaxtune.pipeline.artifact.export import build_manifest, write_artifact
from relaxtune.pipeline.artifact.manifest import parse_manifest
from relaxtune.pipeline.artifact.module import Module
from relaxtune.pipeline.codegen.planned_memory import planned_bytes
from relaxtune.pipeline.errors import PipelineError
from relaxtune.pipeline.importer import import_model
from relaxtune.pipeline.passes import LoweringOptions, lower
from relaxtune.schedules.targets import ResolvedTarget
from tests.pipeline.importer.onnx_cases import run_reference


def work_of(kernels: tuple[KernelEntry, ...], family: str) -> list[WorkEntry]:
    return [kernel.work for kernel in kernels if kernel.work is not None and kernel.work.family == family]


def test_a_matmul_has_its_flops_and_every_buffer_once(artifact: Path) -> None:
    matmuls = work_of(load_manifest(artifact).kernels, "matmul")
    # BERT-tiny's widening matmul: (32, 128) x (128, 512), bias, gelu.
    wide = next(work for work in matmuls if any(one.shape == (1, 32, 512) for one in work.arguments))
    assert 2 * 32 * 128 * 512 <= wide.flops < 1.2 * 2 * 32 * 128 * 512
    assert wide.bytes == 4 * sum(int(np.prod(one.shape)) for one in wide.arguments)


def test_a_gather_counts_what_it_takes_from_its_table_and_says_the_tables_size(artifact: Path) -> None:
    words = next(
        work
        for work in work_of(load_manifest(artifact).kernels, "gather")
        if any(one.shape == (1024, 128) for one in work.arguments)
    )
    assert words.bytes < 4 * 1024 * 128
    assert {one.limit for one in words.arguments} == {None, 1024}


def test_work_and_memory_survive_the_manifests_json(compiled: CompiledModule) -> None:
    manifest = build_manifest(compiled, 0.0)
    assert parse_manifest(manifest.to_json(), "here") == manifest
    assert manifest.memory is not None
    assert manifest.memory.weights_bytes == sum(array.nbytes for array in compiled.lowered.weights.values())
    # At least the two outputs; at most as much as if no storage were shared.
    assert 4 * (32 * 128 + 128) <= (manifest.memory.planned_bytes or 0) < 4 * 32 * 128 * 100


@pytest.mark.slow
def test_symbolic_shapes_have_no_work_and_no_plan(quick_target: ResolvedTarget) -> None:
    model = load_model("bert-tiny", shapes={"input_ids": (1, "sequence")})
    compiled = compile_module(lower(import_model(model), quick_target.target), (), quick_target)
    assert compiled.planned_bytes is None
    manifest = build_manifest(compiled, 0.0)
    assert manifest.memory is not None
    assert manifest.memory.planned_bytes is None
    assert all(kernel.work is None for kernel in manifest.kernels if "matmul" in kernel.function)


def test_a_module_without_storage_plans_nothing(compiled: CompiledModule) -> None:
    assert planned_bytes(compiled.lowered.mod) == 0


@pytest.mark.slow
def test_memory_of_symbolic_sizes_is_planned_for_the_largest(quick_target: ResolvedTarget, tmp_path: Path) -> None:
    model = load_model("bert-tiny", shapes={"input_ids": (1, "sequence")})
    options = LoweringOptions(maxima={"sequence": 64})
    compiled = compile_module(lower(import_model(model), quick_target.target, options), (), quick_target)
    assert compiled.planned_bytes is not None
    half = lower(import_model(model), quick_target.target, LoweringOptions(maxima={"sequence": 32}))
    fewer = compile_module(half, (), quick_target)
    largest = load_model("bert-tiny", shapes={"input_ids": (1, 64)})
    known = compile_module(lower(import_model(largest), quick_target.target), (), quick_target)
    # Attention of symbolic lengths needs no copies of queries and values; with known sizes it has some.
    assert (fewer.planned_bytes or 0) < compiled.planned_bytes < 3 * (known.planned_bytes or 0)
    write_artifact(compiled, tmp_path / "artifact")
    module = Module.load(tmp_path / "artifact")
    for length in (1, 33, 64):
        feeds = random_inputs(model, seed=0, dims={"sequence": length})
        for found, right in zip(module.run(feeds).values(), run_reference(model, feeds), strict=True):
            np.testing.assert_allclose(found, right, rtol=1e-3, atol=1e-4)
    with pytest.raises(PipelineError, match=r"axis .sequence. has size 65 .* has 64 at most"):
        module.run(random_inputs(model, seed=0, dims={"sequence": 65}))
