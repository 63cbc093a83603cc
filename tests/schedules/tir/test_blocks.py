from __future__ import annotations

import tvm
from tvm import te

from relaxtune.schedules.errors import Refusal
from relaxtune.schedules.tir.blocks import list_blocks, plain_blocks, written_params
from relaxtune.schedules.tir.contraction import find_contraction, find_operands
from relaxtune.schedules.tir.scheduled_blocks import list_blocks as scheduled_blocks
from tests.schedules.kernel_cases import prim_func


def matmul(rows: object = 4, dtype: str = "float16", rounded: bool = False) -> tvm.tirx.PrimFunc:
    a, b = te.placeholder((rows, 8), dtype, name="a"), te.placeholder((16, 8), dtype, name="b")
    k = te.reduce_axis((0, 8), name="k")

    def element(i: te.Var, j: te.Var) -> tvm.tirx.Expr:
        x, y = a[i, k], b[j, k]
        product = (x * y).astype("float32") if rounded else x.astype("float32") * y.astype("float32")
        return te.sum(product, axis=k)

    product = te.compute((rows, 16), element, name="product")
    return prim_func([a, b, te.compute((rows, 16), lambda i, j: product[i, j] + 1.0, name="added")])


def test_every_reader_sees_the_same_blocks() -> None:
    func = matmul()
    blocks, plain = list_blocks(func), plain_blocks(func)
    scheduled = scheduled_blocks(tvm.s_tir.Schedule(func))
    assert not isinstance(plain, Refusal)
    for found in (blocks, plain, scheduled):
        assert [block.name for block in found] == ["product", "added"]
        assert [block.kinds for block in found] == ["SSR", "SS"]
        assert [block.extents for block in found] == [(4, 16, 8), (4, 16)]
    product, added = blocks
    assert product.reduced_sizes == (8,)
    assert product.is_reduction
    assert added.is_spatial
    assert len(product.stores) == 1  # not the start of the sum
    assert written_params(func) == (2,)


def test_symbolic_sizes_are_read_by_all_but_the_plain_reader() -> None:
    func = matmul(te.var("n", "int64"))
    assert [block.extents for block in list_blocks(func)] == [(None, 16, 8), (None, 16)]
    assert plain_blocks(func) == Refusal("a parameter is no tensor of static shape")


def test_a_product_that_is_rounded_is_a_contraction_but_no_matmul_of_its_operands() -> None:
    whole, rounded = list_blocks(matmul())[0], list_blocks(matmul(rounded=True))[0]
    assert find_operands(whole.store) is not None
    assert find_operands(rounded.store) is None
    for block in (whole, rounded):
        found = find_contraction(block)
        assert found is not None
        assert (found.m, found.n, found.k, found.trans_a, found.trans_b) == (4, 16, 8, False, True)
