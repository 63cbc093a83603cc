"""CUDA's compiler for TVM: found, set up, and usable on a machine without a GPU.

TVM hands CUDA source to the callback `tvm_callback_cuda_compile` while its CUDA runtime makes a module of it. Without
that runtime it keeps the *source*, silently, to be compiled where it is loaded. So two things are arranged here:

- a compiler: NVRTC where its Python binding and CUDA's headers are installed (PyPI has all of it), else nvcc
  (`pipeline.codegen.cubins` has both, with options of our own);
- TVM's CUDA runtime, which needs the driver's library: where there is none, a stand-in of the nine functions it links
  to, each answering "no device". It can compile and cannot run.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path

import tvm_ffi

from relaxtune.pipeline.codegen.cubins import (
    ELF_MAGIC,
    FAT_MAGIC,
    CompileOptions,
    OnLog,
    compile_with_nvcc,
    compile_with_nvrtc,
)
from relaxtune.pipeline.codegen.cuda_libraries import DRIVER, load_cuda_runtime, load_library, pypi_root
from relaxtune.pipeline.codegen.wgmma_check import count_early_reads
from relaxtune.pipeline.errors import LoweringError
from relaxtune.pipeline.temporary import temporary_folder
from relaxtune.pipeline.workers.linking import run_compiler

logger = logging.getLogger(__name__)

COMPILE_CALLBACK = "tvm_callback_cuda_compile"
TOOLKIT = Path("/usr/local/cuda")

INSTALL_HINT = (
    "install it with: pip install 'relaxtune[cuda]' (NVRTC and headers from PyPI), or install CUDA 13 with nvcc"
)

# Functions that libtvm_runtime_cuda.so imports from the driver; 100 is CUDA_ERROR_NO_DEVICE (cuda.h).
_DRIVER_FUNCTIONS = (
    "cuDeviceGetName",
    "cuFuncSetAttribute",
    "cuLaunchKernelEx",
    "cuModuleGetFunction",
    "cuModuleLoadData",
    "cuModuleUnload",
    "cuTensorMapEncodeTiled",
)
_STAND_IN_SOURCE = "\n".join(
    [
        *(f"int {name}(void) {{ return 100; }}" for name in _DRIVER_FUNCTIONS),
        *(
            f'int {name}(int error, const char **text) {{ (void)error; *text = "no NVIDIA driver"; return 0; }}'
            for name in ("cuGetErrorName", "cuGetErrorString")
        ),
    ]
)


class CompilerKind(StrEnum):
    """The compiler that turns CUDA source into a cubin."""

    NVRTC = "nvrtc"
    NVCC = "nvcc"


@dataclass(frozen=True)
class CudaToolchain:
    """A CUDA compiler, the root of its headers (with `include/`), and what was looked at to find them."""

    kind: CompilerKind
    root: Path
    source: str


@dataclass(frozen=True)
class CubinRequest:
    """CUDA source and how it is to be compiled: for an architecture such as `sm_90a`, with its PTX if `portable`."""

    code: str
    arch: str
    toolchain: CudaToolchain
    fast_math: bool = False
    portable: bool = False

    def compile(self, on_log: OnLog | None = None) -> bytes:
        """Return the cubin, compiled in this process; a fat binary if `portable`.

        Raises `LoweringError`: the compiler refused the source (the message has its last lines), or made wrong code of
        it (`pipeline.codegen.wgmma_check`).
        """
        arch, toolchain = self.arch, self.toolchain
        root = toolchain.root / "include"
        # libcu++ has its own folder since CUDA 13.
        include = tuple(folder for folder in (root, root / "cccl") if folder.is_dir())
        options = CompileOptions(include, self.fast_math, self.portable, on_log)
        if toolchain.kind is CompilerKind.NVRTC:
            cubin = compile_with_nvrtc(self.code, arch, options)
        else:
            cubin = compile_with_nvcc(self.code, arch, toolchain.root / "bin" / "nvcc", options)
        if self.portable and cubin.startswith(FAT_MAGIC):
            # No architecture with wgmma has PTX that is kept.
            return cubin
        if not cubin.startswith(ELF_MAGIC):
            raise LoweringError(
                f"{toolchain.kind.value} gave no cubin for {arch}: its output starts with {cubin[:8]!r}"
            )
        early = count_early_reads(cubin)
        if early:
            raise LoweringError(
                f"{toolchain.kind.value} ({toolchain.source}) made wrong code for {arch}: {early} instructions read "
                "results of wgmma before the wait for them; use another version of the CUDA compiler, or other kernels "
                "(--routes without template)"
            )
        return cubin


def find_toolchain() -> CudaToolchain:
    """Return the CUDA compiler of this machine.

    Raises `LoweringError`: there is none; the message says what was looked for and how to install it.
    """
    roots = [root for root in (pypi_root("nvidia-cuda-runtime"), TOOLKIT) if root and _has_headers(root)]
    binding = importlib.util.find_spec("cuda") is not None and importlib.util.find_spec("cuda.bindings") is not None
    if binding and roots:
        return CudaToolchain(CompilerKind.NVRTC, roots[0], f"cuda-bindings, headers of {roots[0]}")
    found = shutil.which("nvcc") or shutil.which("nvcc", path=str(TOOLKIT / "bin"))
    if found is not None:
        # A wrapper on the path lies outside the toolkit whose headers are needed; nvcc itself knows its place.
        installed = TOOLKIT / "bin" / "nvcc"
        nvcc = installed if installed.is_file() else Path(found).resolve()
        return CudaToolchain(CompilerKind.NVCC, nvcc.parent.parent, f"{nvcc}")
    headers = (
        f"CUDA headers in {roots[0]}"
        if roots
        else f"no CUDA headers (nvidia-cuda-runtime with nvidia-cuda-cccl, {TOOLKIT})"
    )
    raise LoweringError(
        f"no CUDA compiler was found: {'the package' if binding else 'no package'} cuda-bindings, {headers}, no nvcc "
        f"on the path or in {TOOLKIT}/bin; {INSTALL_HINT}"
    )


@contextmanager
def cuda_compiler(
    arch: str, *, fast_math: bool = False, portable: bool = False, on_log: OnLog | None = None
) -> Iterator[CubinRequest]:
    """Make TVM compile CUDA source to a cubin for `arch` inside the block, with or without a GPU.

    Gives what it asks of the compiler for each source, without one. `on_log` is called with what ptxas says.

    Raises `LoweringError`: the compiler or TVM's CUDA runtime cannot be set up.
    """
    toolchain = find_toolchain()
    logger.info("CUDA compiler: %s for %s (%s)", toolchain.kind.value, arch, toolchain.source)
    ensure_cuda_runtime()

    request = CubinRequest("", arch, toolchain, fast_math, portable)
    with registered(COMPILE_CALLBACK, lambda code: replace(request, code=code).compile(on_log)):
        yield request


@contextmanager
def registered(name: str, function: Callable[..., object]) -> Iterator[None]:
    """Put a function in the place of one of TVM's inside the block."""
    original = tvm_ffi.get_global_func(name)
    tvm_ffi.register_global_func(name, function, override=True)
    try:
        yield
    finally:
        tvm_ffi.register_global_func(name, original, override=True)


