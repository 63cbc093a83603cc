"""Weights in files beside the model: read where they are right, refused where they are not."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from relaxtune.models import load_model
from relaxtune.models.errors import ExternalDataError
from tests.models.test_loading_errors import FLOAT, graph_model, tensor, write


def external_model(tmp_path: Path, location: str, *, offset: str | None = "0", length: str | None = "64") -> Path:
    outside = TensorProto(name="w", data_type=FLOAT, dims=[4, 4], data_location=TensorProto.EXTERNAL)
    for key, value in (("location", location), ("offset", offset), ("length", length)):
        if value is not None:
            outside.external_data.add(key=key, value=value)
    folder = tmp_path / "model"
    folder.mkdir()
    return write(folder, graph_model([helper.make_node("MatMul", ["x", "w"], ["y"])], weights=[outside]))


def test_external_data_is_read_and_hashed_like_inline_data(tmp_path: Path) -> None:
    path = external_model(tmp_path, "w.bin")
    (path.parent / "w.bin").write_bytes(np.arange(16, dtype=np.float32).tobytes())
    model = load_model(path)
    np.testing.assert_array_equal(model.array("w"), np.arange(16, dtype=np.float32).reshape(4, 4))
    inline = graph_model(
        [helper.make_node("MatMul", ["x", "w"], ["y"])],
        weights=[numpy_helper.from_array(np.arange(16, dtype=np.float32).reshape(4, 4), "w")],
    )
    assert model.sha256 == load_model(write(tmp_path, inline)).sha256
    (path.parent / "w.bin").write_bytes(np.ones(16, dtype=np.float32).tobytes())
    assert load_model(path).sha256 != model.sha256


def test_external_data_in_a_subfolder_at_an_offset_is_read(tmp_path: Path) -> None:
    path = external_model(tmp_path, "weights/w.bin", offset="8")
    (path.parent / "weights").mkdir()
    (path.parent / "weights" / "w.bin").write_bytes(bytes(8) + np.full(16, 3, np.float32).tobytes() + bytes(8))
    assert (load_model(path).array("w") == 3).all()


@pytest.mark.parametrize(
    ("location", "offset", "length", "file_bytes", "message"),
    [
        ("w.bin", "0", "64", None, r"tensor 'w' is missing: .*w\.bin .*copy the file beside the model"),
        ("w.bin", "0", "64", 60, r"is truncated: FLOAT \[4, 4\] takes 64 bytes from offset 0, the file has 60 there"),
        ("w.bin", "40", "64", 64, "is truncated: .* from offset 40, the file has 24 there"),
        ("w.bin", "400", "64", 64, "from offset 400, the file has 0 there"),
        ("w.bin", "0", "60", 64, r"says it is 60 bytes, but FLOAT \[4, 4\] takes 64"),
        ("w.bin", "0", "128", 128, r"says it is 128 bytes, but FLOAT \[4, 4\] takes 64"),
        ("w.bin", None, None, 72, "is larger than the tensor: .* takes 64 bytes, the file has 72"),
        ("w.bin", "-8", "64", 64, "has the offset '-8'; expected a number"),
        ("w.bin", "0", "lots", 64, "has the length 'lots'; expected a number"),
        (
            "/etc/hostname",
            "0",
            "64",
            None,
            "has the absolute path '/etc/hostname'; external data must lie in the model",
        ),
        ("C:\\weights\\w.bin", "0", "64", None, "has the absolute path"),
        ("../w.bin", "0", "64", None, r"escapes the model's folder with '\.\./w\.bin'"),
        ("a/../../w.bin", "0", "64", None, "escapes the model's folder with"),
        ("..\\w.bin", "0", "64", None, "escapes the model's folder with"),
        ("", "0", "64", None, "has no location"),
        (".", "0", "64", None, "is not a regular file"),
    ],
)
def test_bad_external_data_is_refused(
    tmp_path: Path, location: str, offset: str | None, length: str | None, file_bytes: int | None, message: str
) -> None:
    path = external_model(tmp_path, location, offset=offset, length=length)
    (tmp_path / "w.bin").write_bytes(bytes(64))
    if file_bytes is not None:
        (path.parent / location).write_bytes(bytes(file_bytes))
    with pytest.raises(ExternalDataError, match=message):
        load_model(path)


@pytest.mark.parametrize("kind", ["file", "folder"])
def test_link_out_of_the_folder_is_refused(tmp_path: Path, kind: str) -> None:
    path = external_model(tmp_path, "w.bin" if kind == "file" else "inner/w.bin")
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "w.bin").write_bytes(bytes(64))
    if kind == "file":
        (path.parent / "w.bin").symlink_to(outside / "w.bin")
    else:
        (path.parent / "inner").symlink_to(outside)
    with pytest.raises(
        ExternalDataError, match=r"escapes the model's folder: .* is a link to .*copy the file itself \(cp -L"
    ):
        load_model(path)


def test_links_of_the_cache_of_a_hub_are_followed(tmp_path: Path) -> None:
    snapshot = tmp_path / "models--org--name" / "snapshots" / "0a1b2c" / "onnx"
    snapshot.mkdir(parents=True)
    blobs = tmp_path / "models--org--name" / "blobs"
    blobs.mkdir()
    external_model(tmp_path, "model.onnx_data").rename(blobs / "c3d4")
    (blobs / "e5f6").write_bytes(np.ones(16, dtype=np.float32).tobytes())
    (snapshot / "model.onnx").symlink_to(Path("../../../blobs/c3d4"))
    (snapshot / "model.onnx_data").symlink_to(Path("../../../blobs/e5f6"))
    assert (load_model(snapshot / "model.onnx").array("w") == 1).all()
    (tmp_path / "elsewhere").write_bytes(bytes(64))
    (snapshot / "model.onnx_data").unlink()
    (snapshot / "model.onnx_data").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ExternalDataError, match="escapes the model's folder"):
        load_model(snapshot / "model.onnx")


def test_link_inside_the_folder_is_followed(tmp_path: Path) -> None:
    path = external_model(tmp_path, "w.bin")
    (path.parent / "real.bin").write_bytes(bytes(64))
    (path.parent / "w.bin").symlink_to("real.bin")
    assert (load_model(path).array("w") == 0).all()


def test_link_loop_is_refused(tmp_path: Path) -> None:
    path = external_model(tmp_path, "w.bin")
    (path.parent / "w.bin").symlink_to("w.bin")
    with pytest.raises(ExternalDataError, match="is missing"):
        load_model(path)


def test_negative_external_dims_are_refused(tmp_path: Path) -> None:
    path = external_model(tmp_path, "w.bin")
    model = onnx.ModelProto.FromString(path.read_bytes())
    model.graph.initializer[0].dims[0] = -4
    path.write_bytes(model.SerializeToString())
    with pytest.raises(ExternalDataError, match=r"tensor 'w' has dtype FLOAT and dims \[-4, 4\]"):
        load_model(path)


def test_external_data_of_attributes_and_subgraphs_is_checked(tmp_path: Path) -> None:
    value = TensorProto(name="c", data_type=FLOAT, dims=[4], data_location=TensorProto.EXTERNAL)
    value.external_data.add(key="location", value="../c.bin")
    constant = helper.make_node("Constant", [], ["t"], name="constant")
    constant.attribute.add(name="value", type=onnx.AttributeProto.TENSOR).t.CopyFrom(value)
    branch = helper.make_graph([constant], "branch", [], [tensor("t", [4])])
    node = helper.make_node("If", ["c"], ["y"], then_branch=branch, else_branch=branch)
    model = graph_model([node], inputs=[tensor("c", [], TensorProto.BOOL)], outputs=[tensor("y", [4])])
    with pytest.raises(ExternalDataError, match="tensor 'c' escapes"):
        load_model(write(tmp_path, model))
    for branch_attribute in model.graph.node[0].attribute:
        branch_attribute.g.node[0].attribute[0].t.external_data[0].value = "c.bin"
    (tmp_path / "c.bin").write_bytes(np.full(4, 2, np.float32).tobytes())
    loaded = load_model(write(tmp_path, model))
    inner = loaded.proto.graph.node[0].attribute[0].g.node[0].attribute[0].t
    assert (numpy_helper.to_array(inner) == 2).all()


@pytest.mark.parametrize("length", ["64", None])
def test_a_pointer_of_git_lfs_is_no_weights(tmp_path: Path, length: str | None) -> None:
    path = external_model(tmp_path, "w.bin", length=length)
    pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:0123\nsize 64\n"
    (path.parent / "w.bin").write_text(pointer)
    with pytest.raises(ExternalDataError, match=r"w\.bin is a Git LFS pointer, not the weights; .*git lfs pull"):
        load_model(path)
