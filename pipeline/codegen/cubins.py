"""CUDA source to a cubin: with NVRTC in this process, or with nvcc in another.

TVM's own driver compiles with `--use_fast_math` in every case: divisions and square roots with an error of 2 ulp, and
denormals flushed to zero. Here that is an option, `FAST_MATH`, off by default. (TVM itself writes `__expf` for `exp`
and the like, whatever the option.)
"""

from __future__ import annotations

import ctypes
import importlib
import os
import re
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import tvm

from relaxtune.pipeline.codegen.cuda_libraries import TOOLKIT_FOLDERS, load_library, pypi_folders
from relaxtune.pipeline.codegen.cuda_source import DeviceSource, prepare_source
from relaxtune.pipeline.codegen.mma_fragments import with_fragments
from relaxtune.pipeline.errors import LoweringError
from relaxtune.pipeline.temporary import temporary_folder
from relaxtune.pipeline.workers.linking import run_compiler
from relaxtune.pipeline.workers.machine_faults import how_it_failed
from relaxtune.schedules.targets.capabilities import virtual_arch

ELF_MAGIC = b"\x7fELF"
#: First bytes of the file, `FATBINC_MAGIC` of CUDA's fatbinary_section.h as memory has it.
FAT_MAGIC = bytes.fromhex("50ed55ba")
_FAT_LIBRARY = "libnvfatbin.so.13"
_FAT_NAME = b"kernels"
_FAT_OPTIONS = (b"-64", b"-cuda")

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
# Told to whoever asks for the log: registers, shared memory and spills of each kernel.
_VERBOSE = "-v"
_NVCC_TIMEOUT_S = 600
_ERROR_LINES = 12
_LINE_LENGTH = 300
# As nvcc, NVRTC and ptxas name them, with what is wrong behind: "kernels.cu(7): error: ..." and "ptxas error : ...".
_ERROR = re.compile(r"\b(fatal )?error\s*:")


def uses_fast_math(target: tvm.target.Target) -> bool:
    """Whether a CUDA target asks for approximate divisions and square roots, with denormals flushed to zero."""
    return bool(target.attrs.get(FAST_MATH, False))


# A kernel's definition: TVM declares each first.
_KERNEL = re.compile(r"^extern \"C\" __global__[^;{]*\{", re.MULTILINE)

# Told what ptxas says of each kernel.
OnLog = Callable[[str], None]


@dataclass(frozen=True)
class CompileOptions:
    """How CUDA source is compiled, by either compiler."""

    include: tuple[Path, ...]  # Folders of CUDA's headers and of libcu++.
    fast_math: bool = False  # See `FAST_MATH`.
    portable: bool = False  # Whether PTX of the same compilation is kept beside the machine code, in a fat binary.
    on_log: OnLog | None = None  # Called with the registers, shared memory and spills of the kernels, in ptxas' words.

    def arguments(self) -> list[str]:
        """Return the options that both compilers take."""
        return [
            *(f"-I{folder}" for folder in self.include),
            *(f"-U{name}" for name in _UNDEFINED),
            f"--ptxas-options={_REGISTERS}",
            *([f"--ptxas-options={_VERBOSE}"] if self.on_log else []),
            *([_FAST_MATH_OPTION] if self.fast_math else []),
        ]


def compile_with_nvrtc(code: str, arch: str, options: CompileOptions) -> bytes:
    """Return the cubin that NVRTC makes of TVM's CUDA source, for an architecture such as `sm_90a`.

    Raises `LoweringError`: NVRTC refused the source; the message has its errors.
    """
    arguments = [
        f"--gpu-architecture={arch}",
        "-default-device",
        # For __int128_t, which nvcc has by default.
        "--device-int128",
        *(f"-D{name}=" for name in _EMPTY),
        *options.arguments(),
    ]
    return _nvrtc(prepare_source(code), arguments, arch, options.portable, options.on_log)


def compile_with_nvcc(code: str, arch: str, nvcc: Path, options: CompileOptions) -> bytes:
    """Return the cubin that nvcc makes of TVM's CUDA source.

    Raises `LoweringError`: nvcc refused the source or cannot be run; the message has its errors.
    """
    virtual = virtual_arch(arch)
    form = ["--cubin", f"-arch={arch}"]
    if options.portable:
        form = ["--fatbin", f"-gencode=arch={virtual},code=[{arch},{virtual}]"]
    with temporary_folder() as folder:
        source, cubin = Path(folder) / "kernels.cu", Path(folder) / "kernels.cubin"
        source.write_text(with_fragments(code))
        arguments = [*form, "-O3", "--expt-relaxed-constexpr", *options.arguments(), "-o", str(cubin), str(source)]
        try:
            outcome = run_compiler([str(nvcc), *arguments], cubin.parent, timeout_s=_NVCC_TIMEOUT_S)
        except (OSError, subprocess.TimeoutExpired) as e:
            raise LoweringError(f"nvcc ({nvcc}) could not be run: {e}") from e
        if outcome.returncode != 0:
            raise _refused("nvcc", arch, how_it_failed("nvcc", outcome.returncode, outcome.stdout + outcome.stderr))
        if options.on_log is not None:
            options.on_log(outcome.stderr)
        return cubin.read_bytes() if cubin.is_file() else b""


