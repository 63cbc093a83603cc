"""CUDA graphs of a module with symbolic sizes: one for each set of sizes that is called again.

The first call of new sizes runs the kernels one by one; the second one captures them; later ones launch the graph. The
least recently used graphs go. A graph reads its inputs where the caller keeps them, as long as that is one place; once
a call's inputs lie elsewhere, from tensors of its own, into which each call copies. (On an H200, the three copies of
BERT took 30 us of the host's time, those of a decode step's caches 80.) What the module allocates while it is captured
stays the graph's: the pool cannot give it to anything else, nor back to the device.

A call with the very tensors of the call before asks for no size and no address: with 34 of them that took most of the
host's time. For this the tensors are held until a call with others.

Sizes for which the driver makes no graph (a call copies to the host, say) run their kernels one by one for ever.
"""

from __future__ import annotations

import ctypes
import logging
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from operator import is_

import tvm_ffi
from tvm_ffi import Device, Tensor

from relaxtune.pipeline.artifact.gpu.driver import check, driver
from relaxtune.pipeline.artifact.gpu.turns import Turns, uncollected
from relaxtune.pipeline.errors import PipelineError
from relaxtune.pipeline.tvm_runtime.library import VirtualMachine, empty, runtime_function

logger = logging.getLogger(__name__)

#: Sets of sizes that have a graph at a time, and those whose first call is remembered.
GRAPHS_MAX, REMEMBERED_MAX = 32, 1024
_ALLOCATION = "vm.builtin.alloc_storage"
# The driver's enumerations: CU_STREAM_CAPTURE_MODE_RELAXED. Allocations of other threads are no fault of a capture.
_RELAXED = 2

Result = tuple[Tensor, ...]
Sizes = tuple[tuple[int, ...], ...]
Addresses = tuple[int, ...]


@dataclass
class _Graph:
    """An executable graph, what it reads and what it returns; `storages` are the memory in between.

    `inputs` are tensors of its own, or None where it reads the caller's, at `addresses`.
    """

    handle: ctypes.c_void_p
    inputs: tuple[Tensor, ...] | None
    addresses: Addresses
    result: Result
    storages: list[object]


class SizeGraphs:
    """Runs calls of any sizes, as graphs where sizes come again; all calls are inside a turn of the module.

    `run` takes the inputs and returns the outputs. `captured` does the same in a form that can be captured; None where
    `run` can be.
    """

    def __init__(
        self,
        machine: VirtualMachine,
        device: Device,
        run: Callable[[Sequence[Tensor]], Result],
        turns: Turns,
        captured: Callable[[Sequence[Tensor]], Result] | None = None,
    ) -> None:
        self._whole = captured or run
        self._machine, self._device, self._run, self._turns = machine, device, run, turns
        self._graphs: OrderedDict[Sizes, _Graph | None] = OrderedDict()
        self._seen: OrderedDict[Sizes, Addresses] = OrderedDict()
        self.captured = 0
        # The tensors of the last call and the graph that reads them where they are.
        self._last: tuple[Sequence[Tensor], _Graph] | None = None

    def again(self, tensors: Sequence[object]) -> Result | None:
        """Return the outputs of one call with the very tensors of the call before; None for any other."""
        last = self._last
        if last is None or len(tensors) != len(last[0]) or not all(map(is_, tensors, last[0])):
            return None
        return self._launch(last[1])

    def __call__(self, tensors: Sequence[Tensor], sizes: Sizes) -> Result:
        """Return the outputs of one call with inputs of these sizes."""
        self._last = None
        addresses = tuple([tensor.data_ptr() for tensor in tensors])
        if sizes in self._graphs:
            graph = self._graphs[sizes]
            self._graphs.move_to_end(sizes)
            if graph is not None and graph.inputs is None and graph.addresses != addresses:
                self._destroy(graph)
                graph = self._graphs[sizes] = self._capture_in_pool(sizes, tensors, self._own_inputs(tensors))
        elif sizes in self._seen:
            own = None if self._seen.pop(sizes) == addresses else self._own_inputs(tensors)
            graph = self._graphs[sizes] = self._capture_in_pool(sizes, tensors, own)
            while len(self._graphs) > GRAPHS_MAX:
                _, oldest = self._graphs.popitem(last=False)
                if oldest is not None:
                    self._destroy(oldest)
        else:
            self._seen[sizes] = addresses
            if len(self._seen) > REMEMBERED_MAX:
                self._seen.popitem(last=False)
            graph = None
        if graph is None:
            with self._turns.pool():
                return self._run(tensors)
        if graph.inputs is None:
            self._last = tuple(tensors), graph
        else:
            for tensor, own_tensor in zip(tensors, graph.inputs, strict=True):
                self._turns.copy(tensor, own_tensor)
        return self._launch(graph)

    def _launch(self, graph: _Graph) -> Result:
        self._turns.gpu.launch(graph.handle, self._turns.stream)
        return graph.result

    def _own_inputs(self, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        return tuple(empty(one.shape, one.dtype, self._device) for one in tensors)

    def _capture_in_pool(
        self, sizes: Sizes, tensors: Sequence[Tensor], own: tuple[Tensor, ...] | None
    ) -> _Graph | None:
        """Return what `_capture` does. The graph's memory comes from the pool: work of other streams in it is over."""
        with self._turns.pool(), uncollected():
            return self._capture(sizes, tensors, own)

    def _capture(self, sizes: Sizes, tensors: Sequence[Tensor], own: tuple[Tensor, ...] | None) -> _Graph | None:
        """Return the graph of a call that reads its own inputs, or the given ones; None where there is none.

        Nothing has run.
        """
        inputs = tensors if own is None else own
        storages: list[object] = []
        cuda, captured, handle = driver(), ctypes.c_void_p(), ctypes.c_void_p()
        stream = runtime_function("runtime.Device_StreamCreate")(self._device)
        try:
            with tvm_ffi.use_raw_stream(self._device, stream), noted_allocations(self._machine, storages):
                check(cuda.cuStreamBeginCapture_v2(stream, _RELAXED), "begin capture")
                try:
                    result = self._whole(inputs)
                finally:
                    ended = cuda.cuStreamEndCapture(stream, ctypes.byref(captured))
            check(ended, "end capture")
            made = cuda.cuGraphInstantiateWithFlags(ctypes.byref(handle), captured, 0)
            check(made, "instantiate")
        except (PipelineError, RuntimeError) as e:
            self._turns.gpu.forget_error()
            logger.warning("calls of sizes %s run without a CUDA graph: %s", sizes, str(e).strip().splitlines()[-1])
            return None
        finally:
            if captured:
                cuda.cuGraphDestroy(captured)
            runtime_function("runtime.Device_StreamFree")(self._device, stream)
        self.captured += 1
        return _Graph(handle, own, tuple(one.data_ptr() for one in inputs), result, storages)

    def _destroy(self, graph: _Graph) -> None:
        # Its memory goes back to the pool.
        self._turns.wait()
        driver().cuGraphExecDestroy(graph.handle)


@contextmanager
def noted_allocations(machine: VirtualMachine, storages: list[object]) -> Iterator[None]:
    """Add to `storages` the memory that the machine takes from the pool inside the block, which stays taken."""

    def note(_function: object, name: str, before: bool, returned: object, *_arguments: object) -> int:
        if not before and name == _ALLOCATION:
            storages.append(returned)
        return 0

    machine.set_instrument(note)
    try:
        yield
    finally:
        machine.set_instrument(None)
