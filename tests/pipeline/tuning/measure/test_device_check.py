"""The comparison that a GPU makes itself, built for this CPU: its verdicts are the host's."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import closing

import numpy as np
import pytest
import tvm

from relaxtune.pipeline.arrays import numpy_dtype
from relaxtune.pipeline.codegen.finish import device_toolchain
from relaxtune.pipeline.errors import LoweringError
from relaxtune.pipeline.tuning.local import measure_worker
from relaxtune.pipeline.tuning.local.build_pool import BuildPool
from relaxtune.pipeline.tuning.local.requests import MeasureReply, MeasureRequest, ReferenceRequest
from relaxtune.pipeline.tuning.measure import device_check
from relaxtune.pipeline.tuning.measure.device_check import SMALLEST, DeviceCheck, check_module
from relaxtune.pipeline.tuning.measure.timing import MeasureOptions
from relaxtune.pipeline.tuning.measure.wrong_result import absolute_bound, find_mismatch
from relaxtune.pipeline.validate.tolerances import KernelTolerance
from relaxtune.schedules.targets import resolve_target
from tests.pipeline.tuning.tuning_cases import Place, add_one_mod, built, spec_of

ACCEPTED = KernelTolerance(rtol=4e-3, atol=1e-3, accumulated=1e-4)
SIZE = SMALLEST + 77
needs_gpu = pytest.mark.skipif(not tvm.cuda(0).exist, reason="needs a CUDA device")


@pytest.fixture(scope="module")
def check() -> DeviceCheck:
    return DeviceCheck(tvm.cpu())


def is_right(check: DeviceCheck, output: np.ndarray, expected: np.ndarray, accepted: KernelTolerance) -> bool:
    there = []
    for array in (output, expected):
        tensor = tvm.runtime.empty(array.shape, str(array.dtype))
        tensor.copyfrom(array)
        there.append(tensor)
    return check.is_right(there[0], there[1], accepted.rtol, absolute_bound(expected, accepted))


def values(dtype: str, seed: int) -> np.ndarray:
    rng = np.random.default_rng(seed)
    kind = numpy_dtype(dtype)
    if kind.kind in "iu":
        return rng.integers(0, 100, SIZE).astype(kind)
    return rng.uniform(-1, 1, SIZE).astype(np.float32).astype(kind)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "int8", "uint8", "int32", "int64"])
@pytest.mark.parametrize("place", [0, SIZE // 2, SIZE - 1])
def test_one_wrong_element_is_found_wherever_it_is(check: DeviceCheck, dtype: str, place: int) -> None:
    expected = values(dtype, 1)
    assert is_right(check, expected.copy(), expected, ACCEPTED)
    wrong = expected.copy()
    wrong[place] += np.array(1).astype(wrong.dtype)
    assert not is_right(check, wrong, expected, ACCEPTED)
    assert find_mismatch(wrong, expected, ACCEPTED) is not None


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_verdicts_are_the_hosts(check: DeviceCheck, dtype: str) -> None:
    """Single elements are off by a share of what they may be, on both sides of the bound."""
    verdicts = set()
    for seed in range(60):
        rng = np.random.default_rng(seed)
        expected = values(dtype, seed)
        bound = ACCEPTED.rtol * np.abs(expected.astype(np.float64)) + absolute_bound(expected, ACCEPTED)
        output = expected.copy()
        at = rng.integers(0, SIZE, 3)
        output[at] = (expected[at] + bound[at] * rng.choice([-1, 1], 3) * rng.uniform(0.8, 1.1)).astype(output.dtype)
        host = find_mismatch(output, expected, ACCEPTED) is None
        assert is_right(check, output, expected, ACCEPTED) is host
        verdicts.add(host)
    assert verdicts == {True, False}


def test_what_lies_on_the_bound_is_left_to_the_host(check: DeviceCheck) -> None:
    expected = np.ones(SIZE, np.float32)
    accepted = KernelTolerance(rtol=0.0, atol=0.25)
    output = expected + np.float32(0.25)
    assert find_mismatch(output, expected, accepted) is None
    assert not is_right(check, output, expected, accepted)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize(
    ("got", "want", "right"),
    [
        (np.nan, np.nan, True),
        (np.inf, np.inf, True),
        (-np.inf, -np.inf, True),
        (np.inf, -np.inf, False),
        (1.0, np.inf, False),
        (np.inf, 1.0, False),
        (np.nan, 1.0, False),
        (1.0, np.nan, False),
        (np.nan, np.inf, False),
    ],
)
def test_nan_and_infinities_are_right_only_where_they_are_expected(
    check: DeviceCheck, dtype: str, got: float, want: float, right: bool
) -> None:
    output, expected = values(dtype, 3), values(dtype, 3)
    output[1234], expected[1234] = got, want
    assert is_right(check, output, expected, ACCEPTED) is right
    assert (find_mismatch(output, expected, ACCEPTED) is None) is right


@pytest.mark.parametrize("dtype", ["float64", "bool", "float8_e4m3fn"])
def test_other_dtypes_are_left_to_the_host(check: DeviceCheck, dtype: str) -> None:
    array = np.zeros(SIZE, numpy_dtype(dtype))
    assert not is_right(check, array, array, ACCEPTED)


def test_without_a_compiler_the_host_compares(monkeypatch: pytest.MonkeyPatch) -> None:
    def none(target: tvm.target.Target) -> object:
        raise LoweringError("no CUDA compiler was found")

    monkeypatch.setattr(device_check, "device_toolchain", none)
    device_check.compile_check.cache_clear()
    array = values("float16", 0)
    assert not is_right(DeviceCheck(tvm.cpu()), array, array, ACCEPTED)
    device_check.compile_check.cache_clear()


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "int32"])
def test_it_builds_for_a_gpu(dtype: str) -> None:
    target = resolve_target("cuda:sm_90a").target
    with device_toolchain(target), target:
        assert tvm.compile(check_module(dtype, target), target) is not None


def test_the_cases_build_for_a_gpu() -> None:
    target = resolve_target("cuda:sm_90a").target
    for mod in (add_one_mod(size=SIZE), idle_mod()):
        with device_toolchain(target), target:
            assert tvm.compile(on_threads(mod), target) is not None


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BuildPool]:
    with closing(BuildPool(1, tmp_path_factory.mktemp("artifacts"))) as opened:
        yield opened


def idle_mod() -> tvm.ir.IRModule:
    """Return a module that writes the first element of its output and no other."""
    text, loop = add_one_mod(size=SIZE).script(), f"in range({SIZE}):"
    assert loop in text
    return tvm.script.from_source(text.replace(loop, "in range(1):"))


def on_threads(mod: tvm.ir.IRModule) -> tvm.ir.IRModule:
    """Return the module with a GPU's thread for each element."""
    schedule = tvm.s_tir.Schedule(mod)
    (loop,) = schedule.get_loops(schedule.get_sblock("C"))
    block, thread = schedule.split(loop, [None, 128])
    schedule.bind(block, "blockIdx.x")
    schedule.bind(thread, "threadIdx.x")
    return schedule.mod


