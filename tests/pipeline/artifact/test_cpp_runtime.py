"""The C++ runtime, built and installed once: the bits of the Python runtime, in C++ and in C, and errors."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import onnx
import pytest
import tvm
import tvm_ffi
from onnx import helper

import relaxtune
from relaxtune.pipeline.artifact import compile as compile_stage
from relaxtune.pipeline.artifact.manifest import MANIFEST_FILE, MODULE_FILE, PARAMS_FILE
from relaxtune.pipeline.artifact.module import Module
from tests.pipeline.artifact.call_cases import ARTIFACTS, CASES, without_quotes
from tests.pipeline.importer.onnx_cases import make_model
from tests.unoptimised import UNOPTIMISED_TEXT

SOURCES = Path(relaxtune.__file__).parent / "pipeline/artifact/cpp"
HERE = Path(__file__).parent / "cpp"
WIDTH = 32

pytestmark = pytest.mark.skipif(shutil.which("cmake") is None, reason="needs cmake")


def cmake(*words: object) -> None:
    done = subprocess.run(["cmake", *map(str, words)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(scope="session")
def runtime(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return where the runtime is installed, with a program that was built with its CMake package."""
    folder = tmp_path_factory.mktemp("cpp")
    wheels = [f"-DTVM_WHEEL={Path(tvm.__file__).parent}", f"-DTVM_FFI_WHEEL={Path(tvm_ffi.__file__).parent}"]
    # As on Ubuntu, where the linker drops libraries of which no symbol is used. With checks of the standard library, no
    # symbol of TVM's runtime is used by accident. And with a C++ library of its own.
    flags = ["-DCMAKE_SHARED_LINKER_FLAGS=-Wl,--as-needed -static-libstdc++", "-DCMAKE_CXX_FLAGS=-D_GLIBCXX_ASSERTIONS"]
    parts = ["-DRELAXTUNE_EXAMPLE=OFF", "-DRELAXTUNE_ONNXRUNTIME=OFF"]
    cmake("-S", SOURCES, "-B", folder / "build", *wheels, *flags, *parts, "-DCMAKE_BUILD_TYPE=")
    cmake("--build", folder / "build", "--parallel", "2")
    cmake("--install", folder / "build", "--prefix", folder / "prefix")
    cmake("-S", HERE, "-B", folder / "program", f"-DCMAKE_PREFIX_PATH={folder / 'prefix'}")
    cmake("--build", folder / "program")
    return folder


def client(runtime: Path, *words: object) -> list[str]:
    """Return the command of a program that runs an artifact through the C functions."""
    parts = (
        HERE / "client.py",
        runtime / "program/libcrash.so",
        runtime / "prefix/lib/librelaxtune_runtime.so",
        *words,
    )
    return [sys.executable, *map(str, parts)]


def calls_through_c(
    runtime: Path, artifact: Path, calls: Sequence[dict[str, np.ndarray]], folder: Path, *words: object
) -> list[dict[str, np.ndarray]]:
    """Return the outputs of the C functions for calls one after another, or raise with their message."""
    given, made = folder / "given", folder / "made"
    for place in (given, made):
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir()
    for number, inputs in enumerate(calls):
        np.savez(given / f"{number:04}.npz", **inputs)
    # All symbols at once, as for code that was linked so.
    environment = {**os.environ, "LD_BIND_NOW": "1"}
    command = client(runtime, artifact, given, made, *words)
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    if done.returncode:
        at = made.with_suffix(".at").read_text()
        raise RuntimeError(f"exit code {done.returncode} at {at}: {done.stderr.strip()}")
    found = []
    for file in sorted(made.iterdir()):
        with np.load(file) as stored:
            found.append({name: stored[name] for name in stored.files})
    return found


def through_c(runtime: Path, artifact: Path, inputs: dict[str, np.ndarray], folder: Path) -> dict[str, np.ndarray]:
    (found,) = calls_through_c(runtime, artifact, [inputs], folder)
    return found


