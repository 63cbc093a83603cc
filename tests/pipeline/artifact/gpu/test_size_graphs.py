"""Which calls take a CUDA graph of their sizes, with a driver that only counts launches."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from contextlib import nullcontext
from types import SimpleNamespace
from typing import cast

import pytest
import tvm
from tvm.runtime import Tensor
from tvm.runtime.vm import VirtualMachine

from relaxtune.pipeline.artifact.gpu.size_graphs import Addresses, Result, SizeGraphs, Sizes, _Graph
from relaxtune.pipeline.artifact.gpu.turns import Turns


class Counted(SizeGraphs):
    """Graphs of calls that return their first input; `handles` holds the sizes of each that has a graph."""

    def __init__(self, launches: list[int]) -> None:
        turns = OneGpu(launches)
        super().__init__(cast(VirtualMachine, None), tvm.cpu(0), lambda tensors: (tensors[0],), cast(Turns, turns))
        self.handles: list[Sizes] = []

    def _capture(self, sizes: Sizes, tensors: Sequence[Tensor], own: tuple[Tensor, ...] | None) -> _Graph:
        self.handles.append(sizes)
        read = tensors if own is None else own
        places: Addresses = tuple(one.data_ptr() for one in read)
        return _Graph(ctypes.c_void_p(len(self.handles)), own, places, (read[0],), [])

    def _destroy(self, graph: _Graph) -> None:
        assert graph.handle.value is not None


class OneGpu:
    """Turns on a GPU that only counts launches."""

    stream = 0

    def __init__(self, launches: list[int]) -> None:
        self.gpu = SimpleNamespace(launch=lambda graph, _stream: launches.append(graph.value))
        self.pool = nullcontext

    def copy(self, tensor: Tensor, to: Tensor) -> None:
        tensor.copyto(to)


@pytest.fixture
def launches() -> list[int]:
    return []


def tensors_of(*shapes: tuple[int, ...]) -> list[Tensor]:
    return [tvm.runtime.empty(shape, "float32") for shape in shapes]


def called(graphs: SizeGraphs, tensors: Sequence[Tensor]) -> Result:
    return graphs(tensors, tuple([tuple(one.shape) for one in tensors]))


def test_call_with_the_very_tensors_of_the_call_before_launches_its_graph(launches: list[int]) -> None:
    graphs, small, large = Counted(launches), tensors_of((2, 3), (1,)), tensors_of((4, 3), (1,))
    called(graphs, small)
    assert graphs.again(small) is None  # no graph yet
    called(graphs, small)
    assert graphs.again(tuple(small)) is not None
    assert graphs.again(large) is None
    assert graphs.again(small[:1]) is None
    for _ in range(2):
        called(graphs, large)
    assert graphs.again(small) is None  # the call before was of the large ones
    assert graphs.again(large) is not None
    assert launches == [1, 1, 2, 2]


def test_call_with_other_tensors_of_the_sizes_is_never_taken_for_the_call_before(launches: list[int]) -> None:
    graphs, first, other = Counted(launches), tensors_of((2, 3)), tensors_of((2, 3))
    for _ in range(2):
        called(graphs, first)
    assert graphs.again(other) is None
    (out,) = called(graphs, other)
    # The graph has inputs of its own from now on, into which each call copies.
    assert out.data_ptr() not in (first[0].data_ptr(), other[0].data_ptr())
    assert graphs.again(other) is None
    assert launches == [1, 2]
