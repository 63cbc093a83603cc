from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
import tvm
from hypothesis import given, strategies as st
from onnx import helper

from relaxtune.models import TensorSpec
from relaxtune.pipeline.artifact.calls.tensor_checks import check_inputs
from relaxtune.pipeline.artifact.directory import load_manifest, verify_artifact
from relaxtune.pipeline.artifact.manifest import Manifest
from relaxtune.pipeline.artifact.module import Module
from relaxtune.pipeline.errors import ArtifactError, PipelineError
from relaxtune.pipeline.jobs.compile_and_tune import compile_model
from relaxtune.pipeline.passes.module import LoweringOptions
from relaxtune.pipeline.prepare import ModelRequest
from relaxtune.pipeline.tvm_runtime.threads import default_threads
from tests.pipeline.importer.onnx_cases import make_model

ROOT = Path(__file__).parents[3]
Inputs = dict[str, np.ndarray]
Maker = Callable[[], Path]


@pytest.fixture(scope="module")
def module(artifact: Path) -> Module:
    return Module.load(artifact)


def rewrite(directory: Path, manifest: Manifest) -> Path:
    (directory / "manifest.json").write_text(manifest.to_json())
    return directory


def test_run_returns_arrays_of_its_own_in_the_signature(module: Module, bert_inputs: Inputs) -> None:
    first = module.run(bert_inputs)
    assert {name: (str(a.dtype), a.shape) for name, a in first.items()} == {
        spec.name: (spec.dtype, spec.shape) for spec in module.outputs
    }
    kept = {name: array.copy() for name, array in first.items()}
    module.run({**bert_inputs, "input_ids": bert_inputs["input_ids"][:, ::-1]})
    for name, array in first.items():
        np.testing.assert_array_equal(array, kept[name])


def test_an_artifact_written_over_a_loaded_one_runs_its_own_code(tmp_path: Path) -> None:
    def made(factor: float) -> Module:
        node = helper.make_node("Mul", ["x", "factor"], ["y"])
        shape = {"x": ("float32", (3,))}
        constants = {"factor": np.array([factor], "float32")}
        model = make_model([node], shape, {"y": ("float32", (3,))}, constants)
        onnx.save(model.proto, tmp_path / "model.onnx")
        lowering = LoweringOptions(embed_weights=True)
        request = ModelRequest(tmp_path / "model.onnx", target="llvm", lowering=lowering)
        compile_model(request, tmp_path / "artifact", samples=0)
        return Module.load(tmp_path / "artifact")

    x = np.ones(3, "float32")
    twice, thrice = made(2.0), made(3.0)
    assert twice.run({"x": x})["y"].tolist() == [2, 2, 2]
    assert thrice.run({"x": x})["y"].tolist() == [3, 3, 3]


def test_run_device_gives_what_run_gives(module: Module, bert_inputs: Inputs) -> None:
    outputs = module.run_device(module.to_device(bert_inputs))
    module.synchronise()
    for spec, tensor in zip(module.outputs, outputs, strict=True):
        np.testing.assert_array_equal(tensor.numpy(), module.run(bert_inputs)[spec.name])
    assert module.device == tvm.cpu(0)


