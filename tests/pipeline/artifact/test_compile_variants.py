"""Several forms of a model in one module."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import tvm
from tvm import relax

from relaxtune.models import OnnxModel
from relaxtune.models.inputs import random_inputs
from relaxtune.pipeline.artifact.compile import apply_choices, compile_module, entry_of, with_variants
from relaxtune.pipeline.artifact.export import write_artifact
from relaxtune.pipeline.artifact.kernel_choice import KernelChoice
from relaxtune.pipeline.artifact.module import Module
from relaxtune.pipeline.importer import import_model
from relaxtune.pipeline.passes import lower
from relaxtune.pipeline.passes.module import LoweredModule
from relaxtune.schedules.marks import SCHEDULED_ATTR
from relaxtune.schedules.targets import resolve_target
from relaxtune.tuning_db.records import Route

TARGET = resolve_target("llvm")


@pytest.fixture(scope="module")
def lowered(bert_tiny: OnnxModel) -> LoweredModule:
    return lower(import_model(bert_tiny), TARGET.target)


def as_it_is(lowered: LoweredModule, function: str) -> KernelChoice:
    """Return a choice of the loops as they were written, which no fallback schedules any more."""
    scheduled = lowered.mod[function].with_attr(SCHEDULED_ATTR, True)
    return KernelChoice(function, None, Route.FALLBACK, scheduled=scheduled)


def called(mod: tvm.ir.IRModule, entry: str) -> set[str]:
    found: set[str] = set()

    def visit(node: object) -> None:
        if isinstance(node, tvm.ir.GlobalVar):
            found.add(str(node.name_hint))

    relax.analysis.post_order_visit(mod[entry], visit)
    return found


def test_what_does_not_differ_is_shared(lowered: LoweredModule) -> None:
    first, second, *_ = lowered.kernels
    variants = [[as_it_is(lowered, first)], [as_it_is(lowered, first), as_it_is(lowered, second)]]
    mod = with_variants(lowered.mod, variants, lowered.mod)
    main = called(mod, "main")
    assert called(mod, entry_of(0)) ^ main == {first, f"{first}_{entry_of(0)}"}
    # The same kernel in two variants is one.
    assert called(mod, entry_of(1)) ^ main == {first, f"{first}_{entry_of(0)}", second, f"{second}_{entry_of(1)}"}
    assert called(mod, "main") == set(lowered.kernels)
    relax.analysis.well_formed(mod)


def test_a_fallback_beside_a_scheduled_kernel_is_a_kernel_of_its_own(lowered: LoweredModule) -> None:
    first = next(iter(lowered.kernels))
    fallback = KernelChoice(first, None, Route.FALLBACK)
    scheduled = apply_choices(lowered.mod, [as_it_is(lowered, first)])
    mod = with_variants(scheduled, [[fallback]], lowered.mod)
    (other,) = called(mod, entry_of(0)) - called(mod, "main")
    assert SCHEDULED_ATTR in mod[first].attrs
    assert SCHEDULED_ATTR not in (mod[other].attrs or {})


def test_variants_compute_the_same_on_the_same_weights(
    lowered: LoweredModule, bert_tiny: OnnxModel, tmp_path: Path
) -> None:
    matmul = next(name for name in lowered.kernels if "matmul" in name)
    compiled = compile_module(lowered, (), TARGET, variants=[[as_it_is(lowered, matmul)], []])
    write_artifact(compiled, tmp_path / "model")
    module = Module.load(tmp_path / "model")
    inputs = random_inputs(bert_tiny, seed=0)
    expected = module.run(inputs)
    for number in range(2):
        got = module.variant(entry_of(number)).run(inputs)
        for name, array in expected.items():
            np.testing.assert_allclose(got[name], array, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_every_variant_is_one_cuda_graph(bert_tiny: OnnxModel) -> None:
    target = resolve_target("cuda:sm_90a")
    lowered = lower(import_model(bert_tiny), target.target)
    first = next(iter(lowered.kernels))
    compiled = compile_module(lowered, (), target, variants=[[as_bound(lowered, first)], []])
    code = compiled.executable.as_text()
    captures = [line for line in code.splitlines() if "vm.builtin.cuda_graph.run_or_capture in:" in line]
    # A graph is known by its number.
    assert len({line.partition(" dst:")[0].rpartition(", ")[2] for line in captures}) == len(captures) == 3
    for entry in ("main", entry_of(0), entry_of(1)):
        body = code.partition(f"@{entry}:")[2].partition("\n@")[0]
        assert body.count("run_or_capture") == 1
        assert not any(f" {name}" in body for name in lowered.kernels)


def as_bound(lowered: LoweredModule, function: str) -> KernelChoice:
    """Return a choice of the fallback with another attribute, which makes it another kernel."""
    return KernelChoice(function, None, Route.FALLBACK, scheduled=lowered.mod[function].with_attr("variant", 1))


def test_a_function_that_is_not_there_is_refused(lowered: LoweredModule) -> None:
    unknown = dataclasses.replace(as_it_is(lowered, next(iter(lowered.kernels))), function="nobody")
    with pytest.raises(ValueError, match="nobody"):
        with_variants(lowered.mod, [[unknown]], lowered.mod)
