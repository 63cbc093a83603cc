"""`TokenList`: where the tokens of a call are, for a module that leaves padding out."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Sequence

import tvm_ffi
from tvm_ffi import Device, Tensor

from relaxtune.models.spec import TensorSpec
from relaxtune.models.unpadding import ENTRY, Unpadding
from relaxtune.pipeline.tvm_runtime.library import VirtualMachine, array_of, empty, synchronise, view

# Shapes of masks whose lists keep their memory at a time.
_SHAPES_MAX = 64


class TokenList:
    """Lists the tokens of a mask on the device; how many there are is read from there, four bytes a call.

    The lists of a shape are written to the same place each time: a CUDA graph reads them there.
    """

    def __init__(
        self, machine: VirtualMachine, device: Device, inputs: Sequence[TensorSpec], unpadding: Unpadding
    ) -> None:
        self._list, self._device = machine[ENTRY], device
        self._mask = [spec.name for spec in inputs].index(unpadding.mask)
        self._unpadding = unpadding
        self._held: OrderedDict[tuple[int, ...], tuple[Tensor, ...]] = OrderedDict()

    def __call__(self, tensors: Sequence[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """Return the last inputs of `main` for a call's tensors."""
        mask = tensors[self._mask]
        rows, spans, slots, count = self._lists_of(tuple(mask.shape))
        self._list(mask, rows, spans, slots, count)
        # TVM reads on the default stream, which does not wait for others.
        synchronise(self._device, tvm_ffi.get_raw_stream(self._device))
        size = self._unpadding.size(int(array_of(count)[0]), math.prod(mask.shape))
        return view(rows, (size,)), view(spans, (size, 2)), slots

    def _lists_of(self, shape: tuple[int, ...]) -> tuple[Tensor, ...]:
        places = math.prod(shape)
        if shape not in self._held:
            shapes = ((places,), (places, 2), shape, (1,))
            self._held[shape] = tuple(empty(one, "int32", self._device) for one in shapes)
        self._held.move_to_end(shape)
        if len(self._held) > _SHAPES_MAX:
            self._held.popitem(last=False)
        return self._held[shape]
