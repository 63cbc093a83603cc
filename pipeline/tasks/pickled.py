"""TVM modules as bytes: a module is thousands of small objects, and a driver holds thousands of modules."""

from __future__ import annotations

import pickle
import zlib
from dataclasses import dataclass

import tvm


@dataclass(frozen=True)
class Pickled:
    """A module in the form in which it is sent and kept."""

    packed: bytes

    @classmethod
    def of(cls, mod: tvm.ir.IRModule) -> Pickled:
        """Return a module's (compressed at level 1: a sixth of its bytes)."""
        return cls(zlib.compress(pickle.dumps(mod), 1))

    def make(self) -> tvm.ir.IRModule:
        """Return the module, anew each time."""
        mod: tvm.ir.IRModule = pickle.loads(zlib.decompress(self.packed))
        return mod