def assert_same(
    runtime: Path,
    artifact: Path,
    calls: dict[str, np.ndarray] | list[dict[str, np.ndarray]],
    folder: Path,
    *words: object,
) -> None:
    listed, module = calls if isinstance(calls, list) else [calls], Module.load(artifact)
    made = calls_through_c(runtime, artifact, listed, folder, *words)
    assert len(made) == len(listed)
    for inputs, got in zip(listed, made, strict=True):
        expected = module.run(inputs)
        assert list(got) == list(expected)
        for name, array in expected.items():
            assert (got[name].dtype, got[name].shape) == (array.dtype, array.shape)
            assert got[name].tobytes() == array.tobytes(), name


@pytest.fixture(scope="module")
def layers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return an artifact of symbolic rows with a bucket of four of them."""
    folder, rng = tmp_path_factory.mktemp("layers"), np.random.default_rng(0)
    nodes = [helper.make_node("MatMul", ["x", "w"], ["a"]), helper.make_node("Relu", ["a"], ["y"])]
    spec = ("float32", ("n", WIDTH))
    weight = rng.standard_normal((WIDTH, WIDTH)).astype("float32")
    onnx.save(make_model(nodes, {"x": spec}, {"y": spec}, {"w": weight}).proto, folder / "layers.onnx")
    return relaxtune.compile(
        folder / "layers.onnx", folder / "artifact", target="llvm", samples=0, buckets={"n": (4,)}
    ).directory


def rows(count: int) -> np.ndarray:
    return np.random.default_rng(count).standard_normal((count, WIDTH)).astype("float32")


def test_c_gives_the_bits_of_python(
    runtime: Path, artifact: Path, bert_inputs: dict[str, np.ndarray], layers: Path, tmp_path: Path
) -> None:
    assert_same(runtime, artifact, bert_inputs, tmp_path)
    # The one of four rows is the bucket; the pool is given back after 64 sets of sizes.
    assert_same(runtime, layers, [{"x": rows(count)} for count in range(1, 71)], tmp_path)


def test_a_forked_process_goes_on(
    runtime: Path, artifact: Path, bert_inputs: dict[str, np.ndarray], tmp_path: Path
) -> None:
    assert_same(runtime, artifact, bert_inputs, tmp_path, 2, "default", "fork")


def test_the_library_shows_no_names_but_its_own(runtime: Path) -> None:
    """TVM's runtime would take those of a C++ library in here, with objects of another: it crashed while it loaded."""
    library = runtime / "prefix/lib/librelaxtune_runtime.so"
    done = subprocess.run(["nm", "-D", "--defined-only", library], capture_output=True, text=True, check=True)
    names = [line.split()[-1] for line in done.stdout.splitlines()]
    assert "relaxtune_run" in names
    assert [name for name in names if "relaxtune" not in name] == []


@pytest.mark.slow
def test_calls_leave_padding_out_as_in_python(runtime: Path, tmp_path: Path) -> None:
    names = ("input_ids", "attention_mask", "token_type_ids")
    made = relaxtune.compile(
        "bert-tiny", tmp_path / "unpadded", target=UNOPTIMISED_TEXT, samples=0, unpad=True,
        shapes=dict.fromkeys(names, ("batch", "sequence")),
    )  # fmt: skip
    rng = np.random.default_rng(0)
    masks = [np.ones((2, 5)), rng.random((3, 7)) < 0.5, np.arange(9) >= np.array([[3], [0], [8]]), np.zeros((2, 4))]
    for mask in masks:
        ids = rng.integers(0, 100, mask.shape)
        feed = dict(zip(names, (ids, mask.astype("int64"), np.zeros(mask.shape, "int64")), strict=True))
        assert_same(runtime, made.directory, feed, tmp_path)