def start() -> Callable[[object], bytes]:
    """Return the function with which a worker compiles a `CubinRequest`."""

    def compile_request(request: object) -> bytes:
        if not isinstance(request, CubinRequest):
            raise TypeError(f"expected a CubinRequest, got {type(request).__name__}")
        return request.compile()

    return compile_request


def compiler_release() -> str:
    """Return the release of CUDA that the compiler of this machine is of, such as 13.0.

    Raises `LoweringError`: there is none, or it cannot be run.
    """
    toolchain = find_toolchain()
    if toolchain.kind is CompilerKind.NVRTC:
        _, major, minor = importlib.import_module("cuda.bindings.nvrtc").nvrtcVersion()
        return f"{major}.{minor}"
    nvcc = toolchain.root / "bin" / "nvcc"
    text = subprocess.run([nvcc, "--version"], capture_output=True, text=True, check=False).stdout
    release = re.search(r"release (\d+\.\d+)", text)
    if release is None:
        raise LoweringError(f"{nvcc} does not say its release: {text!r}")
    return release.group(1)


def ensure_cuda_runtime() -> None:
    """Load TVM's CUDA runtime, over a stand-in for the driver where this machine has none.

    Raises `LoweringError`: it cannot be loaded: CUDA's runtime library or a C compiler is missing.
    """
    reason = load_cuda_runtime()
    if reason is None:
        return
    if load_library(DRIVER, []) is not None:
        logger.info("no NVIDIA driver here: compiling over a stand-in for %s", DRIVER)
        _load_stand_in()
        reason = load_cuda_runtime()
    if reason is not None:
        raise LoweringError(f"TVM's CUDA runtime cannot be loaded ({reason}); {INSTALL_HINT}")


def _load_stand_in() -> None:
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        raise LoweringError("compiling for CUDA without a driver needs a C compiler; install gcc or clang")
    with temporary_folder() as folder:
        library = Path(folder) / DRIVER
        command = [compiler, "-shared", "-fPIC", f"-Wl,-soname,{DRIVER}", "-x", "c", "-", "-o", str(library)]
        outcome = run_compiler(command, Path(folder), text=_STAND_IN_SOURCE)
        reason = outcome.stderr if outcome.returncode else load_library(str(library), [])
        if reason is not None:
            raise LoweringError(f"the stand-in for {DRIVER} could not be made with {compiler}: {reason.strip()}")


def _has_headers(root: Path) -> bool:
    """Whether both CUDA's headers and libcu++ are there: on PyPI they are two distributions."""
    include = root / "include"
    libcu = any((folder / "cuda" / "std" / "cstdint").is_file() for folder in (include, include / "cccl"))
    return libcu and (include / "cuda_runtime.h").is_file()
