"""TVM modules as bytes: a module is thousands of small objects, and a driver holds thousands of modules."""

from __future__ import annotations

import zlib
from dataclasses import dataclass

import tvm
from tvm_ffi.serialization import from_json_graph_str

from relaxtune.tuning_db.metaschedule import ir_to_json


@dataclass(frozen=True)
class PackedModule:
    """A module in the form in which it is sent and kept: its JSON text, compressed."""

    packed: bytes

    @classmethod
    def of(cls, mod: tvm.ir.IRModule) -> PackedModule:
        """Return a module's (compressed at level 1: a sixth of its bytes)."""
        return cls(zlib.compress(ir_to_json(mod).encode(), 1))

    @property
    def text(self) -> str:
        """Return the text of `ir_to_json`, a hundred times as fast as another call of it."""
        return zlib.decompress(self.packed).decode()

    def make(self) -> tvm.ir.IRModule:
        """Return the module, anew each time."""
        # It was written by this version of TVM: nothing in it has to be brought up to date, which takes five times as
        # long as reading it.
        mod: tvm.ir.IRModule = from_json_graph_str(self.text)
        return mod
