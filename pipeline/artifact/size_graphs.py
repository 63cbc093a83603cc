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
from functools import cache
from operator import is_

import tvm_ffi
from tvm.runtime import Device, Tensor, empty
from tvm.runtime.vm import VirtualMachine, VMInstrumentReturnKind

from relaxtune.pipeline.codegen.cuda_libraries import DRIVER
from relaxtune.pipeline.errors import PipelineError

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
    """Runs calls of any sizes, as graphs where sizes come again.

    Parameters
    ----------
    machine, device
        What runs, and where.
    run
        Takes the inputs and returns the outputs.
    """

    def __init__(self, machine: VirtualMachine, device: Device, run: Callable[[Sequence[Tensor]], Result]) -> None:
        self._machine, self._device, self._run = machine, device, run
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
                graph = self._graphs[sizes] = self._capture(sizes, tensors, self._own_inputs(tensors))
        elif sizes in self._seen:
            own = None if self._seen.pop(sizes) == addresses else self._own_inputs(tensors)
            graph = self._graphs[sizes] = self._capture(sizes, tensors, own)
            self._forget()
        else:
            self._seen[sizes] = addresses
            if len(self._seen) > REMEMBERED_MAX:
                self._seen.popitem(last=False)
            graph = None
        if graph is None:
            return self._run(tensors)
        if graph.inputs is None:
            self._last = tuple(tensors), graph
        else:
            for tensor, own_tensor in zip(tensors, graph.inputs, strict=True):
                tensor.copyto(own_tensor)
        return self._launch(graph)

    def _launch(self, graph: _Graph) -> Result:
        _check(_driver().cuGraphLaunch(graph.handle, ctypes.c_void_p(tvm_ffi.get_raw_stream(self._device))), "launch")
        return graph.result

    def _own_inputs(self, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        return tuple(empty(one.shape, str(one.dtype), self._device) for one in tensors)

    def _capture(self, sizes: Sizes, tensors: Sequence[Tensor], own: tuple[Tensor, ...] | None) -> _Graph | None:
        """Return the graph of a call that reads its own inputs, or the given ones; None where there is none.

        Nothing has run.
        """
        inputs = tensors if own is None else own
        storages: list[object] = []
        driver, captured, handle = _driver(), ctypes.c_void_p(), ctypes.c_void_p()
        stream = self._device.create_raw_stream()
        try:
            with tvm_ffi.use_raw_stream(self._device, stream), self._held(storages):
                _check(driver.cuStreamBeginCapture_v2(ctypes.c_void_p(stream), _RELAXED), "begin capture")
                try:
                    result = self._run(inputs)
                finally:
                    ended = driver.cuStreamEndCapture(ctypes.c_void_p(stream), ctypes.byref(captured))
            _check(ended, "end capture")
            made = driver.cuGraphInstantiateWithFlags(ctypes.byref(handle), captured, ctypes.c_ulonglong(0))
            _check(made, "instantiate")
        except (PipelineError, RuntimeError) as e:
            logger.warning("calls of sizes %s run without a CUDA graph: %s", sizes, str(e).strip().splitlines()[-1])
            return None
        finally:
            if captured:
                driver.cuGraphDestroy(captured)
            self._device.free_raw_stream(stream)
        self.captured += 1
        return _Graph(handle, own, tuple(one.data_ptr() for one in inputs), result, storages)

    @contextmanager
    def _held(self, storages: list[object]) -> Iterator[None]:
        """Keep what the machine allocates inside the block."""

        def note(_function: object, name: str, before: bool, returned: object, *_arguments: object) -> int:
            if not before and name == _ALLOCATION:
                storages.append(returned)
            return int(VMInstrumentReturnKind.NO_OP)

        self._machine.set_instrument(note)
        try:
            yield
        finally:
            self._machine.set_instrument(None)

    def _forget(self) -> None:
        """Give up the graphs that were not used for longest."""
        while len(self._graphs) > GRAPHS_MAX:
            _, graph = self._graphs.popitem(last=False)
            if graph is not None:
                self._destroy(graph)

    def _destroy(self, graph: _Graph) -> None:
        self._device.sync()
        _driver().cuGraphExecDestroy(graph.handle)


@cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL(DRIVER)


def _check(status: int, what: str) -> None:
    if status:
        raise PipelineError(f"the CUDA driver's answer to {what} is error {status}")
