from __future__ import annotations

import threading
from dataclasses import replace

import numpy as np
import pytest
import tvm
from tvm import relax, tirx
from tvm.ir.instrument import pass_instrument
from tvm.script.ir_builder import IRBuilder
from tvm.tirx.compilation_pipeline import PIPELINE_MAP
from tvm.tirx.script import builder as T

from relaxtune.pipeline.passes import plan_memory_passes
from relaxtune.schedules.fallback import apply_fallback
from relaxtune.schedules.marks import SCHEDULED_ATTR
from relaxtune.schedules.registry import TEMPLATES
from relaxtune.schedules.targets import ResolvedTarget, resolve_target
from relaxtune.schedules.templates import lowering
from relaxtune.schedules.templates.gemm_sm90.plan import GemmParameters
from relaxtune.schedules.templates.gemm_sm90.template import GemmSm90
from relaxtune.schedules.templates.launch_table import join_table, split_table
from relaxtune.schedules.templates.lowering import (
    MIXED_PIPELINE,
    has_kernels,
    register_mixed_pipeline,
    tir_pipeline_for,
)
from relaxtune.schedules.templates.ranges import RangesParameters, SizeRange
from tests.schedules.templates.cubin import captured_cubins
from tests.schedules.templates.matmul_cases import MatmulCase
from tests.unoptimised import UNOPTIMISED

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


def table(target: ResolvedTarget) -> tirx.PrimFunc:
    rows = replace(CASE, rows=(tirx.Var("rows", "int64"),)).func()
    decisions = (GemmParameters(64, 64, 4, 1, dependent=True), GemmParameters(64, 32, 4, 1, dependent=True))
    ranges = (SizeRange(most, one.to_json()) for most, one in zip((64, 4096), decisions, strict=True))
    made = TEMPLATES["ranges"].apply(rows, target, RangesParameters(tuple(ranges)))
    assert isinstance(made, tirx.PrimFunc)
    return made


def lowered_apart_and_together(target: ResolvedTarget) -> tuple[tvm.IRModule, tvm.IRModule, list[str], list[str]]:
    """Return a table lowered by the mixed pipeline and by TVM's, and the passes of both."""
    ran: dict[str, list[str]] = {MIXED_PIPELINE: [], "tirx": []}

    @tvm.instrument.pass_instrument
    class Names:
        def __init__(self, names: list[str]) -> None:
            self.names = names

        def run_before_pass(self, _mod: tvm.IRModule, info: tvm.transform.PassInfo) -> None:
            self.names.append(str(info.name))

    register_mixed_pipeline()
    mod = tvm.tirx.transform.BindTarget(target.target)(
        tvm.IRModule({"matmul": table(target).with_attr("global_symbol", "matmul")})
    )
    found = []
    for name, names in ran.items():
        with tvm.transform.PassContext(opt_level=3, instruments=[Names(names)]), target.target:
            found.append(PIPELINE_MAP[name]()[0](mod))
    return found[0], found[1], ran[MIXED_PIPELINE], ran["tirx"]


def test_kernels_of_a_table_are_lowered_apart_to_what_tvm_makes_of_them(target: ResolvedTarget) -> None:
    apart, together, own_passes, passes = lowered_apart_and_together(target)
    assert {var.name_hint for var in apart.functions} == {var.name_hint for var in together.functions}
    own, *kernels = (apart[name].script() for name in ("matmul", "matmul_kernel", "matmul_kernel_1"))
    assert all(f'"matmul_kernel{suffix}"' in own for suffix in ("", "_1"))
    assert len(set(kernels)) == 2
    # All passes of TVM's pipeline but the one that this one leaves out.
    outer = {"_pipeline", "LowerEachKind", "sequential"}
    assert set(own_passes) - outer == set(passes) - outer - {"tirx.AnnotateEntryFunc"}


def test_kernels_of_a_table_are_lowered_side_by_side(target: ResolvedTarget, monkeypatch: pytest.MonkeyPatch) -> None:
    threads: dict[str, set[threading.Thread]] = {"tirx.LowerTIRx": set(), "tirx.LowerWarpMemory": set()}

    @pass_instrument
    class Watch:
        def run_before_pass(self, _mod: tvm.IRModule, info: tvm.transform.PassInfo) -> None:
            threads.get(str(info.name), set()).add(threading.current_thread())

    monkeypatch.setattr(lowering, "usable_cpus", lambda: [0, 1])
    mod = tvm.tirx.transform.BindTarget(target.target)(tvm.IRModule({"matmul": table(target)}))
    lower, _, finish_kernels = PIPELINE_MAP[register_mixed_pipeline()]()
    with tvm.transform.PassContext(instruments=[Watch()]):
        lowered = lower(mod)
        kernels = tvm.IRModule({var: func for var, func in lowered.functions_items() if var.name_hint != "matmul"})
        finished = finish_kernels()(kernels)
    for name, ran in threads.items():
        assert ran, name
        assert threading.main_thread() not in ran, name
    # As TVM makes all of them at once.
    tvm.ir.assert_structural_equal(finished, PIPELINE_MAP["s_tir"]()[2]()(kernels))


def test_table_that_is_split_and_joined_launches_the_same_kernels(target: ResolvedTarget) -> None:
    made = table(target)
    parts = split_table(made)
    assert len(parts.kernels) == 2
    tvm.ir.assert_structural_equal(join_table(parts.choice, parts.kernels), made)


def doubled() -> tirx.PrimFunc:
    """Return a scheduled function without blocks: its buffer has the size that it needs."""
    with IRBuilder() as builder, T.prim_func(s_tir=True):
        T.func_name("main")
        given, made = (T.arg(name, T.Buffer([8], "float32")) for name in ("given", "made"))
        with T.parallel(0, 8) as place:
            kept = T.alloc_buffer([1], "float32", scope="global")
            T.buffer_store(kept, given[place] + given[place], [0])
            T.buffer_store(made, kept[0], [place])
    return builder.get().with_attr(SCHEDULED_ATTR, True)


def test_buffers_of_functions_without_blocks_keep_their_sizes() -> None:
    given, made = (tvm.te.placeholder((8,), name="given"), lambda x: tvm.te.compute((8,), lambda i: x[i] + 1.0))
    blocks = tvm.te.create_prim_func([given, made(given)]).with_attr(SCHEDULED_ATTR, True)
    module = tvm.IRModule(
        {name: func.with_attr("global_symbol", name) for name, func in (("one", blocks), ("two", doubled()))}
    )
    compacted: list[str] = []

    @pass_instrument
    class Watch:
        def run_before_pass(self, mod: tvm.IRModule, info: tvm.transform.PassInfo) -> None:
            if info.name == "s_tir.CompactBufferAllocation":
                compacted.extend(name.name_hint for name in mod.functions)

    with tvm.transform.PassContext(instruments=[Watch()]):
        library = tvm.compile(module, UNOPTIMISED, tir_pipeline=tir_pipeline_for(module))
    assert compacted == ["one"]
    numbers = np.arange(8, dtype="float32")
    for name, want in (("one", numbers + 1), ("two", numbers * 2)):
        out = tvm.runtime.tensor(np.zeros(8, "float32"))
        library[name](tvm.runtime.tensor(numbers), out)
        np.testing.assert_array_equal(out.numpy(), want)
