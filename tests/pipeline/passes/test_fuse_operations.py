"""What reads a computed size comes after the size; what all batch rows read alike is read once on a CPU."""

from __future__ import annotations

import numpy as np
import pytest
import tvm
from onnx import helper
from tvm import relax, tirx

from relaxtune.models.zoo.presets import get_preset
from relaxtune.pipeline.importer import import_model
from relaxtune.pipeline.passes import lower
from relaxtune.pipeline.passes.fuse_operations import define_sizes_first
from relaxtune.pipeline.passes.kit.ir import bindings_of, main_of, with_main
from relaxtune.pipeline.prepare import ModelRequest, prepare_model
from relaxtune.schedules.targets import resolve_target
from tests.pipeline.importer.onnx_cases import make_model


def test_size_is_defined_before_what_reads_it() -> None:
    """FuseOps ordered the experts of gpt-oss by their tensors alone; code generation knew no `rows` then."""
    builder, rows = relax.BlockBuilder(), tirx.Var("rows", "int64")
    count = relax.Var("count", relax.TensorType([1], "int64"))
    with builder.function("main", [count]):
        with builder.dataflow():
            shape = builder.emit(relax.op.tensor_to_shape(count))
            size = builder.match_cast(shape, relax.ShapeType([rows]))
            places = builder.emit(relax.op.arange(0, rows, 1, "int64"))
            result = builder.emit_output(relax.op.negative(places))
        builder.emit_func_output(result)
    mod = builder.get()
    main = main_of(mod)
    first, cast, *reads = bindings_of(main)
    assert cast.var.same_as(size)
    blocks = [relax.DataflowBlock([*reads, first, cast]), *main.body.blocks[1:]]
    body = relax.SeqExpr(blocks, main.body.body)
    wrong = tvm.IRModule({"main": relax.Function(main.params, body, main.ret_ty, main.is_pure, main.attrs)})
    made = define_sizes_first(with_main(wrong, wrong["main"]))
    assert [binding.var.name for binding in bindings_of(main_of(made))] == [
        binding.var.name for binding in (first, cast, *reads)
    ]


@pytest.mark.quick_cases("llvm-True")
@pytest.mark.parametrize(("target", "apart"), [("cuda:sm_90a", False), ("llvm", True)])
def test_a_bias_of_positions_is_read_from_its_table_once_for_all_batch_rows_on_a_cpu(target: str, apart: bool) -> None:
    shapes = {spec.name: ("batch", "sequence") for spec in get_preset("t5-tiny").inputs}
    lowered = prepare_model(ModelRequest("t5-tiny", shapes, target)).lowered
    (reading,) = [name for name in lowered.kernels if "table" in name]
    assert ("add" in reading) != apart


@pytest.mark.parametrize("target", ["llvm", "cuda:sm_90a"])
@pytest.mark.parametrize(
    ("operator", "numbers", "rows"), [("Pad", {"pads": [0, 0, 40, 0]}, 48), ("Slice", {"start": [0], "end": [5]}, 5)]
)
def test_matmul_does_not_take_in_a_reader_of_another_size(
    target: str, operator: str, numbers: dict[str, list[int]], rows: int
) -> None:
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["product"]),
        helper.make_node("Relu", ["product"], ["positive"]),
        helper.make_node(operator, ["positive", *numbers], ["y"]),
    ]
    constants = {name: np.array(value) for name, value in numbers.items()} | {"w": np.ones((32, 24), "float32")}
    model = make_model(nodes, {"x": ("float32", (8, 32))}, {"y": ("float32", (rows, 24))}, constants)
    lowered = lower(import_model(model), resolve_target(target).target)
    kernels = [name for name, func in lowered.mod.functions_items() if isinstance(func, tvm.tirx.PrimFunc)]
    assert len(kernels) == 2