def request_for(pool: BuildPool, place: Place, mod: tvm.ir.IRModule, device: str = "cpu:0") -> MeasureRequest:
    """Return the request to measure a module, where `A + 1` is right."""
    target = resolve_target("cuda").target if device.startswith("cuda") else place.target.target
    reference = built(pool, place.target.target, add_one_mod(size=SIZE))
    spec = spec_of(mod, "add-one", reference=reference, tolerance=KernelTolerance(1e-6, 1e-6))
    artifact = built(pool, target, on_threads(mod) if device != "cpu:0" else mod)
    options = MeasureOptions(repeats=2, contender_repeats=0, min_repeat_s=0.0005)
    return MeasureRequest(str(artifact.content), device, spec, options, 0)


def mismatches(requests: list[MeasureRequest], options: MeasureOptions) -> list[str | None]:
    """Return what a measuring process tells of each candidate, all compared with the first one's reference."""
    answer = measure_worker.start()
    assert answer(ReferenceRequest(requests[0])) is True
    found = []
    for one in requests:
        replies = answer(dataclasses.replace(one, options=options, spec=requests[0].spec))
        assert isinstance(replies, tuple)
        reply = replies[0]
        assert isinstance(reply, MeasureReply)
        found.append(reply.mismatch)
    return found


@pytest.fixture(scope="module")
def requests_here(pool: BuildPool, place: Place) -> list[MeasureRequest]:
    """A right candidate, a wrong one, one that writes next to nothing, and the right one again."""
    mods = (add_one_mod(size=SIZE), add_one_mod(1.5, size=SIZE), idle_mod(), add_one_mod(size=SIZE))
    return [request_for(pool, place, mod) for mod in mods]