def test_run_device_reads_tensors_of_other_libraries_where_they_lie(module: Module, bert_inputs: Inputs) -> None:
    def aligned(array: np.ndarray, offset: int = 0) -> np.ndarray:
        room = np.zeros(array.nbytes + 128, np.uint8)
        start = -room.ctypes.data % 64 + offset
        placed = room[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
        placed[...] = array
        return placed

    given = [aligned(bert_inputs[spec.name]) for spec in module.inputs]
    expected = module.run(bert_inputs)
    for spec, tensor in zip(module.outputs, module.run_device(given), strict=True):
        np.testing.assert_array_equal(np.from_dlpack(tensor), expected[spec.name])
    shifted = [aligned(given[0], offset=8), *given[1:]]
    with pytest.raises(PipelineError, match=r"input 'input_ids' of bert-tiny cannot be read where it lies: .*64 bytes"):
        module.run_device(shifted)
    with pytest.raises(PipelineError, match=r"cannot be read where it lies"):
        module.run_device([given[0][:, ::2], *given[1:]])


def test_module_runs_in_a_fresh_process_with_the_directory_alone(
    module: Module, artifact_copy: Maker, bert_inputs: Inputs, tmp_path: Path
) -> None:
    directory = artifact_copy()
    np.savez(tmp_path / "x.npz", **bert_inputs)
    code = (
        "import sys, numpy as np\n"
        "from relaxtune.pipeline.artifact.module import Module\n"
        "np.savez(sys.argv[3], **Module.load(sys.argv[1]).run(dict(np.load(sys.argv[2]))))\n"
    )
    arguments = [str(directory), str(tmp_path / "x.npz"), str(tmp_path / "y.npz")]
    outcome = subprocess.run(
        [sys.executable, "-c", code, *arguments], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert outcome.returncode == 0, outcome.stderr
    expected = module.run(bert_inputs)
    for name, array in np.load(tmp_path / "y.npz").items():
        np.testing.assert_array_equal(array, expected[name])


def test_threads_share_a_module(module: Module, bert_inputs: Inputs) -> None:
    expected = module.run(bert_inputs)
    results: list[Inputs] = []
    workers = [threading.Thread(target=lambda: results.append(module.run(bert_inputs))) for _ in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert len(results) == 4
    for result in results:
        for name, array in result.items():
            np.testing.assert_array_equal(array, expected[name])


def test_artifacts_and_copies_of_one_run_in_threads_at_once(
    module: Module, artifact: Path, bert_inputs: Inputs, tmp_path: Path
) -> None:
    node = helper.make_node("Mul", ["x", "x"], ["y"])
    onnx.save(make_model([node], {"x": ("float32", (3,))}, {"y": ("float32", (3,))}).proto, tmp_path / "model.onnx")
    compile_model(ModelRequest(tmp_path / "model.onnx", target="llvm"), tmp_path / "square", samples=0)
    square = Module.load(tmp_path / "square")
    copies = [module, Module.load(artifact), Module.load(artifact)]
    feeds = [{**bert_inputs, "input_ids": np.roll(bert_inputs["input_ids"], n, axis=1)} for n in range(6)]
    expected = [module.run(feed) for feed in feeds]

    def work(number: int) -> list[bool]:
        feed, one = feeds[number], copies[number % len(copies)]
        same = []
        for turn in range(10):
            found = one.run(feed)
            same += [np.array_equal(found[name], array) for name, array in expected[number].items()]
            x = np.arange(3, dtype="float32") + 100 * number + turn
            same.append(np.array_equal(square.run({"x": x})["y"], x * x))
        return same

    with ThreadPoolExecutor(len(feeds)) as pool:
        found = list(pool.map(work, range(len(feeds))))
    assert all(map(all, found))
    assert [len(same) for same in found] == [10 * (len(module.outputs) + 1)] * len(feeds)


def test_run_async_leaves_the_event_loop_free(module: Module, artifact: Path, bert_inputs: Inputs) -> None:
    feeds = [{**bert_inputs, "input_ids": np.roll(bert_inputs["input_ids"], n, axis=1)} for n in range(4)]
    expected = [module.run(feed) for feed in feeds]
    copies = [module, Module.load(artifact)]

    busy, free = threading.Event(), threading.Event()

    def hold() -> None:
        with copies[1]._turn:
            busy.set()
            free.wait(60)

    async def work() -> tuple[list[Inputs], Exception | None]:
        waiting = asyncio.create_task(copies[1].run_async(feeds[0]))
        found = await asyncio.gather(*(copies[0].run_async(feed) for feed in feeds))
        assert not waiting.done()
        free.set()
        last = await waiting
        try:
            await copies[0].run_async({})
        except PipelineError as e:
            return [*found, last], e
        return [*found, last], None

    holder = threading.Thread(target=hold)  # a call of another thread that takes long
    holder.start()
    assert busy.wait(60)
    found, error = asyncio.run(work())
    holder.join()
    for result, wanted in zip(found, [*expected, expected[0]], strict=True):
        for name, array in wanted.items():
            np.testing.assert_array_equal(result[name], array)
    assert "missing input" in str(error)


def test_outputs_are_taken_by_other_libraries_where_they_lie(module: Module, bert_inputs: Inputs) -> None:
    (first, *_) = module.run_device(module.to_device(bert_inputs))
    assert np.from_dlpack(first).__array_interface__["data"][0] == first.data_ptr()


def test_torch_tensors_go_in_and_out_without_a_copy(module: Module, bert_inputs: Inputs) -> None:
    torch = pytest.importorskip("torch")
    given = [torch.from_numpy(bert_inputs[spec.name]).clone() for spec in module.inputs]
    expected = module.run(bert_inputs)
    for spec, tensor in zip(module.outputs, module.run_device(given), strict=True):
        taken = torch.from_dlpack(tensor)
        assert taken.data_ptr() == tensor.data_ptr()
        np.testing.assert_array_equal(taken.numpy(), expected[spec.name])


def test_a_stream_on_a_cpu_is_refused(module: Module, bert_inputs: Inputs) -> None:
    with pytest.raises(PipelineError, match=r"has no streams: the artifact is for a CPU; leave `stream` out"):
        module.run_device(module.to_device(bert_inputs), stream=7)


def test_run_names_every_input_that_does_not_fit(module: Module, bert_inputs: Inputs) -> None:
    wrong = {
        "input_ids": bert_inputs["input_ids"].astype(np.int32),
        "attention_mask": bert_inputs["attention_mask"][:, :7],
        "pixels": np.zeros(3),
    }
    with pytest.raises(PipelineError) as caught:
        module.run(wrong)
    message = str(caught.value)
    assert "unexpected input 'pixels'" in message
    assert "input 'input_ids': expected dtype int64, got int32" in message
    assert "input 'attention_mask': expected shape 1x32, got 1x7" in message
    assert "missing input token_type_ids: int64[1x32]" in message
    assert "It takes: input_ids: int64[1x32]" in message


def test_a_symbol_takes_one_size_over_all_inputs() -> None:
    specs = (TensorSpec("a", "float32", ("batch", 4)), TensorSpec("b", "float32", ("batch", "batch + 1")))
    check_inputs({"a": np.zeros((3, 4), np.float32), "b": np.zeros((3, 9), np.float32)}, specs)
    with pytest.raises(PipelineError, match=r"input 'b': expected shape batch=3 \(from 'a'\), batch \+ 1, got 2x9"):
        check_inputs({"a": np.zeros((3, 4), np.float32), "b": np.zeros((2, 9), np.float32)}, specs)


def test_lists_are_refused_with_the_way_to_make_arrays_of_them() -> None:
    specs = (TensorSpec("a", "float32", (2,)),)
    told = r"input 'a': expected a NumPy array, got a list; give numpy\.asarray\(\.\.\., dtype='float32'\)"
    with pytest.raises(PipelineError, match=told):
        check_inputs({"a": [1.0, 2.0]}, specs)
    with pytest.raises(PipelineError, match="expected arrays by name, got a list"):
        check_inputs([np.zeros(2, np.float32)], specs)


@given(st.lists(st.integers(0, 4), max_size=3), st.lists(st.integers(0, 4), max_size=3))
def test_a_static_shape_accepts_itself_only(expected: list[int], got: list[int]) -> None:
    specs = (TensorSpec("x", "float32", tuple(expected)),)
    array = np.zeros(got, np.float32)
    if expected == got:
        check_inputs({"x": array}, specs)
    else:
        with pytest.raises(PipelineError, match="input 'x': expected shape"):
            check_inputs({"x": array}, specs)


def test_load_refuses_another_device(artifact: Path) -> None:
    with pytest.raises(ArtifactError, match=r"is for llvm .* cannot run on device 'cuda:0'; expected cpu"):
        Module.load(artifact, device="cuda:0")


def test_load_refuses_a_damaged_artifact(artifact_copy: Maker) -> None:
    directory = artifact_copy()
    with (directory / "params.safetensors").open("ab") as file:
        file.write(b"\0")
    with pytest.raises(ArtifactError, match=r"params\.safetensors was changed"):
        Module.load(directory)


def test_load_refuses_a_library_that_is_none(artifact_copy: Maker) -> None:
    directory = artifact_copy()
    (directory / "model.so").write_bytes(b"not a library")
    with pytest.raises(ArtifactError, match=r"model\.so cannot be loaded: .*"):
        Module.load(directory, verify=False)


def test_load_refuses_unreadable_or_incomplete_weights(artifact_copy: Maker) -> None:
    directory = artifact_copy()
    manifest = load_manifest(directory)
    rewrite(directory, replace(manifest, weights=(*manifest.weights, "extra")))
    with pytest.raises(ArtifactError, match="lacks the weights extra"):
        Module.load(directory, verify=False)
    (directory / "params.safetensors").write_bytes(b"short")
    with pytest.raises(ArtifactError, match=r"params\.safetensors cannot be read"):
        Module.load(directory, verify=False)


def test_load_refuses_a_processor_without_the_instructions(artifact_copy: Maker) -> None:
    directory = artifact_copy()
    manifest = load_manifest(directory)
    target = replace(manifest.target, arch="futureproc", cpu_features=(*manifest.target.cpu_features, "avx4096"))
    with pytest.raises(ArtifactError, match=r"processor futureproc; this machine's lacks avx4096"):
        Module.load(rewrite(directory, replace(manifest, target=target)))


def test_load_refuses_another_kind_of_processor(artifact_copy: Maker) -> None:
    directory = artifact_copy()
    manifest = load_manifest(directory)
    versions = {**manifest.versions, "machine": "riscv64"}
    with pytest.raises(ArtifactError, match="is for riscv64 processors, this machine is"):
        Module.load(rewrite(directory, replace(manifest, versions=versions)))


@pytest.mark.skipif(tvm.cuda(0).exist, reason="needs a machine without a GPU")
def test_load_refuses_a_cuda_artifact_where_there_is_no_gpu(artifact_copy: Maker) -> None:
    directory = artifact_copy()
    manifest = load_manifest(directory)
    target = replace(manifest.target, kind="cuda", arch="sm_90a")
    with pytest.raises(ArtifactError, match=r"is for a GPU \(sm_90a\), and this machine has no CUDA device 0"):
        Module.load(rewrite(directory, replace(manifest, target=target)))


def test_manifest_lists_the_instructions_of_the_target(artifact: Path) -> None:
    features = verify_artifact(artifact).target.cpu_features
    assert features
    assert not [name for name in features if name.startswith("fast-")]
    assert json.loads((artifact / "manifest.json").read_text())["target"]["kind"] == "llvm"


def test_threads_default_to_the_physical_cores_and_nobody_is_pinned() -> None:
    code = (
        "import os\n"
        "before = os.sched_getaffinity(0)\n"
        "from relaxtune.pipeline.tvm_runtime.threads import configure_threads, default_threads\n"
        "assert configure_threads() == default_threads()\n"
        "assert os.sched_getaffinity(0) == before\n"
        "print(configure_threads(1))\n"
    )
    outcome = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert outcome.returncode == 0, outcome.stderr
    assert outcome.stdout.strip() == "1"


@pytest.mark.skipif(default_threads() < 2, reason="one core: a pool of one thread is what is asked for")
def test_threads_warn_when_the_pool_was_started_before() -> None:
    code = (
        "import logging, tvm\n"
        "from relaxtune.pipeline.tvm_runtime.threads import configure_threads\n"
        "tvm.runtime.num_threads()\n"
        "logging.basicConfig(level=logging.WARNING)\n"
        "print(configure_threads(1000))\n"
    )
    outcome = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert outcome.returncode == 0, outcome.stderr
    assert int(outcome.stdout) < 1000
    assert "threads where 1000 were asked for" in outcome.stderr