@pytest.mark.quick_cases("padded", "tables")
@pytest.mark.parametrize("name", ARTIFACTS)
def test_c_keeps_the_table_of_calls(runtime: Path, name: str, tmp_path: Path) -> None:
    artifact = ARTIFACTS[name](tmp_path)
    cases = [case for case in CASES if case.artifact == name]
    assert_same(runtime, artifact, [case.inputs for case in cases if case.route], tmp_path)
    for case in cases:
        if not case.route:
            with pytest.raises(RuntimeError) as refused:
                through_c(runtime, artifact, case.inputs, tmp_path)
            assert re.search(without_quotes(case.said), without_quotes(str(refused.value)))


def test_outputs_that_are_inputs_or_constants_are_copies(runtime: Path, tmp_path: Path) -> None:
    nodes = [
        helper.make_node("Not", ["flags"], ["turned"]),
        helper.make_node("Identity", ["numbers"], ["same"]),
        helper.make_node("Identity", ["held"], ["constant"]),
    ]
    inputs = {"flags": ("bool", (3,)), "numbers": ("int64", (2, 2))}
    outputs = {"turned": ("bool", (3,)), "same": ("int64", (2, 2)), "constant": ("float32", (8,))}
    onnx.save(make_model(nodes, inputs, outputs, {"held": np.arange(8, dtype="float32")}).proto, tmp_path / "odd.onnx")
    made = relaxtune.compile(tmp_path / "odd.onnx", tmp_path / "artifact", target="llvm", samples=0).directory
    given = {"flags": np.array([True, False, True]), "numbers": np.arange(4).reshape(2, 2)}
    assert_same(runtime, made, given, tmp_path)


def test_a_program_of_the_cmake_package_runs_and_catches_errors(runtime: Path, layers: Path, tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(rows(5).tobytes())
    words = [runtime / "program/program", layers, tmp_path / "x", tmp_path / "y", 5]
    done = subprocess.run(list(map(str, words)), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "expected dtype float32, got float16|layers, input x|the model takes x: float32[n, 32]",
        "got shape 5x31|layers, input x|the model takes x: float32[n, 32]",
    ]
    assert (tmp_path / "y").read_bytes() == Module.load(layers).run({"x": rows(5)})["y"].tobytes()


def _other_byte(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def _altered_manifest(folder: Path) -> None:
    path = folder / MANIFEST_FILE
    path.write_text(path.read_text().replace('"model": "layers"', '"model": "others"'))


def _without_weights(folder: Path) -> None:
    (folder / PARAMS_FILE).unlink()


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda folder: _other_byte(folder / MODULE_FILE), r"model\.so: it was changed after it was written"),
        (lambda folder: _other_byte(folder / PARAMS_FILE), r"params\.safetensors: it was changed after"),
        (_altered_manifest, r"manifest\.json: it was changed after it was written: its content is not what its sha256"),
        (_without_weights, r"params\.safetensors: the artifact lacks this file; copy the artifact again"),
        (lambda folder: (folder / "other").touch(), r"other: the manifest does not know this file; remove it"),
        (lambda folder: (folder / MANIFEST_FILE).unlink(), r"this is no artifact: it has no manifest\.json"),
    ],
)
def test_a_damaged_artifact_is_refused(
    runtime: Path, layers: Path, tmp_path: Path, damage: Callable[[Path], None], said: str
) -> None:
    copy = shutil.copytree(layers, tmp_path / "copy")
    damage(copy)
    with pytest.raises(RuntimeError, match=said):
        through_c(runtime, copy, {"x": rows(2)}, tmp_path)


@pytest.fixture(scope="module")
def gpu_layers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return an artifact of symbolic rows for a GPU, with a bucket of four of them."""
    folder = tmp_path_factory.mktemp("gpu_layers")
    spec = ("float32", ("n", WIDTH))
    nodes = [helper.make_node("Relu", ["x"], ["a"]), helper.make_node("Softmax", ["a"], ["y"])]
    onnx.save(make_model(nodes, {"x": spec}, {"y": spec}, {}).proto, folder / "layers.onnx")
    return relaxtune.compile(
        folder / "layers.onnx", folder / "artifact", target="cuda:sm_90a", samples=0, buckets={"n": (4,)}
    ).directory


def over_fake_cuda(
    runtime: Path, log: Path, command: Sequence[str], **variables: str
) -> tuple[subprocess.CompletedProcess[str], dict[str, int]]:
    """Return a command's end and what it asked of a CUDA driver without a GPU, which tells of wrong calls."""
    own = {"LD_LIBRARY_PATH": str(runtime / "program/fake"), "FAKE_CUDA_LOG": str(log)}
    environment = {**os.environ, **own, **variables}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    return done, json.loads(log.read_text()) if log.exists() else {}


