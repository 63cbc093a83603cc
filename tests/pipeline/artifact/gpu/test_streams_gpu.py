"""Modules on CUDA streams of the caller's: PyTorch's tensors without a copy, copies of an artifact at once."""

from __future__ import annotations

import asyncio
import threading
import traceback
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import tvm
import tvm_ffi

from relaxtune.models import OnnxModel, load_model
from relaxtune.models.inputs import random_inputs
from relaxtune.pipeline.artifact.gpu.driver import Gpu
from relaxtune.pipeline.artifact.module import Module
from tests.pipeline.artifact.gpu.test_size_graphs_gpu import compiled

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not tvm.cuda(0).exist, reason="needs a CUDA device")]

SIZES = {"batch": 2, "sequence": 33}


@pytest.fixture(scope="module", params=["static", "symbolic"])
def model(request: pytest.FixtureRequest) -> OnnxModel:
    names = ("input_ids", "attention_mask", "token_type_ids")
    shape: tuple[int | str, ...] = ("batch", "sequence") if request.param == "symbolic" else tuple(SIZES.values())
    return load_model("bert-tiny", shapes=dict.fromkeys(names, shape))


@pytest.fixture(scope="module")
def artifact(model: OnnxModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compiled(model, tmp_path_factory.mktemp("streams") / "artifact", {})


def feeds(model: OnnxModel, seed: int) -> dict[str, np.ndarray]:
    return random_inputs(model, seed=seed, dims=SIZES if any(not spec.is_static for spec in model.inputs) else {})


def expected(model: OnnxModel, artifact: Path, seeds: Sequence[int]) -> list[list[np.ndarray]]:
    module = Module.load(artifact)
    return [list(module.run(feeds(model, seed)).values()) for seed in seeds]


def test_torch_tensors_go_in_and_out_without_a_copy_on_a_stream_of_torch(model: OnnxModel, artifact: Path) -> None:
    torch = pytest.importorskip("torch")
    seeds = range(4)
    right, module, stream = expected(model, artifact, seeds), Module.load(artifact), torch.cuda.Stream()
    for seed in seeds:
        given = [torch.from_numpy(array).to("cuda") for array in feeds(model, seed).values()]
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            # Work that the call must wait for: without that, it reads tensors that are not filled yet.
            late = [torch.empty_like(one) for one in given]
            torch.cuda._sleep(20_000_000)
            for one, source in zip(late, given, strict=True):
                one.copy_(source)
            made = module.run_device(late, stream=stream)
            taken = [torch.from_dlpack(one) for one in made]
            assert [one.data_ptr() for one in taken] == [one.data_ptr() for one in made]
            found = [one.clone() for one in taken]
        stream.synchronize()
        for one, array in zip(found, right[seed], strict=True):
            np.testing.assert_array_equal(one.cpu().numpy(), array)


def test_cupy_arrays_go_in_and_out_without_a_copy_on_a_stream_of_cupy(model: OnnxModel, artifact: Path) -> None:
    cupy = pytest.importorskip("cupy")
    seeds = range(4)
    right, module, stream = expected(model, artifact, seeds), Module.load(artifact), cupy.cuda.Stream(non_blocking=True)
    for seed in seeds:
        with stream:
            given = [cupy.asarray(array) for array in feeds(model, seed).values()]
            made = module.run_device(given, stream=stream.ptr)
            taken = [cupy.from_dlpack(one) for one in made]
            assert [one.data.ptr for one in taken] == [one.data_ptr() for one in made]
            found = [one.copy() for one in taken]
        stream.synchronize()
        for one, array in zip(found, right[seed], strict=True):
            np.testing.assert_array_equal(one.get(), array)


def test_run_waits_for_calls_on_the_current_stream(model: OnnxModel, artifact: Path) -> None:
    torch = pytest.importorskip("torch")
    right, module, stream = expected(model, artifact, range(3)), Module.load(artifact), torch.cuda.Stream()
    given = module.to_device(feeds(model, 0))
    for _ in range(3):
        module.run_device(given)
    with tvm_ffi.use_torch_stream(torch.cuda.stream(stream)):
        for seed in (1, 2):
            torch.cuda._sleep(20_000_000)
            module.run_device(given)
            for array, other in zip(module.run(feeds(model, seed)).values(), right[seed], strict=True):
                np.testing.assert_array_equal(array, other)


def test_copies_on_streams_of_their_own_overlap_and_wait_for_nothing(
    model: OnnxModel, artifact: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch = pytest.importorskip("torch")
    copies, streams = [Module.load(artifact) for _ in range(2)], [torch.cuda.Stream() for _ in range(2)]
    given = [[torch.from_numpy(array).to("cuda") for array in feeds(model, seed).values()] for seed in range(2)]
    torch.cuda.synchronize()
    right = expected(model, artifact, range(2))
    for _ in range(3):  # captured, and known to take no memory
        for module, tensors, stream in zip(copies, given, streams, strict=True):
            module.run_device(tensors, stream=stream)
    waits: list[str] = []
    monkeypatch.setattr(Gpu, "wait", lambda _: waits.append("".join(traceback.format_stack(limit=6))))
    with torch.cuda.stream(streams[0]):
        torch.cuda._sleep(2_000_000_000)  # about a second
    busy = torch.cuda.Event()
    made = [module.run_device(tensors, stream=s) for module, tensors, s in zip(copies, given, streams, strict=True)]
    busy.record(streams[0])
    # The second copy is done while the first one still waits for its stream.
    streams[1].synchronize()
    assert not busy.query()
    assert waits == []
    torch.cuda.synchronize()
    for outputs, arrays in zip(made, right, strict=True):
        for one, array in zip(outputs, arrays, strict=True):
            np.testing.assert_array_equal(one.numpy(), array)


def test_a_stream_may_be_destroyed_between_calls(model: OnnxModel, artifact: Path) -> None:
    right, modules, device = expected(model, artifact, range(8)), [Module.load(artifact) for _ in range(2)], tvm.cuda(0)
    for seed in range(8):
        module, stream = modules[seed % 2], device.create_raw_stream()
        made = module.run_device(module.to_device(feeds(model, seed)), stream=stream)
        device.sync(stream)
        for one, array in zip(made, right[seed], strict=True):
            np.testing.assert_array_equal(one.numpy(), array)
        device.free_raw_stream(stream)


def test_one_module_gives_the_same_bits_on_streams_that_change_with_each_call(model: OnnxModel, artifact: Path) -> None:
    torch = pytest.importorskip("torch")
    seeds = range(6)
    right, module, streams = (
        expected(model, artifact, seeds),
        Module.load(artifact),
        [torch.cuda.Stream() for _ in "ab"],
    )
    kept = []
    for seed in seeds:
        stream = streams[seed % 2]
        with torch.cuda.stream(stream):
            made = module.run_device(module.to_device(feeds(model, seed)), stream=stream)
            torch.cuda._sleep(5_000_000)
            kept.append([torch.from_dlpack(one).clone() for one in made])
        del made
    torch.cuda.synchronize()
    for found, arrays in zip(kept, right, strict=True):
        for one, array in zip(found, arrays, strict=True):
            np.testing.assert_array_equal(one.cpu().numpy(), array)


def test_threads_and_asyncio_run_copies_at_once(model: OnnxModel, artifact: Path) -> None:
    seeds = range(8)
    right, copies = expected(model, artifact, seeds), [Module.load(artifact) for _ in range(2)]
    device, found = tvm.cuda(0), dict[int, list[np.ndarray]]()
    for copy in copies:  # static graphs are captured here: no thread may copy outputs meanwhile
        copy.run(feeds(model, 0))

    def work(number: int) -> None:
        stream = device.create_raw_stream()
        for seed in seeds[number::2]:
            made = copies[number].run_device(copies[number].to_device(feeds(model, seed)), stream=stream)
            device.sync(stream)
            found[seed] = [one.numpy() for one in made]

    threads = [threading.Thread(target=work, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    async def both() -> list[dict[str, np.ndarray]]:
        return await asyncio.gather(*(copies[seed % 2].run_async(feeds(model, seed)) for seed in seeds))

    for seed, outputs in zip(seeds, asyncio.run(both()), strict=True):
        for array, other, one in zip(outputs.values(), right[seed], found[seed], strict=True):
            np.testing.assert_array_equal(array, other)
            np.testing.assert_array_equal(one, other)


def test_a_new_thread_launches_on_the_default_stream(model: OnnxModel, artifact: Path) -> None:
    module = Module.load(artifact)
    given = module.to_device(feeds(model, 0))
    for _ in range(3):
        module.run_device(given)
    found: list[np.ndarray] = []

    def again() -> None:
        found.extend(one.numpy() for one in module.run_device(given))

    thread = threading.Thread(target=again)
    thread.start()
    thread.join()
    for array, other in zip(found, expected(model, artifact, [0])[0], strict=True):
        np.testing.assert_array_equal(array, other)
