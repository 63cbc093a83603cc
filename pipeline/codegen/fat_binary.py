"""A kernel's machine code and its PTX in one file, of which the driver takes what its GPU runs.

The driver takes the machine code where it fits, and translates the PTX for a newer GPU (CUDA C++ Programming Guide
13.0, "Just-in-Time Compilation"); it keeps what it translated in a cache of its own. A driver reads the PTX of its own
release of CUDA and of earlier ones.
"""

from __future__ import annotations

import importlib

from relaxtune.pipeline.errors import LoweringError
from relaxtune.schedules.targets.capabilities import virtual_arch

#: First bytes of the file, `FATBINC_MAGIC` of CUDA's fatbinary_section.h as memory has it.
FAT_MAGIC = bytes.fromhex("50ed55ba")
_NAME = "kernels"
_OPTIONS = ("-64", "-cuda")


def pack(cubin: bytes, ptx: bytes, arch: str) -> bytes:
    """Return a fat binary of machine code and PTX for an architecture such as `sm_80`.

    Raises
    ------
    LoweringError
        CUDA's library for it is missing, or refuses them.
    """
    # Optional, as the compiler's binding, which is the same package.
    binding = importlib.import_module("cuda.bindings.nvfatbin")
    number = virtual_arch(arch).rpartition("_")[2]
    try:
        handle = binding.create(list(_OPTIONS), len(_OPTIONS))
        try:
            binding.add_cubin(handle, cubin, len(cubin), number, _NAME)
            binding.add_ptx(handle, ptx, len(ptx), number, _NAME, "")
            packed = bytearray(binding.size(handle))
            binding.get(handle, packed)
        finally:
            binding.destroy(handle)
    # The binding tells of a missing library by a RuntimeError, too.
    except (RuntimeError, ImportError, OSError) as e:
        raise LoweringError(
            f"--portable packs machine code and PTX with CUDA's nvFatbin, which cannot be used ({e}); "
            "install it with: pip install 'relaxtune[cuda]'"
        ) from e
    return bytes(packed)
