"""The search space of matmuls on tensor cores, by its machine code; results need a GPU (`test_tensor_tile_gpu.py`)."""

from __future__ import annotations

import struct

import pytest
import tvm
from tvm import te, tirx
from tvm.s_tir import Schedule, meta_schedule as ms
from tvm.s_tir.schedule import Trace

from relaxtune.pipeline.codegen.finish import device_toolchain, finish_kernels
from relaxtune.pipeline.codegen.mma_fragments import HEADER, with_fragments
from relaxtune.pipeline.tuning.measure.launch_memory import DynamicSharedMemory
from relaxtune.schedules.marks import TF32_ATTR
from relaxtune.schedules.search.space import QuietTuneContext, list_designs, make_space
from relaxtune.schedules.search.tensor_tile import form_of, takes_tensor_tiles, tensor_tile_designs
from relaxtune.schedules.targets import CudaLimits, resolve_target
from relaxtune.schedules.templates.lowering import MIXED_PIPELINE, tir_pipeline_for
from relaxtune.schedules.tir.signature import describe_kernel
from tests.schedules.templates.cubin import LOCAL_LOAD, LOCAL_STORE, MMA_SYNC, captured_cubins, kernel_code

# Low 12 bits of instructions, as nvdisasm 13.0 prints them for sm_80 and sm_90: ldmatrix and cp.async.
LDSM = 0x83B
LDGSTS = 0xFAE


def matmul(
    m: int, k: int, n: int, dtype: str = "float16", *, epilogue: bool = True, turned: bool = False, tf32: bool = False
) -> tvm.IRModule:
    """Return C = A @ B (+ bias), B stored [k, n] or, turned, [n, k]."""
    a, b = te.placeholder((1, m, k), dtype, name="A"), te.placeholder((n, k) if turned else (k, n), dtype, name="B")
    bias = te.placeholder((n,), "float32", name="bias")
    r = te.reduce_axis((0, k), name="r")

    def product(i: tirx.Var, j: tirx.Var, c: tirx.Var) -> tirx.Expr:
        left, right = a[i, j, r], b[c, r] if turned else b[r, c]
        wide = left * right if dtype == "float32" else left.astype("float32") * right.astype("float32")
        return te.sum(wide, axis=r)

    sums = te.compute((1, m, n), product, name="C")
    tensors = [a, b, sums]
    if epilogue:
        tensors = [a, b, bias, te.compute((1, m, n), lambda i, j, c: (sums[i, j, c] + bias[c]).astype(dtype), name="D")]
    func = te.create_prim_func(tensors)
    return tvm.IRModule({"main": func.with_attr(TF32_ATTR, True) if tf32 else func})


def drawn(mod: tvm.IRModule, target: tvm.target.Target, count: int) -> list[Schedule]:
    """Return schedules with freshly drawn decisions, of all designs by turns; each must be accepted."""
    designs = tensor_tile_designs(mod["main"], target)
    space = make_space(target, mod)
    QuietTuneContext(mod, target, space)
    found = []
    for seed in range(1, count + 1):
        schedule = Schedule(mod, seed=seed)
        with target:
            trace = Trace(designs[seed % len(designs)].trace.insts, {})
            trace.apply_to_schedule(schedule, remove_postproc=True)
        schedule.enter_postproc()
        assert all(rule.apply(schedule) for rule in space.postprocs)
        found.append(schedule)
    return found


def compiled(schedule: Schedule, target: tvm.target.Target) -> tvm.runtime.Executable:
    """Return a schedule compiled as a candidate is; to be called where CUDA compiles."""
    finished = finish_kernels(schedule.mod, target)
    assert tir_pipeline_for(finished) == MIXED_PIPELINE
    with target:
        return tvm.compile(finished, target, tir_pipeline=tir_pipeline_for(finished))


@pytest.mark.parametrize(
    ("mod", "arch"),
    [
        (matmul(64, 96, 128), "sm_80"),
        (matmul(197, 96, 200, "bfloat16"), "sm_89"),
        (matmul(64, 96, 128, turned=True), "sm_90"),
        (matmul(64, 96, 128, "float32", tf32=True), "sm_80"),
        (matmul(77, 132, 330, "float32", tf32=True, turned=True), "sm_90a"),
    ],
    ids=["float16", "odd bfloat16", "turned", "tf32", "odd tf32, turned"],
)
def test_kernels_copy_asynchronously_multiply_on_tensor_cores_and_spill_nothing(mod: tvm.IRModule, arch: str) -> None:
    target = resolve_target(f"cuda:{arch}").target
    schedule = drawn(mod, target, 2)[-1]
    with captured_cubins(arch) as cubins:
        compiled(schedule, target)
    code = list(struct.iter_unpack("<QQ", kernel_code(cubins[0])))
    codes = [low & 0xFFF for low, _ in code]
    assert codes.count(MMA_SYNC) >= 2
    assert codes.count(LDSM) >= 1
    assert codes.count(LDGSTS) >= 2
    assert codes.count(LOCAL_LOAD) == codes.count(LOCAL_STORE) == 0


