"""Float8 in integer arithmetic: code that a GPU's compiler takes (its results: the tests of the converters)."""

from __future__ import annotations

import tvm
from tvm import te

from relaxtune.pipeline.codegen.cuda_compiler import cuda_compiler
from relaxtune.schedules.fallback import apply_fallback
from relaxtune.schedules.functions.float8 import float8_of, number_of
from relaxtune.schedules.targets import resolve_target
from relaxtune.schedules.templates.lowering import register_mixed_pipeline


def test_both_directions_compile_for_a_gpu() -> None:
    target = resolve_target("cuda:sm_90a")
    x = te.placeholder((64, 256), "float32", name="x")
    eights = te.compute(x.shape, lambda *at: float8_of(x(*at)), name="eights")
    numbers = te.compute(x.shape, lambda *at: number_of(eights(*at)), name="numbers")
    for result in (eights, numbers):
        func = te.create_prim_func([x, result]).with_attr("global_symbol", "main")
        with cuda_compiler(target.arch), target.target:
            mod = apply_fallback(tvm.IRModule({"main": func}), target.target)
            built = tvm.tirx.build(mod, target=target.target, pipeline=register_mixed_pipeline())
        assert built.imports
