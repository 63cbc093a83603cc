from __future__ import annotations

import pytest
import tvm
from tvm import relax, tirx
from tvm.tirx.compilation_pipeline import PIPELINE_MAP

from relaxtune.pipeline.passes import plan_memory_passes
from relaxtune.schedules.fallback import apply_fallback
from relaxtune.schedules.targets import ResolvedTarget, resolve_target
from relaxtune.schedules.templates.gemm_sm90.plan import GemmParameters
from relaxtune.schedules.templates.gemm_sm90.template import GemmSm90
from relaxtune.schedules.templates.lowering import (
    MIXED_PIPELINE,
    has_kernels,
    register_mixed_pipeline,
    tir_pipeline_for,
)
from tests.schedules.templates.cubin import captured_cubins
from tests.schedules.templates.matmul_cases import MatmulCase

CASE = MatmulCase((128,), 256, 128, ("bias",))


@pytest.fixture(scope="module")
def target() -> ResolvedTarget:
    return resolve_target("cuda:sm_90a")


def two_kernels(kernel: tirx.PrimFunc) -> tvm.IRModule:
    """Return a Relax module that calls the matmul kernel, and then an unscheduled function."""
    builder = relax.BlockBuilder()
    params = [relax.Var(p.name, relax.TensorType([int(s) for s in p.ty.shape], p.ty.dtype)) for p in kernel.params[:-1]]
    with builder.function("main", params):
        name = builder.add_func(kernel, "matmul")
        product = builder.emit(relax.call_tir(name, params, relax.TensorType((128, 256), "float16")))
        builder.emit_func_output(builder.emit_te(tvm.topi.exp, product))
    return builder.get()


@pytest.fixture(scope="module")
def mixed(target: ResolvedTarget) -> tvm.IRModule:
    kernel = GemmSm90().apply(CASE.func(), target, GemmParameters(64, 64, 4, 1, split_k=2, dependent=True))
    module = apply_fallback(two_kernels(kernel), target.target)
    with target.target:
        return tvm.transform.Sequential(plan_memory_passes(target.target, False))(module)


def test_module_with_both_kinds_builds_into_one_executable(mixed: tvm.IRModule, target: ResolvedTarget) -> None:
    pipeline = tir_pipeline_for(mixed)
    assert pipeline == MIXED_PIPELINE
    with captured_cubins("sm_90a") as cubins, target.target:
        executable = relax.build(mixed, target.target, relax_pipeline=None, tir_pipeline=pipeline)
    assert isinstance(executable, relax.VMExecutable)
    (cubin,) = cubins
    assert b"matmul_kernel" in cubin
    assert b"exp_kernel" in cubin


def test_kernel_is_launched_as_a_cluster_and_before_the_end_of_the_one_before(
    mixed: tvm.IRModule, target: ResolvedTarget
) -> None:
    functions = {name: func for name, func in mixed.functions.items() if isinstance(func, tirx.PrimFunc)}
    register_mixed_pipeline()
    lower, _, _ = PIPELINE_MAP[MIXED_PIPELINE]()
    lowered = lower(tvm.tirx.transform.BindTarget(target.target)(tvm.IRModule(functions)))
    launches = {
        str(name.name_hint): set(func.attrs["tirx.kernel_launch_params"])
        for name, func in lowered.functions.items()
        if "kernel_launch_params" in str(func.attrs) and str(name.name_hint).endswith("_kernel")
    }
    assert launches["matmul_kernel"] >= {"clusterCtaIdx.x", "tirx.use_programtic_dependent_launch"}
    assert launches["exp_kernel"] <= {"blockIdx.x", "threadIdx.x"}


def test_module_without_kernels_keeps_the_default_pipeline(target: ResolvedTarget) -> None:
    module = apply_fallback(tvm.IRModule({"main": CASE.func()}), target.target)
    assert not has_kernels(module)
    assert tir_pipeline_for(module) == "default"


def test_registering_twice_keeps_the_pipeline() -> None:
    register_mixed_pipeline()
    first = PIPELINE_MAP[MIXED_PIPELINE]
    assert register_mixed_pipeline() == MIXED_PIPELINE
    assert PIPELINE_MAP[MIXED_PIPELINE] is first
