"""torch whose linear layers run on `mma.sync`: cuBLASLt's kernels without wgmma, the fastest one for each shape.

cuBLAS has no switch for that. So `torch.nn.functional.linear` is taken over: for each shape, all that cuBLASLt can run
it by (`cublaslt.Problem.every_algorithm`, not its heuristic alone) is sorted by the names of the kernels that the
profiler sees. Those of Ampere and before remain, are timed, and the fastest one is taken, bias included. A shape for
which none remains stays torch's own, and is counted.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from benchmarks.kernels.cublaslt import CublasLt, fastest_without_wgmma

Chosen = Callable[[Tensor, Tensor, Tensor | None], Tensor]


class LinearOnMmaSync(TorchFunctionMode):
    """Inside it, linear layers of half precision run on mma.sync; `notes` says by which kernels."""

    def __init__(self) -> None:
        super().__init__()
        self._library = CublasLt()
        self._chosen: dict[tuple[int, ...], Chosen | None] = {}
        self.notes: dict[str, str] = {}

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Take over `linear`."""
        given = dict(kwargs or {})
        if func is not F.linear or given or args[0].dtype != torch.float16:
            return func(*args, **given)
        x, weight, bias = (*args, None)[:3]
        key = (x.numel() // x.shape[-1], *weight.shape, int(bias is None))
        if key not in self._chosen:
            self._chosen[key] = self._choose(x, weight, bias)
        chosen = self._chosen[key]
        return func(*args) if chosen is None else chosen(x, weight, bias)

    def _choose(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Chosen | None:
        rows, (n, k) = x.numel() // x.shape[-1], weight.shape
        problem = self._library.problem(rows, n, k, "none" if bias is None else "bias", transposed=True)
        output = torch.empty(rows, n, device=x.device, dtype=x.dtype)
        tensors = {"A": x.reshape(rows, k).contiguous(), "B": weight, "output": output}
        algorithm, note = fastest_without_wgmma(problem, lambda one: problem.launch(one, tensors, bias))
        self.notes[f"{rows}x{n}x{k}{'' if bias is None else ' bias'}"] = note
        if algorithm is None:
            return None

        def run(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
            result = torch.empty(*x.shape[:-1], n, device=x.device, dtype=x.dtype)
            problem.launch(algorithm, {"A": x.reshape(rows, k).contiguous(), "B": weight, "output": result}, bias)
            return result

        return run
