"""Bad input, one test a kind: what the message says, the exit code, and that nothing was written.

Every test goes through `pipeline.cli.app.main`, as a user's command does.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from relaxtune.pipeline.cli.app import main
from tests.unoptimised import UNOPTIMISED_TEXT

ROOT = Path(__file__).parent.parent


def small_model(
    nodes: list[onnx.NodeProto] | None = None,
    *,
    dtype: int = TensorProto.FLOAT,
    shape: tuple[int | str, ...] = (2, 4),
    weight: onnx.TensorProto | None = None,
    opset: int = 18,
) -> onnx.ModelProto:
    weight = weight or numpy_helper.from_array(np.ones((4, 4), np.float32), "w")
    nodes = nodes or [helper.make_node("MatMul", ["x", "w"], ["y"], name="product")]
    graph = helper.make_graph(
        nodes,
        "small",
        [helper.make_tensor_value_info("x", dtype, shape)],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, (2, 4))],
        [weight],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=10)


def write(path: Path, model: onnx.ModelProto) -> Path:
    path.write_bytes(model.SerializeToString())
    return path


def external_weight(location: str) -> onnx.TensorProto:
    weight = TensorProto(name="w", data_type=TensorProto.FLOAT, dims=[4, 4], data_location=TensorProto.EXTERNAL)
    for key, value in (("location", location), ("offset", "0"), ("length", "64")):
        entry = weight.external_data.add()
        entry.key, entry.value = key, value
    return weight


def truncated(folder: Path) -> Path:
    path = write(folder / "truncated.onnx", small_model())
    path.write_bytes(path.read_bytes()[:-40])
    return path


def not_onnx(folder: Path) -> Path:
    path = folder / "picture.onnx"
    path.write_bytes(b"\x89PNG\r\n\x1a\n" + bytes(range(256)))
    return path


def unknown_operator(folder: Path) -> Path:
    return write(folder / "model.onnx", small_model([helper.make_node("Frobnicate", ["x", "w"], ["y"], name="odd")]))


def missing_external(folder: Path) -> Path:
    return write(folder / "model.onnx", small_model(weight=external_weight("weights.bin")))


def escaping_external(folder: Path) -> Path:
    (folder / "secret.bin").write_bytes(bytes(64))
    inner = folder / "inner"
    inner.mkdir()
    return write(inner / "model.onnx", small_model(weight=external_weight("../secret.bin")))


def cycle(folder: Path) -> Path:
    nodes = [
        helper.make_node("Add", ["x", "b"], ["a"], name="first"),
        helper.make_node("Add", ["a", "x"], ["b"], name="second"),
        helper.make_node("MatMul", ["b", "w"], ["y"], name="product"),
    ]
    return write(folder / "model.onnx", small_model(nodes))


def wrong_dtype(folder: Path) -> Path:
    return write(folder / "model.onnx", small_model(dtype=TensorProto.INT64))


def opset_too_new(folder: Path) -> Path:
    return write(folder / "model.onnx", small_model(opset=999))


def zero_dimension(folder: Path) -> Path:
    return write(folder / "model.onnx", small_model(shape=(0, 4)))


def string_tensor(folder: Path) -> Path:
    nodes = [
        helper.make_node("StringNormalizer", ["x"], ["s"], name="lower"),
        helper.make_node("Identity", ["w"], ["y"], name="copy"),
    ]
    return write(folder / "model.onnx", small_model(nodes, dtype=TensorProto.STRING, shape=(4,)))


def empty_file(folder: Path) -> Path:
    path = folder / "empty.onnx"
    path.touch()
    return path


BAD_MODELS = {
    "truncated file": (truncated, ["truncated.onnx"]),
    "not ONNX": (not_onnx, ["picture.onnx", "ONNX"]),
    "empty file": (empty_file, ["empty.onnx"]),
    "unknown operator": (unknown_operator, ["Frobnicate", "odd"]),
    "missing external data": (missing_external, ["weights.bin", "'w'"]),
    "escaping external data": (escaping_external, ["../secret.bin", "'w'"]),
    "cycle": (cycle, ["first"]),
    "wrong dtype": (wrong_dtype, ["product", "float"]),
    "opset too new": (opset_too_new, ["999"]),
    "zero dimension": (zero_dimension, ["'x'", "0"]),
    "string tensor": (string_tensor, ["'x'", "STRING"]),
}


@pytest.mark.parametrize("kind", BAD_MODELS)
@pytest.mark.parametrize("command", ["compile", "tune"])
def test_bad_model_exits_1_and_writes_nothing(relaxtune, tmp_path, kind, command) -> None:
    make, words = BAD_MODELS[kind]
    source, result = tmp_path / "source", tmp_path / "result"
    source.mkdir()
    result.mkdir()
    path = make(source)
    database = ["--db", result / "tuning.db"] if command == "tune" else []
    outcome = relaxtune(command, path, "--target", "llvm", "--out", result / "artifact", *database)
    assert outcome.code == 1, outcome.stderr
    assert outcome.stdout == ""
    for word in words:
        assert word in outcome.stderr
    assert "Traceback" not in outcome.stderr
    # A tuning database that was opened may stay; no artifact, nor any part of one, may.
    assert {item.name.partition("-")[0] for item in result.iterdir()} <= {"tuning.db"}


def test_unknown_zoo_name_lists_close_names(relaxtune, tmp_path) -> None:
    outcome = relaxtune("compile", "bert-tinny", "--target", "llvm", "--out", tmp_path / "artifact")
    assert outcome.code == 1
    assert "bert-tinny" in outcome.stderr
    assert "bert-tiny" in outcome.stderr
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("shape", "words"),
    [
        ("input_ids", ["input_ids", "1x128"]),
        ("input_ids=1xx8", ["input_ids=1xx8"]),
        ("input_ids=1x8,input_ids=1x9", ["twice"]),
    ],
)
def test_malformed_shape_override_exits_2(relaxtune, tmp_path, shape, words) -> None:
    outcome = relaxtune("compile", "bert-tiny", "--target", "llvm", "--shape", shape, "--out", tmp_path / "artifact")
    assert outcome.code == 2
    for word in words:
        assert word in outcome.stderr
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("shape", "words"),
    [("nothing=1x8", ["nothing", "input_ids"]), ("input_ids=1x8x3", ["input_ids", "3 axes", "expected 2"])],
)
def test_shape_override_that_does_not_fit_exits_1(relaxtune, tmp_path, shape, words) -> None:
    outcome = relaxtune("compile", "bert-tiny", "--target", "llvm", "--shape", shape, "--out", tmp_path / "artifact")
    assert outcome.code == 1
    for word in words:
        assert word in outcome.stderr
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("oracle://nowhere/x", ["oracle"]),
        ("sqlite:////proc/no/such/folder/tuning.db", ["/proc/no/such/folder"]),
        ("://", ["://"]),
    ],
)
def test_unreadable_database_url_exits_1_before_any_work(relaxtune, tmp_path, url, words) -> None:
    outcome = relaxtune("tune", "bert-tiny", "--target", "llvm", "--db", url, "--out", tmp_path / "artifact")
    assert outcome.code == 1
    for word in words:
        assert word in outcome.stderr
    assert not list(tmp_path.iterdir())


def test_database_that_is_another_file_is_refused(relaxtune, tmp_path) -> None:
    path = tmp_path / "notes.db"
    path.write_text("not a database" * 100)
    outcome = relaxtune("db", "info", "--db", path)
    assert outcome.code == 1
    assert "notes.db" in outcome.stderr
    assert path.read_text() == "not a database" * 100


def test_unknown_target_exits_1(relaxtune, tmp_path) -> None:
    outcome = relaxtune("compile", "bert-tiny", "--target", "quantum", "--out", tmp_path / "artifact")
    assert outcome.code == 1
    assert "quantum" in outcome.stderr
    assert "llvm" in outcome.stderr


def test_unknown_precision_exits_2(relaxtune, tmp_path) -> None:
    options = ["--target", "llvm", "--precision", "fp13", "--out", tmp_path / "artifact"]
    outcome = relaxtune("compile", "bert-tiny", *options)
    assert outcome.code == 2
    assert "fp13" in outcome.stderr
    assert "fp16" in outcome.stderr
    assert not list(tmp_path.iterdir())


def test_unknown_route_exits_2(relaxtune, tmp_path) -> None:
    outcome = relaxtune("compile", "bert-tiny", "--target", "llvm", "--routes", "magic", "--out", tmp_path / "artifact")
    assert outcome.code == 2
    assert "magic is no route" in outcome.stderr
    assert "template" in outcome.stderr


def test_unknown_option_exits_2(relaxtune) -> None:
    assert relaxtune("compile", "bert-tiny", "--no-such-option").code == 2


def test_unknown_command_exits_2(relaxtune) -> None:
    assert relaxtune("transmogrify").code == 2


def test_folder_that_is_no_artifact_is_never_replaced(relaxtune, tmp_path) -> None:
    precious = tmp_path / "thesis" / "chapter1.tex"
    precious.parent.mkdir()
    precious.write_text("years of work")
    outcome = relaxtune("compile", "bert-tiny", "--target", "llvm", "--out", precious.parent)
    assert outcome.code == 1
    assert "not an artifact" in outcome.stderr
    assert precious.read_text() == "years of work"


def mounted(options: str, folder: Path, script: str) -> subprocess.CompletedProcess[str]:
    """Run a Python script in a mount namespace of its own, with a tmpfs at `folder`: a real full or read-only disk."""
    unshare = ["unshare", "-m"] if os.geteuid() == 0 else ["unshare", "-Urm"]
    command = f'mount -t tmpfs -o {options} none "$1" && exec "$2" -c "$3"'
    return subprocess.run(
        [*unshare, "sh", "-c", command, "sh", str(folder), sys.executable, script],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )


def run_script(arguments: list[str], folder: Path) -> str:
    return (
        "import os, sys\n"
        "from relaxtune.pipeline.cli.app import main\n"
        "code = 0\n"
        "try:\n"
        f"    main({arguments!r})\n"
        "except SystemExit as ended:\n"
        "    code = ended.code\n"
        f"print('left:', sorted(os.listdir({str(folder)!r})))\n"
        "sys.exit(code)\n"
    )


def test_disk_full_exits_1_and_leaves_nothing(tmp_path) -> None:
    out = tmp_path / "artifact"
    arguments = ["compile", "bert-tiny", "--target", UNOPTIMISED_TEXT, "--out", str(out)]
    outcome = mounted("size=512k", tmp_path, run_script(arguments, tmp_path))
    assert outcome.returncode == 1, outcome.stderr
    assert "cannot be written" in outcome.stderr
    assert "No space left" in outcome.stderr
    assert "left: []" in outcome.stdout


@pytest.mark.slow
def test_read_only_folder_exits_1_before_any_work(tmp_path) -> None:
    out = tmp_path / "artifact"
    arguments = ["compile", "bert-tiny", "--target", "llvm", "--out", str(out)]
    outcome = mounted("ro", tmp_path, run_script(arguments, tmp_path))
    assert outcome.returncode == 1, outcome.stderr
    assert "Read-only file system" in outcome.stderr
    assert "lower:" not in outcome.stderr
    assert "left: []" in outcome.stdout


def test_database_on_full_disk_exits_1(tmp_path) -> None:
    arguments = ["db", "init", "--db", str(tmp_path / "tuning.db")]
    outcome = mounted("size=16k", tmp_path, run_script(arguments, tmp_path))
    assert outcome.returncode == 1, outcome.stderr
    assert "full" in outcome.stderr


@pytest.fixture(scope="module")
def artifact(tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("artifact") / "bert-tiny"
    with pytest.raises(SystemExit) as ended:
        main(
            ["compile", "bert-tiny", "--target", UNOPTIMISED_TEXT, "--shape", "input_ids=1x16", "--out", str(directory)]
        )
    assert not ended.value.code
    return directory


@pytest.mark.parametrize("name", ["model.so", "params.safetensors", "manifest.json"])
def test_artifact_with_a_changed_byte_is_refused(relaxtune, artifact, tmp_path, name) -> None:
    # A copy: the original's library may be loaded in this process, and must not change under it.
    copy = tmp_path / "artifact"
    shutil.copytree(artifact, copy)
    content = bytearray((copy / name).read_bytes())
    content[len(content) // 2] ^= 1
    (copy / name).write_bytes(content)
    np.savez(tmp_path / "x.npz", input_ids=np.zeros((1, 16), np.int64))
    outputs = tmp_path / "y.npz"
    outcome = relaxtune("run", copy, "--inputs", tmp_path / "x.npz", "--outputs", outputs)
    assert outcome.code == 1
    assert name in outcome.stderr
    assert not outputs.exists()


def test_run_names_every_input_that_does_not_fit(relaxtune, artifact, tmp_path) -> None:
    np.savez(tmp_path / "x.npz", input_ids=np.zeros((1, 17), np.int64), attention_mask=np.ones((1, 16), np.float32))
    outcome = relaxtune("run", artifact, "--inputs", tmp_path / "x.npz", "--outputs", tmp_path / "y.npz")
    assert outcome.code == 1
    for word in ("input_ids", "1x17", "attention_mask", "float32", "token_type_ids"):
        assert word in outcome.stderr
    assert not (tmp_path / "y.npz").exists()


def test_run_refuses_inputs_that_are_no_npz(relaxtune, artifact, tmp_path) -> None:
    path = tmp_path / "x.npz"
    path.write_text("hello")
    outcome = relaxtune("run", artifact, "--inputs", path, "--outputs", tmp_path / "y.npz")
    assert outcome.code == 2
    assert "x.npz" in outcome.stderr
