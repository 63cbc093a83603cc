"""`TokenList`: where the tokens of a call are, for a module that leaves padding out."""

from __future__ import annotations

import math
from collections.abc import Sequence

from tvm.runtime import Tensor
from tvm.runtime.vm import VirtualMachine

from relaxtune.models import TensorSpec
from relaxtune.models.unpadding import ENTRY, Unpadding


class TokenList:
    """Lists the tokens of a mask on the device; how many there are is read from there, four bytes a call."""

    def __init__(self, machine: VirtualMachine, inputs: Sequence[TensorSpec], unpadding: Unpadding) -> None:
        self._list = machine[ENTRY]
        self._mask = [spec.name for spec in inputs].index(unpadding.mask)
        self._unpadding = unpadding

    def __call__(self, tensors: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """Return the last inputs of `main` for a call's tensors."""
        mask = tensors[self._mask]
        rows, slots, count = self._list(mask)
        size = self._unpadding.size(int(count.numpy()[0]), math.prod(mask.shape))
        return rows._create_view((size,)), slots