def calls_of_rows(folder: Path, counts: Sequence[int]) -> tuple[Path, Path]:
    """Return where calls of so many rows are given, and where their outputs go."""
    given, made = folder / "given", folder / "made"
    given.mkdir()
    made.mkdir()
    for count in counts:
        np.savez(given / f"{count:04}.npz", x=rows(count))
    return given, made


@pytest.mark.parametrize(
    ("words", "captured", "launches"),
    [
        # More sets of sizes than graphs are kept (32); four rows are the bucket, whose one graph is TVM's.
        (("default", "graphs"), 40, 39 + 32 + 2),
        (("own", "graphs"), 40, 39 + 32 + 2),
        (("own",), 1, 2),
    ],
)
def test_cuda_calls_are_in_order_over_a_driver_without_a_gpu(
    runtime: Path, gpu_layers: Path, tmp_path: Path, words: tuple[str, ...], captured: int, launches: int
) -> None:
    given, made = calls_of_rows(tmp_path, range(1, 41))
    done, counts = over_fake_cuda(runtime, tmp_path / "log", client(runtime, gpu_layers, given, made, 3, *words))
    assert (done.returncode, done.stderr) == (0, "")
    assert len(list(made.iterdir())) == 40
    assert (counts["captured"], counts["launches"]) == (captured, launches)
    # Two kernels a call, alone or in a graph; the first call with symbolic sizes is made twice, to find constants.
    assert (counts["kernels"], counts["copies"]) == (2 * (120 + 1), 2 * 120)
    assert (counts["executables"], counts["graphs"], counts["streams"]) == (0, 0, int("own" in words))


@pytest.fixture(scope="module", params=[True, False], ids=["whole calls", "graphs inside alone"])
def part_static(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, bool]:
    """Return an artifact for a GPU with kernels of known sizes beside symbolic rows, and whether it can be captured.

    One whose code has graphs inside, as earlier versions compiled it, cannot.
    """
    folder = tmp_path_factory.mktemp("part_static")
    known, rows_of = ("float32", (1, WIDTH)), ("float32", ("n", WIDTH))
    nodes = [helper.make_node("Softmax", [a], [b]) for a, b in (("k", "a"), ("a", "b"), ("b", "c"))]
    nodes.append(helper.make_node("Add", ["x", "c"], ["y"]))
    onnx.save(make_model(nodes, {"x": rows_of, "k": known}, {"y": rows_of}, {}).proto, folder / "part.onnx")
    with pytest.MonkeyPatch.context() as patch:
        if not request.param:
            patch.setattr(compile_stage, "with_whole_calls", lambda mod: mod)
        made = relaxtune.compile(folder / "part.onnx", folder / "artifact", target="cuda:sm_90a", samples=0)
    return made.directory, request.param


IN_PYTHON = """
import sys
import numpy as np, relaxtune, tvm
module = relaxtune.load(sys.argv[1])
stream = tvm.cuda(0).create_raw_stream() if sys.argv[2] == "own" else 0
given = [dict(np.load(file)) for file in sys.argv[3:]]
for _ in range(3):
    for one in given:
        module.run_device(module.to_device(one), stream=stream)
"""