def _nvrtc(source: DeviceSource, options: list[str], arch: str, portable: bool, on_log: OnLog | None) -> bytes:
    # An optional dependency, present wherever `find_toolchain` answered NVRTC.
    nvrtc = importlib.import_module("cuda.bindings.nvrtc")
    # Several kernels are optimised side by side (an H200's host, 4 cores, the 30 kernels of a small GPT-2 with symbolic
    # sizes: 8.4 s for 11.7 s of processor time). The machine code is the same but for attention's: of BERT-base's
    # 3,568 instructions, another order, and two fewer of no effect.
    threads = min(len(os.sched_getaffinity(0)), len(_KERNEL.findall(source.code)))
    options = [*options, f"--split-compile={threads}"] if threads > 1 else options
    names = [name.encode() for name in source.headers]
    texts = [text.encode() for text in source.headers.values()]
    created, program = nvrtc.nvrtcCreateProgram(
        source.code.encode(), b"kernels.cu", len(names), texts or None, names or None
    )
    if created != nvrtc.nvrtcResult.NVRTC_SUCCESS:
        raise LoweringError(f"NVRTC cannot be used: {created.name}; check cuda-bindings and nvidia-cuda-nvrtc")

    def read(what: str) -> bytes:
        _, size = getattr(nvrtc, f"nvrtcGet{what}Size")(program)
        buffer = bytearray(size)
        getattr(nvrtc, f"nvrtcGet{what}")(program, buffer)
        return bytes(buffer)

    try:
        (outcome,) = nvrtc.nvrtcCompileProgram(program, len(options), [option.encode() for option in options])
        log = read("ProgramLog").decode(errors="replace").rstrip("\0\n")
        if outcome != nvrtc.nvrtcResult.NVRTC_SUCCESS:
            # The log says what is wrong with the code; that memory is full stands in the outcome alone.
            text = log if outcome == nvrtc.nvrtcResult.NVRTC_ERROR_COMPILATION else f"error: {outcome.name}\n{log}"
            raise _refused("nvrtc", arch, text)
        if on_log is not None:
            on_log(log)
        return pack_fat_binary(read("CUBIN"), read("PTX"), arch) if portable else read("CUBIN")
    finally:
        nvrtc.nvrtcDestroyProgram(program)


def pack_fat_binary(cubin: bytes, ptx: bytes, arch: str) -> bytes:
    """Return machine code and PTX for an architecture such as `sm_80` in one file, of which the driver takes what runs.

    It takes the machine code where that fits, and translates the PTX for a newer GPU (CUDA C++ Programming Guide 13.0,
    "Just-in-Time Compilation"); it keeps what it translated in a cache of its own. A driver reads the PTX of its own
    release of CUDA and of earlier ones.

    Raises `LoweringError`: CUDA's library for it (nvFatbin) is missing, or refuses them.
    """
    reason = load_library(_FAT_LIBRARY, [*pypi_folders("nvidia-nvfatbin"), *TOOLKIT_FOLDERS])
    if reason is not None:
        raise LoweringError(
            f"--portable packs machine code and PTX with CUDA's nvFatbin, which cannot be loaded ({reason}); "
            "install it with: pip install 'relaxtune[cuda]'"
        )
    library = ctypes.CDLL(_FAT_LIBRARY)
    number = virtual_arch(arch).rpartition("_")[2].encode()
    handle, size = ctypes.c_void_p(), ctypes.c_size_t()

    def call(name: str, *arguments: object) -> None:
        result = getattr(library, name)(*arguments)
        if result:
            raise LoweringError(f"nvFatbin does not pack the kernels for {arch}: {name} gave error {result}")

    options = (ctypes.c_char_p * len(_FAT_OPTIONS))(*_FAT_OPTIONS)
    call("nvFatbinCreate", ctypes.byref(handle), options, ctypes.c_size_t(len(_FAT_OPTIONS)))
    try:
        call("nvFatbinAddCubin", handle, cubin, ctypes.c_size_t(len(cubin)), number, _FAT_NAME)
        call("nvFatbinAddPTX", handle, ptx, ctypes.c_size_t(len(ptx)), number, _FAT_NAME, b"")
        call("nvFatbinSize", handle, ctypes.byref(size))
        packed = ctypes.create_string_buffer(size.value)
        call("nvFatbinGet", handle, packed)
    finally:
        library.nvFatbinDestroy(ctypes.byref(handle))
    return packed.raw


def _refused(compiler: str, arch: str, log: str) -> LoweringError:
    """Return what a compiler said, the errors among its warnings first."""
    lines = log.strip().splitlines()
    first = next((number for number, line in enumerate(lines) if _ERROR.search(line)), None)
    kept = lines[-_ERROR_LINES:] if first is None else [*lines[first : first + _ERROR_LINES - 1], lines[-1]]
    text = "\n".join(line[:_LINE_LENGTH] for line in kept)
    return LoweringError(f"{compiler} did not compile the kernels for {arch}:\n{text}")
