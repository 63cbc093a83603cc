"""cuBLASLt called through ctypes from torch's libraries: the algorithms that its heuristic offers, or all that it has.

Matrices are row major: C[M, N] = epilogue(A[M, K] @ B [+ residual]), with B as [K, N] or [N, K]. cuBLASLt is column
major, so it is asked for C^T = B^T A^T. Its epilogues: bias, gelu (the tanh form) of the sum with bias; the residual is
its `beta * C`; "requantise" is a product with its `alpha`, rounded to int8.

=============  =======  ==================  =================================================================
operands       sums     C                   B
=============  =======  ==================  =================================================================
float16        float32  float16             [K, N] or [N, K]
int8           int32    int32, int8         [N, K]
float8_e4m3fn  float32  float16, float32    [N, K]; with `exact_sums`, added up in float32 every few products
=============  =======  ==================  =================================================================

Names and numbers: cublasLt.h of CUDA 13.0.
"""

from __future__ import annotations

import ctypes
import itertools
import re
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

WORKSPACE_BYTES = 64 << 20
_COMPUTE_32F, _COMPUTE_32I = 68, 72
_R_32F, _R_16F, _R_8I, _R_32I, _R_8F_E4M3 = 0, 2, 3, 10, 28
# (Operands, C) -> what computes, what scales, operands, C.
_TYPES = {
    ("float16", "float16"): (_COMPUTE_32F, _R_32F, _R_16F, _R_16F),
    ("int8", "int32"): (_COMPUTE_32I, _R_32I, _R_8I, _R_32I),
    ("int8", "int8"): (_COMPUTE_32I, _R_32F, _R_8I, _R_8I),
    ("float8_e4m3fn", "float16"): (_COMPUTE_32F, _R_32F, _R_8F_E4M3, _R_16F),
    ("float8_e4m3fn", "float32"): (_COMPUTE_32F, _R_32F, _R_8F_E4M3, _R_32F),
}
_DESC_TRANSA, _DESC_EPILOGUE, _DESC_BIAS_POINTER, _DESC_FAST_SUMS, _DESC_BIAS_TYPE = 3, 7, 8, 25, 26
_PREFERENCE_WORKSPACE = 1
_EPILOGUES = {"none": 1, "requantise": 1, "add": 1, "bias": 4, "residual": 4, "gelu": 36}
_OP_T = 1
# Of an algorithm: what it can be (lists of uint32), and what it is set to (uint32).
_CAN_TILES, _CAN_STAGES = 6, 13
_TILE, _SPLIT, _REDUCTION, _STAGES = 1, 2, 3, 6
_REDUCE_IN_FLOAT32 = 2
_ALGORITHMS_MAX = 256
# Of a first look at the time of an algorithm.
_LAUNCHES, _ROUNDS = 5, 3
_SPLITS = (1, 2, 3, 4, 6)


# NVIDIA's names: kernels of `sm90_...`, `nvjet_...`, `cutlass_90...` have wgmma. Those of `ampere_...`, `sm80_...`,
# `cutlass_80...` and older ones are compiled for Hopper, too, and have mma.sync.
_OLD = re.compile(r"ampere|turing|volta|(?<![0-9a-z])sm_?[78]\d|cutlass_+[78]\d", re.IGNORECASE)
_NEW = re.compile(r"sm_?9\d|sm_?1\d\d|cutlass_+9\d|nvjet|hopper|gmma", re.IGNORECASE)
# What adds up the parts of a sum.
_REDUCTION_NAME = re.compile(r"splitk.*reduce|reduce.*splitk", re.IGNORECASE)


def is_without_wgmma(kernels: Sequence[str]) -> bool:
    """Whether the names of a launch's kernels are of a GPU before Hopper; unknown names are not."""
    multiplying = [name for name in kernels if not _REDUCTION_NAME.search(name)]
    return bool(multiplying) and all(_OLD.search(name) and not _NEW.search(name) for name in multiplying)


class _Algorithm(ctypes.Structure):
    _fields_ = [("data", ctypes.c_uint64 * 8)]


class _Heuristic(ctypes.Structure):
    _fields_ = [
        ("algo", _Algorithm),
        ("workspace_bytes", ctypes.c_size_t),
        ("state", ctypes.c_int),
        ("waves", ctypes.c_float),
        ("reserved", ctypes.c_int * 4),
    ]


