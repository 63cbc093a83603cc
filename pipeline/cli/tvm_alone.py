"""Keeps PyTorch out of TVM's import: TVM takes it in wherever it is installed, and no command needs that.

TVM takes 2.5 s to import with PyTorch and 0.7 s without it (2 cores, torch 2.14).
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

_TORCH = "torch"


def leave_torch_out_of_tvm() -> None:
    """From now on TVM is imported as where PyTorch is not installed; afterwards that can be imported as ever."""
    sys.meta_path.insert(0, _Finder())


class _Finder(MetaPathFinder):
    def __init__(self) -> None:
        self._left = {"tvm", "tvm_ffi"}

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Find TVM's packages as the others do, to be loaded without PyTorch."""
        if fullname not in self._left:
            return None
        self._left.remove(fullname)
        spec = importlib.util.find_spec(fullname)
        if spec is None or spec.loader is None or _TORCH in sys.modules:
            return spec
        load = spec.loader.exec_module

        def load_alone(module: ModuleType) -> None:
            # What Python takes for a module that is not there.
            sys.modules[_TORCH] = None  # type: ignore[assignment]
            try:
                load(module)
            finally:
                del sys.modules[_TORCH]

        spec.loader.exec_module = load_alone  # type: ignore[method-assign]
        return spec
