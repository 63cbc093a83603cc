"""TVM's CUDA runtime and the two libraries it needs: libcudart.so.13 (CUDA's runtime) and libcuda.so.1 (the driver).

TVM loads its `libtvm_runtime_cuda.so` when it is imported, and goes on without it when the loader does not find these
two. A CUDA runtime installed from PyPI is not on the loader's path, so it is loaded here by its full name first: the
loader then takes the library it already has of that name.
"""

from __future__ import annotations

import ctypes
import importlib.metadata
import logging
import os
from pathlib import Path

from relaxtune.pipeline.tvm_runtime.library import has_function, library_folders
from relaxtune.schedules.libraries.vendors import VendorLibrary

logger = logging.getLogger(__name__)

CUDART = "libcudart.so.13"
DRIVER = "libcuda.so.1"
#: Behind the name of an entry: the same call without graphs inside, to be captured (`pipeline.codegen.cuda_graph`).
WHOLE_CALL = "_whole"
SIDECAR = "libtvm_runtime_cuda.so"
TOOLKIT_FOLDERS = (Path("/usr/local/cuda/lib64"), Path("/usr/local/cuda/targets/x86_64-linux/lib"))


def cuda_runtime_loaded() -> bool:
    """Whether TVM's CUDA runtime is in this process, with a real driver or the compile-only one."""
    return has_function("ffi.Module.create.cuda")


def load_cuda_runtime() -> str | None:
    """Load TVM's CUDA runtime if it is not there; return None, or why it cannot be loaded."""
    if cuda_runtime_loaded():
        return None
    reason = load_library(CUDART, [*pypi_folders("nvidia-cuda-runtime"), *TOOLKIT_FOLDERS])
    if reason is None:
        reason = load_library(DRIVER, [])
    if reason is None:
        reason = load_library(SIDECAR, library_folders())
    return reason


def driver_release() -> tuple[int, int] | None:
    """Return the newest release of CUDA that the driver knows, such as (13, 0); None without a driver."""
    number = ctypes.c_int()
    try:
        failed = ctypes.CDLL(DRIVER).cuDriverGetVersion(ctypes.byref(number))
    except (OSError, AttributeError):
        return None
    return None if failed else (number.value // 1000, number.value % 1000 // 10)


def offer_library(library: VendorLibrary) -> Path | None:
    """Return where a vendor's library is installed, told to this process and its children by the variable of it.

    Kernels that call it read the variable. None when no folder that is known here has it; the loader's path may.
    """
    folders = [*pypi_folders(library.distribution), *TOOLKIT_FOLDERS]
    found = next((folder / library.file for folder in folders if (folder / library.file).is_file()), None)
    if found is not None:
        os.environ.setdefault(library.variable, str(found))
        logger.info("%s: %s", library.title, os.environ[library.variable])
    return found


def load_library(name: str, folders: list[Path]) -> str | None:
    """Load a shared library for all that follow, by its plain name or from the first folder that has it.

    Returns None when it is loaded, else why not.
    """
    reasons = []
    for candidate in [name, *(str(folder / name) for folder in folders if (folder / name).is_file())]:
        try:
            ctypes.CDLL(candidate, mode=ctypes.RTLD_GLOBAL)
        except OSError as e:
            reasons.append(str(e))
            continue
        logger.debug("loaded %s", candidate)
        return None
    return "; ".join(reasons)


def pypi_folders(distribution: str) -> list[Path]:
    """Return the folders in which an installed distribution has shared libraries."""
    return sorted({file.parent for file in _files_of(distribution) if ".so" in file.name})


def pypi_root(distribution: str) -> Path | None:
    """Return the folder of an installed CUDA distribution that has `include/` in it, None when it is not installed."""
    headers = (file.parent.parent for file in _files_of(distribution) if file.name == "cuda_runtime.h")
    return next(headers, None)


def _files_of(distribution: str) -> list[Path]:
    try:
        return [Path(str(file.locate())) for file in importlib.metadata.files(distribution) or []]
    except importlib.metadata.PackageNotFoundError:
        return []