def test_a_measuring_process_gives_the_same_verdicts_and_words_either_way(
    requests_here: list[MeasureRequest], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process's own code for a GPU, on this CPU: what is compared stays on the device."""
    asked: list[bool] = []
    judge = DeviceCheck.is_right

    def noted(*arguments: object) -> bool:
        asked.append(judge(*arguments))  # type: ignore[arg-type]
        return asked[-1]

    monkeypatch.setattr(DeviceCheck, "is_right", noted)
    options = dataclasses.replace(requests_here[0].options, rotate=False)
    on_host = mismatches(requests_here, options)
    assert asked == []
    monkeypatch.setattr(measure_worker, "_is_cpu", lambda device: False)
    assert mismatches(requests_here, options) == on_host
    # The first candidate is the best so far and compared on fresh values too; so may the last be.
    assert asked[:4] == [True, True, False, False]
    assert all(asked[4:])
    assert on_host[0] is None
    assert on_host[3] is None
    assert all("elements are off by more than" in str(one) for one in on_host[1:3])
    asked.clear()
    assert mismatches(requests_here, dataclasses.replace(options, compare_on_device=False)) == on_host
    assert asked == []


def test_a_reference_overwritten_on_the_device_refuses_nobody(
    requests_here: list[MeasureRequest], monkeypatch: pytest.MonkeyPatch
) -> None:
    right = requests_here[0]
    monkeypatch.setattr(measure_worker, "_is_cpu", lambda device: False)
    right = dataclasses.replace(right, options=dataclasses.replace(right.options, rotate=False))
    measurer = measure_worker._Measurer()
    measurer.make_references(right)
    assert measurer.measure(right).mismatch is None
    for workload in measurer._workloads.values():
        for there, _ in workload.held.values():
            there.copyfrom(np.zeros(SIZE, np.float32))
    assert measurer.measure(right).mismatch is None
    kept = next(workload for workload in reversed(measurer._workloads.values()) if workload.expected is not None)
    assert not kept.held
    assert measurer.measure(right).mismatch is None


@pytest.mark.parametrize("on_gpu", [False, True])
@pytest.mark.parametrize(
    ("limit", "kept"), [({}, 2), ({"_KEPT_HOST_MAX": 3 * 4 * SIZE}, 1), ({"_KEPT_SHARE": 1 << 62}, 1)]
)
def test_arguments_of_earlier_tasks_stay_as_far_as_memory_allows(
    requests_here: list[MeasureRequest], monkeypatch: pytest.MonkeyPatch, on_gpu: bool, limit: dict[str, int], kept: int
) -> None:
    """A set of arguments is an input and an output of SIZE float32: two are kept, or one that is too large alone."""
    monkeypatch.setattr(measure_worker, "_is_cpu", lambda device: not on_gpu)
    for name, value in limit.items():
        monkeypatch.setattr(measure_worker, name, value)
    measurer = measure_worker._Measurer()
    for seed in range(2):
        measurer._workload(requests_here[0], seed, tvm.cpu())
    assert [key[2] for key in measurer._workloads] == [0, 1][-kept:]


@pytest.mark.gpu
@needs_gpu
def test_a_gpu_gives_the_hosts_verdicts(pool: BuildPool, place: Place) -> None:
    mods = (add_one_mod(size=SIZE), add_one_mod(1.5, size=SIZE), idle_mod(), add_one_mod(size=SIZE))
    requests = [request_for(pool, place, mod, "cuda:0") for mod in mods]
    there = mismatches(requests, requests[0].options)
    assert there == mismatches(requests, dataclasses.replace(requests[0].options, compare_on_device=False))
    assert [one is None for one in there] == [True, False, False, True]


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "int8", "int32"])
def test_a_gpu_finds_one_wrong_element(dtype: str) -> None:
    device = tvm.cuda(0)
    check = DeviceCheck(device)
    expected = values(dtype, 1)
    tensors = []
    for place in (None, 0, SIZE - 1):
        output = expected.copy()
        if place is not None:
            output[place] += np.array(1).astype(output.dtype)
        tensor = tvm.runtime.empty((SIZE,), dtype, device)
        tensor.copyfrom(output)
        tensors.append(tensor)
    accepted = absolute_bound(expected, ACCEPTED)
    assert [check.is_right(one, tensors[0], ACCEPTED.rtol, accepted) for one in tensors] == [True, False, False]