class CublasLt:
    """A handle of cuBLASLt, with a workspace."""

    def __init__(self) -> None:
        import torch

        # In the process already: torch depends on it.
        torch.zeros(16, 16, device="cuda").half() @ torch.zeros(16, 16, device="cuda").half()
        paths = {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if "libcublasLt" in line}
        self._library = ctypes.CDLL(min(paths))
        self._library.cublasLtGetVersion.restype = ctypes.c_size_t
        self.version = int(self._library.cublasLtGetVersion())
        self._handle = ctypes.c_void_p()
        self._call("cublasLtCreate", ctypes.byref(self._handle))
        self._workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device="cuda")
        # Number of an algorithm -> whether its kernels are without wgmma, as far as they were looked at.
        self.families: dict[int, bool] = {}

    def problem(
        self,
        rows: int,
        n: int,
        k: int,
        epilogue: str,
        *,
        transposed: bool,
        operands: str = "float16",
        output: str = "float16",
        scale: float = 1.0,
        exact_sums: bool = False,
    ) -> Problem:
        """Return a problem whose algorithms can be listed and launched.

        Parameters
        ----------
        rows, n, k : int
            M, N and K.
        epilogue : str
            "none", "bias", "gelu" (after a bias), "add" (a residual), "residual" (after a bias) or "requantise".
        transposed : bool
            Whether B is [N, K].
        operands, output : str
            dtypes of A and B, and of C.
        scale : float
            Of "requantise".
        exact_sums : bool
            Of float8: whether sums are added up in float32 instead of in the tensor cores alone.
        """
        return Problem(self, rows, n, k, epilogue, transposed, (operands, output), scale, exact_sums)

    def _call(self, name: str, *arguments: Any) -> None:
        status = getattr(self._library, name)(*arguments)
        if status:
            raise RuntimeError(f"{name} failed with status {status} (cublasStatus_t in cublas_api.h).")


