"""What reads a computed size comes after the size; what all batch rows read alike is read once on a CPU."""

from __future__ import annotations

import pytest
import tvm
from tvm import relax, tirx

from relaxtune.models.zoo.presets import get_preset
from relaxtune.pipeline.passes.fuse_operations import define_sizes_first
from relaxtune.pipeline.passes.kit.ir import bindings_of, main_of, with_main
from relaxtune.pipeline.prepare import ModelRequest, prepare_model


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


@pytest.mark.parametrize(("target", "apart"), [("cuda:sm_90a", False), ("llvm", True)])
def test_a_bias_of_positions_is_read_from_its_table_once_for_all_batch_rows_on_a_cpu(target: str, apart: bool) -> None:
    shapes = {spec.name: ("batch", "sequence") for spec in get_preset("t5-tiny").inputs}
    lowered = prepare_model(ModelRequest("t5-tiny", shapes, target)).lowered
    (reading,) = [name for name in lowered.kernels if "table" in name]
    assert ("add" in reading) != apart
