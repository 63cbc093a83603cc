"""Which calls wait for the GPU, with one that only counts: streams have names that are theirs alone."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import cast

import numpy as np
import pytest
import tvm
import tvm_ffi

from relaxtune.pipeline.artifact import module
from relaxtune.pipeline.artifact.gpu import turns
from relaxtune.pipeline.artifact.gpu.driver import Gpu
from relaxtune.pipeline.artifact.gpu.turns import Turns
from relaxtune.pipeline.artifact.module import Module
from relaxtune.pipeline.codegen.cuda_libraries import CUDART, DRIVER
from relaxtune.pipeline.errors import PipelineError
from relaxtune.schedules.libraries.vendors import CUBLASLT

DEVICE = tvm.cpu(0)
CAPTURED = 11


class Counted:
    """A GPU that counts waits; a stream that was made again under an old handle has another identity."""

    def __init__(self) -> None:
        self.waits = 0
        self.made: dict[int, int] = {}
        self.copies: list[tuple[int, int, int, int]] = []
        self.forgotten: list[bool] = []

    def make_current(self) -> None:
        pass

    def wait(self) -> None:
        self.waits += 1

    def identity(self, stream: int) -> int:
        return stream + 1000 * self.made.get(stream, 0)

    def is_capturing(self, stream: int) -> bool:
        return stream == CAPTURED

    def forget_error(self, *, no_memory_only: bool = False) -> None:
        self.forgotten.append(no_memory_only)

    def copy(self, start: int, to: int, size: int, stream: int) -> None:
        self.copies.append((start, to, size, stream))


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Counted:
    counted = Counted()
    shared = turns._Shared(cast(Gpu, counted))
    monkeypatch.setattr(turns, "_shared_on", lambda _device: shared)
    return counted


def call(turn: Turns, stream: int, *, in_pool: bool = False) -> None:
    with tvm_ffi.use_raw_stream(DEVICE, stream), turn:
        if in_pool:
            with turn.pool():
                pass


def test_graphs_of_several_modules_on_streams_of_their_own_never_wait(gpu: Counted) -> None:
    first, second = Turns(DEVICE), Turns(DEVICE)
    for _ in range(3):
        call(first, 7)
        call(second, 9)
    assert gpu.waits == 0


def test_a_module_waits_when_its_stream_changes_also_to_a_new_one_with_the_old_handle(gpu: Counted) -> None:
    turn = Turns(DEVICE)
    waits = []
    for stream in (7, 7, 9, 7):
        call(turn, stream)
        waits.append(gpu.waits)
    assert waits == [0, 0, 1, 2]
    gpu.made[7] = 1
    call(turn, 7)
    assert gpu.waits == 3


def test_stream_that_the_caller_captures_is_refused(gpu: Counted) -> None:
    turn = Turns(DEVICE)
    for stream in (7, 0):
        with tvm_ffi.use_raw_stream(DEVICE, stream):
            turn.refuse_capture()
    with (
        tvm_ffi.use_raw_stream(DEVICE, CAPTURED),
        pytest.raises(PipelineError, match="being captured into a CUDA graph, which cannot"),
    ):
        turn.refuse_capture()


def test_call_that_failed_leaves_no_error_for_what_its_thread_does_next(gpu: Counted) -> None:
    turn = Turns(DEVICE)
    call(turn, 7)
    assert gpu.forgotten == []
    call(turn, 7, in_pool=True)  # where TVM finds no memory, it frees some and tries again
    assert gpu.forgotten == [True]
    with pytest.raises(ValueError, match="wrong"), turn:
        raise ValueError("wrong")
    assert gpu.forgotten == [True, False]


def test_calls_that_take_memory_of_the_pool_wait_for_those_of_other_modules(gpu: Counted) -> None:
    first, second = Turns(DEVICE), Turns(DEVICE)
    call(first, 7, in_pool=True)
    call(second, 9, in_pool=True)
    assert gpu.waits == 1
    call(first, 7)  # a launch of its graph
    call(second, 9)
    assert gpu.waits == 1
    call(first, 7, in_pool=True)
    assert gpu.waits == 2


def test_modules_with_a_vendors_library_wait_for_each_other(gpu: Counted) -> None:
    first, second = Turns(DEVICE, apart=False), Turns(DEVICE, apart=False)
    call(first, 7)
    call(second, 9)
    assert gpu.waits == 1


def test_a_module_that_goes_waits_before_its_memory_does(gpu: Counted) -> None:
    class Holder:
        pass

    holder = Holder()
    Turns(DEVICE).end_with(holder)
    gc.collect()
    assert gpu.waits == 0
    del holder
    assert gpu.waits == 1


def waits_for_the_turn(turn: Turns, work: Callable[[], object]) -> bool:
    """Whether work of another thread is done only after the turn of this one."""
    done = threading.Event()
    thread = threading.Thread(target=lambda: (work(), done.set()))
    with turn:
        thread.start()
        early = done.wait(0.3)
    thread.join()
    return done.is_set() and not early


def test_a_module_that_goes_waits_in_a_turn(gpu: Counted) -> None:
    class Holder:
        pass

    holders, turn = [Holder()], Turns(DEVICE)
    turn.end_with(holders[0])
    assert waits_for_the_turn(turn, holders.clear)
    assert gpu.waits == 1


def test_a_module_that_goes_does_not_wait_for_a_turn_for_ever(gpu: Counted, monkeypatch: pytest.MonkeyPatch) -> None:
    class Holder:
        pass

    monkeypatch.setattr(turns, "_TURN_MAX_S", 0.01)
    holders, turn = [Holder()], Turns(DEVICE)
    turn.end_with(holders[0])
    assert not waits_for_the_turn(turn, holders.clear)
    assert gpu.waits == 1


def test_loading_and_copies_to_the_device_wait_for_the_turn(
    gpu: Counted, artifact: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # What goes to the device, and whether that is in a turn.
    inside: dict[str, set[bool]] = {}

    def note(place: object, name: str) -> None:
        original = getattr(place, name)

        def noting(*args: object, **kwargs: object) -> object:
            inside.setdefault(name, set()).add(turn._shared.lock._is_owned())  # type: ignore[attr-defined]
            return original(*args, **kwargs)

        monkeypatch.setattr(place, name, noting)

    turn = Turns(DEVICE)
    note(module, "load_machine")
    note(turns, "tensor_of")
    loaded = Module.load(artifact)
    assert inside == {"load_machine": {True}, "tensor_of": {True}}
    inside.clear()
    feeds = {spec.name: np.zeros(spec.shape, spec.dtype) for spec in loaded.inputs}
    loaded.to_device(feeds)
    assert inside == {"tensor_of": {True}}
    assert waits_for_the_turn(turn, lambda: loaded.to_device(feeds))


@pytest.mark.parametrize("enabled", [True, False])
def test_no_garbage_is_collected_while_a_graph_is_captured(enabled: bool) -> None:
    def fail() -> None:
        with turns.uncollected():
            assert not gc.isenabled()
            raise ZeroDivisionError

    was = gc.isenabled()
    try:
        (gc.enable if enabled else gc.disable)()
        with pytest.raises(ZeroDivisionError):
            fail()
        assert gc.isenabled() == enabled
    finally:
        (gc.enable if was else gc.disable)()


def test_the_turn_is_free_again_where_the_wait_fails(gpu: Counted, monkeypatch: pytest.MonkeyPatch) -> None:
    turn = Turns(DEVICE)
    call(turn, 7)

    def fail() -> None:
        raise RuntimeError("the driver is gone")

    monkeypatch.setattr(gpu, "wait", fail)
    with pytest.raises(RuntimeError, match="the driver is gone"):
        call(turn, 9)
    assert not turn._shared.lock._is_owned()  # type: ignore[attr-defined]


def test_copies_go_to_the_current_stream(gpu: Counted) -> None:
    turn, tensor = Turns(DEVICE), tvm.runtime.tensor(np.zeros((3, 5), "float16"))
    with tvm_ffi.use_raw_stream(DEVICE, 7), turn:
        copy = turn.copied(tensor)
    assert gpu.copies == [(tensor.data_ptr(), copy.data_ptr(), 30, 7)]


def test_modules_on_a_cpu_share_no_turn() -> None:
    first, second = Turns(DEVICE), Turns(DEVICE)
    with first:
        assert second._shared.lock is not first._shared.lock


@pytest.mark.parametrize(("vendors", "waits"), [((), 0), ((CUBLASLT.file,), 2)])
def test_modules_wait_for_each_other_only_where_kernels_call_a_vendors_library(
    gpu: Counted, artifact: Path, vendors: tuple[str, ...], waits: int
) -> None:
    one = Module.load(artifact)
    # Every artifact for CUDA needs these two.
    target = replace(one.manifest.target, libraries=(CUDART, DRIVER, *vendors))
    manifest = replace(one.manifest, target=target)
    modules = [Module(manifest, one._machine, one.device, one._weights, 1) for _ in range(2)]
    for number, stream in ((0, 7), (1, 9), (0, 7)):
        call(modules[number]._turn, stream)
    assert gpu.waits == waits
