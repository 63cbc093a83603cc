"""Relations between symbolic axes, read from the graph; ONNX Runtime runs on the sizes that keep them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper, numpy_helper

from relaxtune.models import OnnxModel, axis_sizes, get_preset, load_model, random_inputs
from relaxtune.models.errors import ModelShapeError

FLOAT, INT64, INT32 = TensorProto.FLOAT, TensorProto.INT64, TensorProto.INT32


def run(model: OnnxModel, dims: dict[str, int]) -> list[np.ndarray]:
    options = ort.SessionOptions()
    options.log_severity_level = 4
    return list(ort.InferenceSession(model.serialize(), options).run(None, random_inputs(model, seed=0, dims=dims)))


def with_own_names(zoo: str, folder: Path) -> Path:
    """Save a zoo model whose input axes have a name each, as exporters write them."""
    model = load_model(zoo, shapes={spec.name: spec.shape for spec in get_preset(zoo).inputs})
    proto = onnx.ModelProto()
    proto.CopyFrom(model.proto)
    del proto.graph.value_info[:]
    for value in (*proto.graph.input, *proto.graph.output):
        for axis, dim in enumerate(value.type.tensor_type.shape.dim):
            if dim.dim_param:
                dim.dim_param = f"{value.name}_{axis}".replace(".", "_")
    onnx.save(proto, folder / "decoder.onnx")
    return folder / "decoder.onnx"


def save(
    folder: Path,
    nodes: list[onnx.NodeProto],
    inputs: dict[str, tuple[int, list[int | str]]],
    *,
    rank: int = 2,
    **constants: np.ndarray,
) -> Path:
    graph = helper.make_graph(
        nodes,
        "case",
        [helper.make_tensor_value_info(name, *spec) for name, spec in inputs.items()],
        [helper.make_tensor_value_info("y", FLOAT, ["y0", "y1", "y2"][:rank])],
        [numpy_helper.from_array(array, name) for name, array in constants.items()],
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9), folder / "case.onnx")
    return folder / "case.onnx"


@pytest.mark.parametrize("zoo", ["gpt2-tiny-decode", "llama-tiny-decode"])
def test_decoder_with_a_name_for_every_axis_gets_one_name_for_each_size(zoo: str, tmp_path: Path) -> None:
    model = load_model(with_own_names(zoo, tmp_path))
    shapes = {spec.name: spec.shape for spec in model.inputs}
    caches = {shape for name, shape in shapes.items() if name.startswith("past")}
    assert len(caches) == 1
    (batch, _, past, _) = next(iter(caches))
    assert shapes["attention_mask"] == (batch, f"{past} + 1")
    assert shapes["input_ids"][0] == batch
    dims = axis_sizes(model)
    assert set(dims) == {batch, past}
    assert all(np.isfinite(output).all() for output in run(model, dims))


def test_mask_indexed_up_to_a_sum_has_that_length(tmp_path: Path) -> None:
    """transformers indexes the flattened mask by row and key, up to the keys in the cache and the new ones."""
    node = helper.make_node
    nodes = [
        node("Shape", ["ids"], ["new"], start=1), node("Shape", ["past"], ["old"], start=1),
        node("Add", ["new", "old"], ["total"]), node("Squeeze", ["total"], ["limit"]),
        node("Range", ["zero", "limit", "one"], ["keys"]),
        node("Shape", ["ids"], ["rows"], end=1), node("Squeeze", ["rows"], ["row_count"]),
        node("Range", ["zero", "row_count", "one"], ["batch"]), node("Unsqueeze", ["batch", "last"], ["column"]),
        node("Shape", ["mask"], ["width"], start=1), node("Mul", ["column", "width"], ["begin"]),
        node("Add", ["begin", "keys"], ["places"]), node("Reshape", ["mask", "flat"], ["row"]),
        node("Gather", ["row", "places"], ["seen"]),
        node("Cast", ["seen"], ["y"], to=FLOAT),
    ]  # fmt: skip
    path = save(
        tmp_path,
        nodes,
        {"ids": (INT64, ["b", "s"]), "past": (FLOAT, ["b", "p"]), "mask": (INT64, ["rows", "columns"])},
        zero=np.array(0), one=np.array(1), last=np.array([1]), flat=np.array([-1]),
    )  # fmt: skip
    model = load_model(path)
    assert model.inputs[2].shape == ("b", "p + s")
    assert run(model, axis_sizes(model))[0].shape == (2, 32)
    assert "columns (mask[1]) = p + s" in map(str, model.relations)


def test_a_table_whose_name_an_exporter_counted_is_named_by_what_reads_it(tmp_path: Path) -> None:
    model = load_model("bert-tiny", shapes={"input_ids": ("batch", "sequence")})
    nodes = [helper.make_node("Shape", ["x"], ["size"]), helper.make_node("Gather", ["size", "zero"], ["n"]),
             helper.make_node("Range", ["zero", "n", "one"], ["places"]),
             helper.make_node("Gather", ["constant_4", "places"], ["y"], name="embed")]  # fmt: skip
    path = save(tmp_path, nodes, {"x": (FLOAT, ["n"])}, zero=np.array(0), one=np.array(1),
                constant_4=np.ones((20, 4), "float32"))  # fmt: skip
    assert [str(relation) for relation in load_model(path).relations] == ["n (x[0]) <= 20, by table of Gather 'embed'"]
    assert [relation.table for relation in model.relations] == ["table of Slice '/embeddings/Slice'"]


def test_table_bounds_a_sum_of_lengths(tmp_path: Path) -> None:
    nodes = [
        helper.make_node("Concat", ["old", "new"], ["both"], axis=0),
        helper.make_node("Shape", ["both"], ["count"]),
        helper.make_node("Squeeze", ["count"], ["limit"]),
        helper.make_node("Range", ["zero", "limit", "one"], ["places"]),
        helper.make_node("Gather", ["table", "places"], ["y"]),
    ]
    inputs: dict[str, tuple[int, list[int | str]]] = {"old": (FLOAT, ["p"]), "new": (FLOAT, ["s"])}
    path = save(tmp_path, nodes, inputs, zero=np.array(0), one=np.array(1), table=np.ones((20, 4), "float32"))
    model = load_model(path)
    assert [str(relation) for relation in model.relations] == ["p + s <= 20, by table 'table'"]
    dims = axis_sizes(model)
    assert dims["p"] + dims["s"] <= 20
    assert axis_sizes(model, {"p": 14})["s"] <= 6
    run(model, dims)


def test_bound_of_a_branch_says_that_a_branch_asks_for_it(tmp_path: Path) -> None:
    node = helper.make_node
    then = [
        node("Shape", ["x"], ["count"]),
        node("Slice", ["table", "zero", "count", "zero"], ["rows"]),
        node("Add", ["x", "rows"], ["then"]),
    ]
    branches = {
        f"{name}_branch": helper.make_graph(nodes, name, [], [helper.make_tensor_value_info(name, FLOAT, None)])
        for name, nodes in (("then", then), ("else", [node("Neg", ["x"], ["else"])]))
    }
    path = save(tmp_path, [node("If", ["c"], ["y"], name="choice", **branches)],
                {"x": (FLOAT, ["n"]), "c": (TensorProto.BOOL, [])},
                rank=1, zero=np.array([0]), table=np.ones(8, "float32"))  # fmt: skip
    (relation,) = load_model(path).relations
    assert str(relation) == "n (x[0]) <= 8, by table 'table' in a branch of If 'choice'"
    assert relation.problem({"n": 9}) == "axis 'n' has size 9, table 'table' in a branch of If 'choice' takes 8 at most"


def test_sizes_are_small_and_keep_what_is_given() -> None:
    assert axis_sizes(load_model("bert-tiny")) == {}
    shapes = {spec.name: ("batch", "sequence") for spec in get_preset("bert-tiny").inputs}
    model = load_model("bert-tiny", shapes=shapes)
    assert axis_sizes(model) == {"batch": 2, "sequence": 16}
    assert axis_sizes(model, {"sequence": 5}) == {"batch": 2, "sequence": 5}


def test_axes_without_relation_keep_their_names(tmp_path: Path) -> None:
    nodes = [helper.make_node("MatMul", ["x", "w"], ["y"])]
    model = load_model(save(tmp_path, nodes, {"x": (FLOAT, ["a", "b", 4])}, w=np.ones((4, 3), "float32"), rank=3))
    assert (model.inputs[0].shape, model.relations) == (("a", "b", 4), ())


def group_query(folder: Path, lengths: str) -> OnnxModel:
    """Load a decoder step whose lengths are two inputs, one from which the other follows, or those of a mask."""
    ints: dict[str, tuple[int, list[int | str]]] = {"counts": (INT32, ["b"]), "total": (INT32, [])}
    before, names = [], ["counts", "total"]
    if lengths == "one less, in 64 bits":
        ints = {"lengths": (INT64, ["b"]), "keys": (INT64, [1])}
        before = [helper.make_node("Sub", ["lengths", "one"], ["less"])]
        before += [helper.make_node("Cast", [a], [b], to=INT32) for a, b in (("less", "counts"), ("keys", "total"))]
    elif lengths == "the largest":
        ints = {"counts": (INT32, ["b"])}
        before = [
            helper.make_node("ReduceMax", ["counts"], ["most"], keepdims=0),
            helper.make_node("Add", ["most", "small"], ["total"]),
        ]
    elif lengths == "mask":
        ints = {"mask": (INT64, ["b", "m"])}
        before = [
            helper.make_node("ReduceSum", ["mask", "one"], ["lengths"], keepdims=0),
            helper.make_node("Sub", ["lengths", "one"], ["less"]),
            helper.make_node("Shape", ["mask"], ["sizes"]),
            helper.make_node("Gather", ["sizes", "one"], ["keys"]),
            *(helper.make_node("Cast", [a], [b], to=INT32) for a, b in (("less", "counts"), ("keys", "total"))),
        ]
    node = helper.make_node(
        "GroupQueryAttention",
        ["q", "", "", "k", "v", *names],
        ["y"],
        domain="com.microsoft",
        num_heads=2,
        kv_num_heads=1,
    )
    cache: tuple[int, list[int | str]] = (FLOAT, ["b", 1, "p", 8])
    inputs: dict[str, tuple[int, list[int | str]]] = {"q": (FLOAT, ["b", "s", 32]), "k": cache, "v": cache, **ints}
    path = save(folder, [*before, node], inputs, rank=3, one=np.array([1]), small=np.array(1, "int32"))
    proto = onnx.load(path)
    proto.opset_import.append(helper.make_opsetid("com.microsoft", 1))
    onnx.save(proto, path)
    return load_model(path)


@pytest.mark.parametrize("lengths", ["inputs", "one less, in 64 bits", "the largest", "mask"])
def test_lengths_of_a_decoder_step_are_those_of_its_cache_and_its_tokens(tmp_path: Path, lengths: str) -> None:
    model = group_query(tmp_path, lengths)
    dims = axis_sizes(model)
    assert dims["b"] == 1
    feeds = random_inputs(model, seed=0, dims=dims)
    total = dims["p"] + dims["s"]
    expected = {"counts": total - 1, "total": total, "lengths": total, "keys": total}
    drawn = {name: int(feeds[name].max()) for name in expected if name in feeds}
    assert drawn == {name: expected[name] for name in drawn}
    if lengths == "mask":
        assert [str(relation) for relation in model.relations] == ["m (mask[1]) = p + s"]
    run(model, dims)


@pytest.mark.parametrize(("end", "bound"), [(1, []), (3, ["n = min(3, m)"])])
def test_first_rows_of_an_axis_are_as_many_only_as_it_has(tmp_path: Path, end: int, bound: list[str]) -> None:
    nodes = [
        helper.make_node("Slice", ["x", "zero", "end", "zero"], ["first"]),
        helper.make_node("Add", ["y0", "first"], ["y"]),
    ]
    inputs: dict[str, tuple[int, list[int | str]]] = {"x": (FLOAT, ["m", 4]), "y0": (FLOAT, ["n", 4])}
    model = load_model(save(tmp_path, nodes, inputs, zero=np.array([0]), end=np.array([end])))
    assert [f"{one.axis} {one.sign} {one.size}" for one in model.relations] == bound
    run(model, axis_sizes(model))


def test_axis_has_as_many_places_as_top_k_takes(tmp_path: Path) -> None:
    node = helper.make_node("TopK", ["x", "many"], ["y", "places"], axis=0)
    model = load_model(save(tmp_path, [node], {"x": (FLOAT, ["n", 4])}, many=np.array([20])))
    assert [f"{one.axis} {one.sign} {one.size}" for one in model.relations] == ["n >= 20"]
    assert axis_sizes(model) == {"n": 20}


def test_table_bounds_a_multiple_of_an_axis(tmp_path: Path) -> None:
    nodes = [
        helper.make_node("Pad", ["x", "pads"], ["wider"]),
        helper.make_node("Concat", ["x", "x", "wider"], ["both"], axis=0),
        helper.make_node("Shape", ["both"], ["count"]),
        helper.make_node("Squeeze", ["count"], ["limit"]),
        helper.make_node("Range", ["zero", "limit", "one"], ["places"]),
        helper.make_node("Gather", ["table", "places"], ["y"]),
    ]
    table = np.ones((15, 4), "float32")
    path = save(tmp_path, nodes, {"x": (FLOAT, ["n"])}, zero=np.array(0), one=np.array(1), table=table,
                pads=np.array([1, 2]))  # fmt: skip
    model = load_model(path)
    assert [f"{one.axis} {one.sign} {one.size}" for one in model.relations] == ["3 * n <= 12"]
    assert axis_sizes(model)["n"] == 4
    run(model, axis_sizes(model))
    assert model.relations[0].problem({"n": 5}) is not None


def of_table(*, joined: bool) -> list[onnx.NodeProto]:
    """Return nodes that cut a table to the places of every second column, and add it to those where `joined`."""
    node = helper.make_node
    return [
        node("Slice", ["x", "zero", "most", "one", "two"], ["half"]),
        node("Shape", ["half"], ["length"], start=1),
        node("Slice", ["table", "zero", "length", "zero"], ["rows"]),
        node("Transpose", ["half"], ["columns"]),
        node("Add", ["columns", "rows"], ["y"]) if joined else node("Neg", ["rows"], ["y"]),
    ]


@pytest.mark.parametrize(
    ("joined", "found"), [(True, ["((n + 1) // 2) <= 8, by table 'table'"]), (False, [])]
)  # fmt: skip
def test_table_cut_at_a_quotient_bounds_what_it_is_added_to(tmp_path: Path, joined: bool, found: list[str]) -> None:
    path = save(tmp_path, of_table(joined=joined), {"x": (FLOAT, [1, "n"])}, table=np.ones((8, 1), "float32"),
                zero=np.array([0]), one=np.array([1]), two=np.array([2]), most=np.array([2**63 - 1]))  # fmt: skip
    model = load_model(path)
    assert [str(relation) for relation in model.relations] == found
    assert axis_sizes(model) == {"n": 16}
    assert axis_sizes(model, {"n": 40}) == {"n": 40}
    run(model, axis_sizes(model))


def test_sizes_without_a_solution_are_searched(tmp_path: Path) -> None:
    nodes = [
        helper.make_node("Tile", ["x", "two"], ["double"]),
        helper.make_node("Tile", ["z", "three"], ["triple"]),
        helper.make_node("Add", ["double", "triple"], ["y"]),
    ]
    inputs: dict[str, tuple[int, list[int | str]]] = {"x": (FLOAT, ["n", 4]), "z": (FLOAT, ["m", 4])}
    model = load_model(save(tmp_path, nodes, inputs, two=np.array([2, 1]), three=np.array([3, 1])))
    assert sorted(map(str, model.relations)) == ["2 * n >= 3 * m, by the graph", "3 * m >= 2 * n, by the graph"]
    dims = axis_sizes(model)
    assert 2 * dims["n"] == 3 * dims["m"]
    run(model, dims)


def pooled(folder: Path, strides: int) -> OnnxModel:
    """Pool an axis, and squeeze what is left of it."""
    nodes = [
        helper.make_node("MaxPool", ["x"], ["h"], kernel_shape=[strides], strides=[strides]),
        helper.make_node("Squeeze", ["h", "two"], ["y"]),
    ]
    path = folder / "pooled.onnx"
    graph = helper.make_graph(
        nodes,
        "pooled",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 3, "length"])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", 3])],
        [numpy_helper.from_array(np.array([2]), "two")],
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9), path)
    return load_model(path)


def test_sizes_with_one_place_after_a_pooling_are_between_two_numbers(tmp_path: Path) -> None:
    model = pooled(tmp_path, 5)
    assert [(one.axis, one.sign, one.size) for one in model.relations] == [
        ("length", ">=", "5"), ("length", "<=", "9")
    ]  # fmt: skip
    assert axis_sizes(model) == {"n": 2, "length": 8}
    with pytest.raises(ModelShapeError, match="axis 'length' has size 10, the graph takes 9 at most"):
        load_model(model.path, shapes={"length": (10,)})


def test_padding_that_pytorch_computes_from_constants_is_known(tmp_path: Path) -> None:
    nodes = [
        helper.make_node("Concat", ["pads", "none"], ["long"], axis=0),
        helper.make_node("Reshape", ["long", "pairs"], ["table"]),
        helper.make_node("Transpose", ["table"], ["turned"], perm=[1, 0]),
        helper.make_node("Reshape", ["turned", "flat"], ["amounts"]),
        helper.make_node("Cast", ["amounts"], ["whole"], to=TensorProto.INT64),
        helper.make_node("Pad", ["x", "whole"], ["y"], mode="reflect"),
    ]
    constants = {"pads": np.array([3, 5]), "none": np.array([0, 0]), "pairs": np.array([2, 2]), "flat": np.array([-1])}
    graph = helper.make_graph(
        nodes,
        "padded",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["length", "n"])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["l", "n"])],
        [numpy_helper.from_array(array, name) for name, array in constants.items()],
    )
    path = tmp_path / "padded.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9), path)
    assert [str(one) for one in load_model(path).relations] == ["length (x[0]) >= 6, by Pad 'y'"]


def test_random_inputs_run_the_first_branch_and_have_its_sizes(tmp_path: Path) -> None:
    """A rate of samples decides; how many PyTorch reads at once is in the branches."""

    def branch(name: str, size: int) -> onnx.GraphProto:
        nodes = [
            helper.make_node("MaxPool", ["x"], [f"h{size}"], kernel_shape=[size], strides=[size]),
            helper.make_node("Squeeze", [f"h{size}", "two"], [name]),
        ]
        return helper.make_graph(nodes, name, [], [helper.make_tensor_value_info(name, TensorProto.FLOAT, None)])

    graph = helper.make_graph(
        [
            helper.make_node("Equal", ["rate", "wide"], ["is_wide"]),
            helper.make_node("If", ["is_wide"], ["y"], then_branch=branch("a", 40), else_branch=branch("b", 20)),
        ],
        "rates",
        [
            helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 3, "length"]),
            helper.make_tensor_value_info("rate", TensorProto.INT64, []),
        ],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", 3])],
        [numpy_helper.from_array(np.array([2]), "two"), numpy_helper.from_array(np.array(16000), "wide")],
    )
    path = tmp_path / "rates.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9), path)
    model = load_model(path)
    assert model.relations == ()
    assert axis_sizes(model) == {"n": 2, "length": 40}
