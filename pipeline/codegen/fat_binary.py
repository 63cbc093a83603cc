"""A kernel's machine code and its PTX in one file, of which the driver takes what its GPU runs.

The driver takes the machine code where it fits, and translates the PTX for a newer GPU (CUDA C++ Programming Guide
13.0, "Just-in-Time Compilation"); it keeps what it translated in a cache of its own. A driver reads the PTX of its own
release of CUDA and of earlier ones.
"""

from __future__ import annotations

import ctypes

from relaxtune.pipeline.codegen.cuda_libraries import TOOLKIT_FOLDERS, load_library, pypi_folders
from relaxtune.pipeline.errors import LoweringError
from relaxtune.schedules.targets.capabilities import virtual_arch

#: First bytes of the file, `FATBINC_MAGIC` of CUDA's fatbinary_section.h as memory has it.
FAT_MAGIC = bytes.fromhex("50ed55ba")
LIBRARY = "libnvfatbin.so.13"
_NAME = b"kernels"
_OPTIONS = (b"-64", b"-cuda")


def pack(cubin: bytes, ptx: bytes, arch: str) -> bytes:
    """Return a fat binary of machine code and PTX for an architecture such as `sm_80`.

    Raises
    ------
    LoweringError
        CUDA's library for it (nvFatbin) is missing, or refuses them.
    """
    reason = load_library(LIBRARY, [*pypi_folders("nvidia-nvfatbin"), *TOOLKIT_FOLDERS])
    if reason is not None:
        raise LoweringError(
            f"--portable packs machine code and PTX with CUDA's nvFatbin, which cannot be loaded ({reason}); "
            "install it with: pip install 'relaxtune[cuda]'"
        )
    library = ctypes.CDLL(LIBRARY)
    number = virtual_arch(arch).rpartition("_")[2].encode()
    handle, size = ctypes.c_void_p(), ctypes.c_size_t()

    def call(name: str, *arguments: object) -> None:
        result = getattr(library, name)(*arguments)
        if result:
            raise LoweringError(f"nvFatbin does not pack the kernels for {arch}: {name} gave error {result}")

    options = (ctypes.c_char_p * len(_OPTIONS))(*_OPTIONS)
    call("nvFatbinCreate", ctypes.byref(handle), options, ctypes.c_size_t(len(_OPTIONS)))
    try:
        call("nvFatbinAddCubin", handle, cubin, ctypes.c_size_t(len(cubin)), number, _NAME)
        call("nvFatbinAddPTX", handle, ptx, ctypes.c_size_t(len(ptx)), number, _NAME, b"")
        call("nvFatbinSize", handle, ctypes.byref(size))
        packed = ctypes.create_string_buffer(size.value)
        call("nvFatbinGet", handle, packed)
    finally:
        library.nvFatbinDestroy(ctypes.byref(handle))
    return packed.raw