@pytest.mark.slow
def test_what_takes_the_most_shared_memory_keeps_to_the_limit_of_its_target() -> None:
    resolved = resolve_target("cuda:sm_89")
    assert isinstance(resolved.limits, CudaLimits)
    mod = matmul(2048, 512, 2048)
    for design in tensor_tile_designs(mod["main"], resolved.target):
        schedule = Schedule(mod)
        last = {step: len(step.attrs[0]) - 1 for step in design.trace.decisions}
        Trace(design.trace.insts, last).apply_to_schedule(schedule, remove_postproc=True)
        dynamic = DynamicSharedMemory()
        with device_toolchain(resolved.target), tvm.transform.PassContext(opt_level=3, instruments=[dynamic]):
            compiled(schedule, resolved.target)
        assert 48 * 1024 < dynamic.bytes <= resolved.limits.shared_bytes_optin


@pytest.mark.parametrize("epilogue", [True, False])
@pytest.mark.parametrize("shape", [(128, 256, 256), (197, 100, 203), (1, 7, 17)], ids=str)
def test_every_candidate_is_accepted_and_can_be_recorded(epilogue: bool, shape: tuple[int, int, int]) -> None:
    target = resolve_target("cuda:sm_80").target
    mod = matmul(*shape, epilogue=epilogue)
    for schedule in drawn(mod, target, 6):
        again = Schedule(mod)
        Trace.apply_json_to_schedule(schedule.trace.as_json(), again)
        tvm.ir.assert_structural_equal(again.mod, schedule.mod)


def test_a_search_proposes_candidates() -> None:
    target, mod = resolve_target("cuda:sm_80").target, matmul(197, 768, 768)
    strategy = ms.search_strategy.EvolutionarySearch(
        population_size=8, init_measured_ratio=0.0, init_min_unmeasured=4, genetic_num_iters=1, max_fail_count=2
    )
    context = QuietTuneContext(mod, target, make_space(target, mod), strategy, seed=1)
    context.pre_tuning(
        max_trials=4,
        num_trials_per_iter=4,
        design_spaces=tensor_tile_designs(mod["main"], target),
        database=ms.database.MemoryDatabase(),
        cost_model=ms.cost_model.RandomModel(),
    )
    found = context.generate_measure_candidates()
    context.post_tuning()
    assert len(found) == 4


@pytest.mark.parametrize(
    ("mod", "arch"),
    [
        (matmul(64, 64, 64, "float32"), "sm_80"),
        (matmul(64, 64, 64), "sm_75"),
        (matmul(64, 64, 64), "sm_90a"),
    ],
    ids=["float32", "before Ampere", "Hopper's own instructions"],
)
def test_others_are_left_to_ordinary_lanes(mod: tvm.IRModule, arch: str) -> None:
    target = resolve_target(f"cuda:{arch}").target
    assert not takes_tensor_tiles(mod["main"], target)
    assert tensor_tile_designs(mod["main"], target) == []
    assert list_designs(mod, target)


def test_hopper_gets_tensor_tiles_where_its_template_does_not_fit() -> None:
    target = resolve_target("cuda:sm_90a").target
    assert takes_tensor_tiles(matmul(64, 64, 203)["main"], target)
    assert takes_tensor_tiles(matmul(64, 64, 64, "float32", tf32=True)["main"], target)


def test_tf32_is_another_task_than_float32() -> None:
    plain, marked = (matmul(64, 64, 64, "float32", tf32=tf32)["main"] for tf32 in (False, True))
    assert describe_kernel(plain).signature != describe_kernel(marked).signature


def test_a_trace_says_what_it_took_for_granted_of_its_function() -> None:
    target = resolve_target("cuda:sm_80").target

    def forms(mod: tvm.IRModule) -> set[str | None]:
        return {form_of(design.mod["main"]) for design in tensor_tile_designs(mod["main"], target)}

    assert forms(matmul(64, 768, 768)) == forms(matmul(128, 1536, 768))
    assert not forms(matmul(64, 768, 768)) & forms(matmul(64, 764, 768))
    assert not forms(matmul(64, 768, 768)) & forms(matmul(64, 64, 768))
    assert form_of(matmul(64, 64, 64)["main"]) is None


def test_nvcc_gets_the_same_fragments() -> None:
    source = f"#include <cuda_fp16.h>\n#include <{HEADER}>\n"
    assert HEADER not in with_fragments(source)
    assert "mma.sync.aligned" in with_fragments(source)
