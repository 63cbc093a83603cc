from __future__ import annotations

import itertools
import re

import pytest
import tvm
from tvm import te, tirx, topi
from tvm.ir.instrument import pass_instrument

from relaxtune.schedules.cpu.base import narrow_partitioned
from relaxtune.schedules.fallback import apply_fallback
from tests.schedules.kernel_cases import check, host, matmul_case, packed_matmul_case, prim_func, rows_case

BOUND_CHECK = re.compile(r"if .* < ")


@pytest.mark.parametrize(
    "case",
    [
        rows_case("softmax", 7, 197),
        rows_case("layer_norm", 5, 77),
        rows_case("sum", 5, 197),
        rows_case("max", 5, 197),
        matmul_case(19, 96, 8, epilogue="bias"),
        packed_matmul_case(19, 101, 8, epilogue="gelu"),
        matmul_case(1, 3001, 11, epilogue="bias"),
        matmul_case(19, 37, 8, batch=4 * host().limits.cores, epilogue="bias"),
        matmul_case(12, 53, 8, batch=4 * host().limits.cores, transposed=True),
    ],
    ids=["softmax", "layer_norm", "sum", "max", "rows", "packed", "panels", "batches", "batches-transposed"],
)
def test_kernels_with_a_remainder_are_right_when_narrowed(case):
    scheduled = apply_fallback(case.module, host().target)
    narrowed = narrow_partitioned(scheduled)
    assert not narrowed.same_as(scheduled)
    check(case, narrowed, host().target)


@pytest.mark.parametrize("kind", ["softmax", "layer_norm", "sum"])
def test_vector_loops_run_without_bound_checks_when_narrowed(kind):
    scheduled = apply_fallback(rows_case(kind, 64, 197).module, host().target)
    narrowed = partitioned(narrow_partitioned(scheduled))
    assert unchecked_vector_loops(narrowed) > 0
    assert all(BOUND_CHECK.search(line) for line in lines_under_vectors(partitioned(scheduled)))


def partitioned(module: tvm.IRModule) -> str:
    """Return the module's text right after TVM partitioned its loops."""
    texts: list[str] = []

    @pass_instrument
    class Read:
        def run_after_pass(self, mod, info):
            if "LoopPartition" in str(info.name):
                texts.append(mod.script(show_meta=False))

    with tvm.transform.PassContext(opt_level=3, instruments=[Read()]):
        tirx.build(module, target=host().target)
    return texts[0]


def lines_under_vectors(script: str) -> list[str]:
    lines = script.splitlines()
    return [after for line, after in itertools.pairwise(lines) if "T.vectorized(" in line]


def unchecked_vector_loops(script: str) -> int:
    """Return how many vector loops have no bound check right under them."""
    return sum(not BOUND_CHECK.search(line) for line in lines_under_vectors(script))


def test_module_stays_as_it_is_when_no_loop_is_to_be_partitioned():
    scheduled = apply_fallback(rows_case("softmax", 8, 64).module, host().target)
    assert narrow_partitioned(scheduled).same_as(scheduled)


def test_function_keeps_its_indices_when_it_has_64_bit_integers_or_symbolic_shapes():
    a = te.placeholder((5, 197), "float32", name="A")
    func = prim_func([a, topi.cast(topi.exp(a), "int64")])
    assert not is_changed(tvm.IRModule({"main": func.with_attr("global_symbol", "main")}))
    assert not is_changed(rows_case("softmax", 8, 197, symbolic="r").module)


def is_changed(module: tvm.IRModule) -> bool:
    scheduled = apply_fallback(module, host().target)
    return not narrow_partitioned(scheduled).same_as(scheduled)
