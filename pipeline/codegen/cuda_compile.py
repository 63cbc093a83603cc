"""CUDA source to a cubin: with NVRTC in this process, or with nvcc in another.

TVM's own driver compiles with `--use_fast_math` in every case: divisions and square roots with an error of 2 ulp, and
denormals flushed to zero. Here that is an option, `FAST_MATH`, off by default. (TVM itself writes `__expf` for `exp`
and the like, whatever the option.)
"""

from __future__ import annotations

import importlib
import subprocess
import tempfile
from pathlib import Path

import tvm

from pipeline.codegen.cuda_source import DeviceSource, prepare_source
from pipeline.errors import LoweringError

ELF_MAGIC = b"\x7fELF"

# Attribute of a CUDA target, so that it is part of every record's target key and of an artifact's manifest:
# --target '{"kind": "cuda", "arch": "sm_90a", "feature.fast_math": true}'
FAST_MATH = "feature.fast_math"
_FAST_MATH_OPTION = "--use_fast_math"

# TVM's code uses the operators and conversions that these macros would hide.
_UNDEFINED = (
    "__CUDA_NO_HALF_OPERATORS__",
    "__CUDA_NO_HALF_CONVERSIONS__",
    "__CUDA_NO_BFLOAT16_OPERATORS__",
    "__CUDA_NO_BFLOAT16_CONVERSIONS__",
    "__CUDA_NO_BFLOAT162_OPERATORS__",
    "__CUDA_NO_BFLOAT162_CONVERSIONS__",
)
# The 8, 6 and 4-bit float headers use them without including the file that defines them.
_EMPTY = (
    "__NV_SILENCE_DEPRECATION_BEGIN",
    "__NV_SILENCE_DEPRECATION_END",
    "__NV_SILENCE_HOST_DEPRECATION_BEGIN",
    "__NV_SILENCE_HOST_DEPRECATION_END",
)
# How eagerly ptxas spends registers to save instructions, 0 to 10; 10 is what TVM's kernels were tuned with.
_REGISTERS = "--register-usage-level=10"
_NVCC_TIMEOUT_S = 600
_ERROR_LINES = 12


def uses_fast_math(target: tvm.target.Target) -> bool:
    """Whether a CUDA target asks for approximate divisions and square roots, with denormals flushed to zero."""
    return bool(target.attrs.get(FAST_MATH, False))


def compile_with_nvrtc(code: str, arch: str, include: tuple[Path, ...], *, fast_math: bool = False) -> bytes:
    """Return the cubin that NVRTC makes of TVM's CUDA source.

    Parameters
    ----------
    code : str
        The source.
    arch : str
        Such as `sm_90a`.
    include : tuple of Path
        Folders of CUDA's headers and of libcu++.
    fast_math : bool
        See `FAST_MATH`.

    Raises
    ------
    LoweringError
        NVRTC refused the source; the message has its last lines.
    """
    options = [
        f"--gpu-architecture={arch}",
        "-default-device",
        # For __int128_t, which nvcc has by default.
        "--device-int128",
        *(f"-I{folder}" for folder in include),
        *(f"-U{name}" for name in _UNDEFINED),
        *(f"-D{name}=" for name in _EMPTY),
        f"--ptxas-options={_REGISTERS}",
        *([_FAST_MATH_OPTION] if fast_math else []),
    ]
    return _nvrtc(prepare_source(code), options, arch)


def compile_with_nvcc(code: str, arch: str, nvcc: Path, include: tuple[Path, ...], *, fast_math: bool = False) -> bytes:
    """Return the cubin that nvcc makes of TVM's CUDA source; parameters as for `compile_with_nvrtc`.

    Raises
    ------
    LoweringError
        nvcc refused the source or cannot be run; the message has its last lines.
    """
    with tempfile.TemporaryDirectory(prefix="relaxtune-") as folder:
        source, cubin = Path(folder) / "kernels.cu", Path(folder) / "kernels.cubin"
        source.write_text(code)
        command = [
            str(nvcc),
            "--cubin",
            "-O3",
            f"-arch={arch}",
            *(f"-I{path}" for path in include),
            *(f"-U{name}" for name in _UNDEFINED),
            "--expt-relaxed-constexpr",
            f"--ptxas-options={_REGISTERS}",
            *([_FAST_MATH_OPTION] if fast_math else []),
            "-o",
            str(cubin),
            str(source),
        ]
        try:
            outcome = subprocess.run(command, capture_output=True, text=True, timeout=_NVCC_TIMEOUT_S, check=False)
        except (OSError, subprocess.TimeoutExpired) as e:
            raise LoweringError(f"nvcc ({nvcc}) could not be run: {e}") from e
        if outcome.returncode != 0:
            raise _refused("nvcc", arch, outcome.stdout + outcome.stderr)
        return cubin.read_bytes() if cubin.is_file() else b""


def _nvrtc(source: DeviceSource, options: list[str], arch: str) -> bytes:
    # An optional dependency, present wherever `find_toolchain` answered NVRTC.
    nvrtc = importlib.import_module("cuda.bindings.nvrtc")
    names = [name.encode() for name in source.headers]
    texts = [text.encode() for text in source.headers.values()]
    created, program = nvrtc.nvrtcCreateProgram(
        source.code.encode(), b"kernels.cu", len(names), texts or None, names or None
    )
    if created != nvrtc.nvrtcResult.NVRTC_SUCCESS:
        raise LoweringError(f"NVRTC cannot be used: {created.name}; check cuda-bindings and nvidia-cuda-nvrtc")
    try:
        (outcome,) = nvrtc.nvrtcCompileProgram(program, len(options), [option.encode() for option in options])
        if outcome != nvrtc.nvrtcResult.NVRTC_SUCCESS:
            _, size = nvrtc.nvrtcGetProgramLogSize(program)
            log = bytearray(size)
            nvrtc.nvrtcGetProgramLog(program, log)
            raise _refused("nvrtc", arch, log.decode(errors="replace").rstrip("\0\n") or outcome.name)
        _, size = nvrtc.nvrtcGetCUBINSize(program)
        cubin = bytearray(size)
        nvrtc.nvrtcGetCUBIN(program, cubin)
        return bytes(cubin)
    finally:
        nvrtc.nvrtcDestroyProgram(program)


def _refused(compiler: str, arch: str, log: str) -> LoweringError:
    tail = "\n".join(log.strip().splitlines()[-_ERROR_LINES:])
    return LoweringError(f"{compiler} did not compile the kernels for {arch}:\n{tail}")
