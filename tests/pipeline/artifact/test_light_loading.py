"""`relaxtune.load` imports neither ONNX nor TVM's compiler, and gets on with a TVM that is imported later."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import ml_dtypes
import numpy as np
import onnx
import pytest
from onnx import helper

import relaxtune
from relaxtune.pipeline.tvm_runtime.library import array_of, cpu, tensor_of
from tests.pipeline.importer.onnx_cases import make_model
from tests.unoptimised import UNOPTIMISED_TEXT

HEAVY = ["onnx", "onnxruntime", "sqlalchemy", "alembic", "pydantic", "xgboost", "typer", "rich", "tvm", "scipy", "ray"]


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return an artifact with symbolic sizes, a bucket, and an output that a sort gives."""
    folder = tmp_path_factory.mktemp("light")
    rng = np.random.default_rng(3)
    weight = rng.standard_normal((16, 24)).astype("float32")
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["y"]),
        helper.make_node("TopK", ["y", "k"], ["best", "places"], axis=-1),
    ]
    model = make_model(
        nodes,
        {"x": ("float32", ("rows", 16))},
        {"y": ("float32", ("rows", 24)), "best": ("float32", ("rows", 3)), "places": ("int64", ("rows", 3))},
        {"w": weight, "k": np.array([3], "int64")},
    )
    path = folder / "model.onnx"
    onnx.save(model.proto, path)
    relaxtune.compile(path, folder / "out", target=UNOPTIMISED_TEXT, buckets={"rows": (4,)}, samples=1)
    return folder / "out"


def run_python(code: str, *arguments: object) -> str:
    words: Sequence[str] = [sys.executable, "-c", code, *map(str, arguments)]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


LOAD = """
import sys
import numpy as np
import relaxtune
module = relaxtune.load(sys.argv[1])
x = np.linspace(-1, 1, 4 * 16, dtype="float32").reshape(4, 16)
outputs = [module.run({"x": x[:rows]}) for rows in (4, 3, 4)]
on_device = module.run_device(module.to_device({"x": x}))
assert all(np.array_equal(one.numpy(), outputs[0][spec.name]) for one, spec in zip(on_device, module.outputs))
"""


def test_loading_and_running_import_what_they_need(artifact: Path) -> None:
    said = run_python(LOAD + f"print([name for name in {HEAVY} if name in sys.modules])", artifact)
    assert said.strip() == "[]"


@pytest.mark.slow
def test_a_process_that_has_loaded_may_import_all_of_tvm_and_compile(artifact: Path, tmp_path: Path) -> None:
    """One library for both: artifacts and tensors of before go on, and compiled ones are as ever."""
    rest = """
first, held = module, on_device[0]
made = relaxtune.compile("bert-tiny", sys.argv[2], samples=1)
assert made.validation.passed
import tvm
assert isinstance(tvm.runtime.tensor(x), tvm.runtime.Tensor)
second = relaxtune.load(sys.argv[1])
for one in (first, second):
    for given in (module.to_device({"x": x}), [tvm.runtime.tensor(x)], one.to_device({"x": x})):
        again = one.run_device(given)
        assert np.array_equal(again[0].numpy(), outputs[0]["y"])
    assert all(np.array_equal(value, one.run({"x": x})[name]) for name, value in outputs[0].items())
assert np.array_equal(held.numpy(), outputs[0]["y"])
assert np.array_equal(tvm.runtime.empty(held.shape).copyfrom(held.numpy()).numpy(), outputs[0]["y"])
libraries = {line.split()[-1] for line in open("/proc/self/maps") if "libtvm_runtime.so" in line}
assert len(libraries) == 1, libraries
print("fine")
"""
    assert run_python(LOAD + rest, artifact, tmp_path / "out").strip().endswith("fine")


def test_a_process_that_has_imported_tvm_may_load(artifact: Path) -> None:
    code = "import tvm\n" + LOAD + "assert isinstance(on_device[0], tvm.runtime.Tensor)\nprint('fine')"
    assert run_python(code, artifact).strip() == "fine"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float8_e4m3fn", "bool", "int64"])
@pytest.mark.parametrize("shape", [(3, 5), (), (0, 4)])
def test_arrays_go_to_tensors_and_back(dtype: str, shape: tuple[int, ...]) -> None:
    array = np.ones(shape, getattr(ml_dtypes, dtype, dtype))
    back = array_of(tensor_of(array, cpu()))
    assert back.dtype == array.dtype
    assert np.array_equal(back, array)