@pytest.mark.quick_cases("whole calls-c-own", "whole calls-python-default", "graphs inside alone-c-default")
@pytest.mark.parametrize("stream", ["default", "own"])
@pytest.mark.parametrize("language", ["c", "python"])
def test_capture_that_cannot_be_made_leaves_no_trace(
    runtime: Path, part_static: tuple[Path, bool], tmp_path: Path, language: str, stream: str
) -> None:
    artifact, whole = part_static
    given, made = calls_of_rows(tmp_path, range(1, 6))
    for file in given.iterdir():
        np.savez(file, **np.load(file), k=rows(1))
    command = client(runtime, artifact, given, made, 3, stream, "graphs")
    if language == "python":
        command = [sys.executable, "-c", IN_PYTHON, str(artifact), stream, *map(str, given.iterdir())]
    done, counts = over_fake_cuda(runtime, tmp_path / "log", command)
    assert done.returncode == 0, done.stderr
    assert (counts["graphs"], counts["last_error"]) == (0, 0)
    # Without a graph of each size, the one inside is launched in all calls but the first.
    # The graph inside, and one for each size. (Python captures again where a call's inputs lie elsewhere.)
    assert counts["captured"] in (range(6, 12) if whole else [1])
    assert done.stderr.count("run without a CUDA graph") == (5 if language == "python" and not whole else 0)


@pytest.mark.parametrize(
    ("function", "at"),
    [("cuGraphLaunch", "0005.npz of round 2"), ("end", "the end of the process")],
)
def test_a_crash_in_the_driver_says_where_although_tvm_says_nothing(
    runtime: Path, gpu_layers: Path, tmp_path: Path, function: str, at: str
) -> None:
    given, made = calls_of_rows(tmp_path, [5])
    command = client(runtime, gpu_layers, given, made, 3, "own", "graphs")
    done, _ = over_fake_cuda(runtime, tmp_path / "log", command, FAKE_CUDA_CRASH=function)
    assert done.returncode == -signal.SIGSEGV
    assert "called from:" in done.stderr
    assert re.search(r"libcudart\.so", done.stderr)
    assert made.with_suffix(".at").read_text() == at


def test_an_artifact_and_outputs_that_live_until_the_process_ends_make_no_cuda_call(
    runtime: Path, gpu_layers: Path, tmp_path: Path
) -> None:
    done, counts = over_fake_cuda(runtime, tmp_path / "log", [str(runtime / "program/kept"), str(gpu_layers)])
    assert (done.returncode, done.stderr) == (0, "")
    assert counts["kernels"] > 0


@pytest.mark.gpu
@pytest.mark.skipif(not tvm.cuda(0).exist, reason="needs a CUDA device")
@pytest.mark.parametrize("stream", ["default", "own"])
@pytest.mark.parametrize(
    ("form", "graphs"),
    [("static", ""), ("symbolic", ""), ("symbolic", "graphs"), ("unpadded", ""), ("unpadded", "graphs")],
)
def test_a_gpu_gives_the_bits_of_python_on_any_stream(
    runtime: Path, tmp_path: Path, form: str, graphs: str, stream: str
) -> None:
    names = ("input_ids", "attention_mask", "token_type_ids")
    shape: tuple[int | str, ...] = (2, 16) if form == "static" else ("batch", "sequence")
    made = relaxtune.compile(
        "bert-tiny", tmp_path / "artifact", target="cuda", samples=0, precision="fp16", unpad=form == "unpadded",
        shapes=dict.fromkeys(names, shape),
    )  # fmt: skip
    rng = np.random.default_rng(0)
    # More sets of sizes than graphs are kept; each is run without one, captured and launched.
    sizes = [(2, 16)] * 3 if form == "static" else [(1 + n % 3, 3 + n) for n in range(40)]
    calls = []
    for size in sizes:
        mask = rng.random(size) < 0.7 if form == "unpadded" else np.ones(size)
        given = (rng.integers(0, 100, size), mask.astype("int64"), np.zeros(size, "int64"))
        calls.append(dict(zip(names, given, strict=True)))
    assert_same(runtime, made.directory, calls[:5], tmp_path, 4, stream, graphs)
    assert_same(runtime, made.directory, calls, tmp_path, 3, stream, graphs)
