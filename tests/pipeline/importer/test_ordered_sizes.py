"""Kernels of equal operations are equal, however TVM orders the sizes that they take."""

from __future__ import annotations

from functools import reduce
from operator import add

import pytest
from tvm import relax, tirx

from relaxtune.pipeline.passes import lower
from relaxtune.pipeline.passes.kit.ir import bindings_of, called_function, main_of
from tests.pipeline.passes.pass_cases import LLVM, graph_of


# TVM orders sizes by the addresses of variables.
@pytest.mark.parametrize("names", ["abcdefgh", "hgfedcba"])
def test_a_lowered_kernel_takes_sizes_in_the_order_of_their_names(names) -> None:
    sizes = {name: tirx.Var(name, "int64") for name in names}
    inputs = {f"input_{name}": ([size], "float32") for name, size in sizes.items()}
    joined = {"joined": ([4, reduce(add, sizes.values())], "float32")}
    graph = graph_of(lambda builder, *tensors: relax.op.permute_dims(tensors[-1]), {**inputs, **joined})
    mod = lower(graph, LLVM).mod
    (call,) = (one.value for one in bindings_of(main_of(mod)) if called_function(one.value) is not None)
    assert [str(one) for one in call.args[1].fields[1:]] == sorted(names)
    assert [str(one.name) for one in mod[call.args[0]].params[1:-1]] == sorted(names)