class Problem:
    """One shape and epilogue; make it with `CublasLt.problem`."""

    def __init__(
        self,
        library: CublasLt,
        rows: int,
        n: int,
        k: int,
        epilogue: str,
        transposed: bool,
        dtypes: tuple[str, str],
        scale: float,
        exact_sums: bool,
    ) -> None:
        self._lt, self._epilogue = library, epilogue
        self._residual = epilogue in ("add", "residual")
        compute, scales, factors, output = _TYPES[dtypes]
        self._types = (compute, scales, factors, factors, output, output)
        number = ctypes.c_int32 if scales == _R_32I else ctypes.c_float
        self._alpha, self._beta = number(1 if scales == _R_32I else scale), number(int(self._residual))
        self._descriptor = ctypes.c_void_p()
        library._call("cublasLtMatmulDescCreate", ctypes.byref(self._descriptor), compute, scales)
        if transposed:
            self._set(_DESC_TRANSA, ctypes.c_int32(_OP_T))
        self._set(_DESC_EPILOGUE, ctypes.c_uint32(_EPILOGUES[epilogue]))
        if factors == _R_8F_E4M3:
            self._set(_DESC_FAST_SUMS, ctypes.c_int8(int(not exact_sums)))
            self._set(_DESC_BIAS_TYPE, ctypes.c_int32(_R_16F))
        self._b = self._layout(*((k, n) if transposed else (n, k)), factors)
        self._a, self._c = self._layout(k, rows, factors), self._layout(n, rows, output)

    @property
    def families(self) -> dict[int, bool]:
        """Whether the kernels of an algorithm are without wgmma, by its number, as far as they were looked at."""
        return self._lt.families

    def algorithms(self, count: int) -> list[_Heuristic]:
        """Return up to `count` algorithms, the one that cuBLASLt would take first."""
        preference = ctypes.c_void_p()
        call = self._lt._call
        call("cublasLtMatmulPreferenceCreate", ctypes.byref(preference))
        size = ctypes.c_size_t(WORKSPACE_BYTES)
        call("cublasLtMatmulPreferenceSetAttribute", preference, _PREFERENCE_WORKSPACE, ctypes.byref(size), 8)
        found, returned = (_Heuristic * count)(), ctypes.c_int()
        layouts = (self._b, self._a, self._c, self._c)
        call(
            "cublasLtMatmulAlgoGetHeuristic",
            self._lt._handle,
            self._descriptor,
            *layouts,
            preference,
            count,
            found,
            ctypes.byref(returned),
        )
        return [one for one in found[: returned.value] if one.state == 0]

    def every_algorithm(self) -> dict[int, list[_Heuristic]]:
        """Return all that cuBLASLt can run the problem by, by the number of its kernel's family: tiles, stages, splits.

        The heuristic offers few, and none that it holds for slower.
        """
        call, types = self._lt._call, self._types
        numbers, count = (ctypes.c_int * _ALGORITHMS_MAX)(), ctypes.c_int()
        call("cublasLtMatmulAlgoGetIds", self._lt._handle, *types, _ALGORITHMS_MAX, numbers, ctypes.byref(count))
        found: dict[int, list[_Heuristic]] = {}
        for number in numbers[: count.value]:
            algorithm = _Algorithm()
            call("cublasLtMatmulAlgoInit", self._lt._handle, *types, number, ctypes.byref(algorithm))
            tiles, stages = (self._list(algorithm, which) or [0] for which in (_CAN_TILES, _CAN_STAGES))
            for tile, stage in itertools.product(tiles, stages):
                for split in _SPLITS:
                    one = _Heuristic(_Algorithm(algorithm.data))
                    reduction = _REDUCE_IN_FLOAT32 if split > 1 else 0
                    settings = ((_TILE, tile), (_STAGES, stage), (_SPLIT, split), (_REDUCTION, reduction))
                    if not (all(self._configure(one.algo, *setting) for setting in settings) and self._checks(one)):
                        break
                    found.setdefault(number, []).append(one)
        return found

    def _list(self, algorithm: _Algorithm, which: int) -> list[int]:
        """Return the values that an algorithm can be set to."""
        get, size = self._lt._library.cublasLtMatmulAlgoCapGetAttribute, ctypes.c_size_t()
        if get(ctypes.byref(algorithm), which, None, ctypes.c_size_t(0), ctypes.byref(size)):
            return []
        values = (ctypes.c_uint32 * (size.value // 4))()
        status = get(ctypes.byref(algorithm), which, values, size, ctypes.byref(size))
        return [] if status else list(values)

    def _configure(self, algorithm: _Algorithm, attribute: int, value: int) -> bool:
        set_to, word = self._lt._library.cublasLtMatmulAlgoConfigSetAttribute, ctypes.c_uint32(value)
        return not set_to(ctypes.byref(algorithm), attribute, ctypes.byref(word), ctypes.c_size_t(4))

    def _checks(self, one: _Heuristic) -> bool:
        """Whether an algorithm runs the problem as it is set, in the workspace that there is."""
        result, check = _Heuristic(), self._lt._library.cublasLtMatmulAlgoCheck
        layouts = (self._b, self._a, self._c, self._c)
        status = check(self._lt._handle, self._descriptor, *layouts, ctypes.byref(one.algo), ctypes.byref(result))
        return not status and not result.state and result.workspace_bytes <= WORKSPACE_BYTES

    def launch(self, algorithm: _Heuristic, tensors: dict[str, Any], bias: Any | None) -> None:
        """Launch on torch's current stream: A, B and `residual` into `output` of `tensors`; `bias` is float16 [N]."""
        import torch

        if bias is not None:
            # Read when the kernel is launched.
            self._set(_DESC_BIAS_POINTER, ctypes.c_uint64(bias.data_ptr()))
        lt = self._lt
        c = tensors["residual"] if self._residual else tensors["output"]
        lt._call(
            "cublasLtMatmul",
            lt._handle,
            self._descriptor,
            ctypes.byref(self._alpha),
            ctypes.c_void_p(tensors["B"].data_ptr()),
            self._b,
            ctypes.c_void_p(tensors["A"].data_ptr()),
            self._a,
            ctypes.byref(self._beta),
            ctypes.c_void_p(c.data_ptr()),
            self._c,
            ctypes.c_void_p(tensors["output"].data_ptr()),
            self._c,
            ctypes.byref(algorithm.algo),
            ctypes.c_void_p(lt._workspace.data_ptr()),
            ctypes.c_size_t(WORKSPACE_BYTES),
            ctypes.c_void_p(torch.cuda.current_stream().cuda_stream),
        )

    def _set(self, attribute: int, value: Any) -> None:
        size = ctypes.c_size_t(ctypes.sizeof(value))
        self._lt._call("cublasLtMatmulDescSetAttribute", self._descriptor, attribute, ctypes.byref(value), size)

    def _layout(self, rows: int, columns: int, dtype: int) -> ctypes.c_void_p:
        """Return the layout of a column-major matrix without gaps."""
        layout = ctypes.c_void_p()
        sizes = (ctypes.c_uint64(rows), ctypes.c_uint64(columns), ctypes.c_int64(rows))
        self._lt._call("cublasLtMatrixLayoutCreate", ctypes.byref(layout), dtype, *sizes)
        return layout


def fastest_without_wgmma(problem: Problem, launch: Callable[[_Heuristic], None]) -> tuple[_Heuristic | None, str]:
    """Return the fastest of all algorithms whose kernels are older than Hopper, and their names; None: there is none.

    `launch` launches one. A family's first kernel stands for all of them; the one that is returned is looked at itself.
    """
    times: dict[float, _Heuristic] = {}
    families = problem.families
    for number, offered in problem.every_algorithm().items():
        if number not in families:
            families[number] = is_without_wgmma(_kernels_of(partial(launch, offered[0])))
        if families[number]:
            times |= {_microseconds(partial(launch, one)): one for one in offered}
    for best in sorted(times):
        names = _kernels_of(partial(launch, times[best]))
        if is_without_wgmma(names):
            return times[best], f"{best:.2f} us, the fastest of {len(times)}: {', '.join(names)}"
    return None, "none is without wgmma"


def _kernels_of(launch: Callable[[], None]) -> tuple[str, ...]:
    """Return the names of the kernels of a launch."""
    import torch

    launch()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiled:
        launch()
        torch.cuda.synchronize()
    events = profiled.events() or []
    return tuple(event.name for event in events if event.device_type == torch.autograd.DeviceType.CUDA)


def _microseconds(launch: Callable[[], None]) -> float:
    """Return the least mean of a few launches that follow each other, in microseconds."""
    import torch

    launch()
    found = []
    for _ in range(_ROUNDS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(_LAUNCHES):
            launch()
        end.record()
        end.synchronize()
        found.append(begin.elapsed_time(end) * 1e3 / _LAUNCHES)
    return min(found)
