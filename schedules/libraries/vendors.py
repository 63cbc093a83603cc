"""The vendors' libraries that kernels of the route `library` call: their files, where they come from, our C sources."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

_FOLDER = Path(__file__).parent


@dataclass(frozen=True)
class VendorLibrary:
    """A shared library that is opened when a kernel first calls it."""

    title: str  # Its name in messages.
    file: str  # The name that the loader looks for.
    variable: str  # Environment variable with its path, for a process whose loader does not find it.
    distribution: str  # Package of PyPI that has it.
    source: str  # C source in this folder that opens and calls it.
    oldest: str = ""  # Version from which on it is taken; empty where the file's name says enough.

    @property
    def missing(self) -> str:
        """The error of a call where the library is not there."""
        version = f" ({self.oldest} or later)" if self.oldest else ""
        return (
            f"{self.title} is not there: expected {self.file}{version} on the loader's path or at ${self.variable}; "
            f"install {self.distribution}, or compile without --routes library"
        )


CUBLASLT = VendorLibrary("cuBLASLt", "libcublasLt.so.13", "RELAXTUNE_CUBLASLT", "nvidia-cublas", "cublaslt.c")
CUDNN = VendorLibrary("cuDNN", "libcudnn.so.9", "RELAXTUNE_CUDNN", "nvidia-cudnn-cu13", "cudnn_attention.c", "9.10.2")
VENDOR_LIBRARIES = (CUBLASLT, CUDNN)


def named_libraries(files: Collection[str]) -> list[VendorLibrary]:
    """Return the vendors' libraries among the shared libraries that an artifact needs."""
    return [library for library in VENDOR_LIBRARIES if library.file in files]


def library_sources(names: Sequence[str]) -> list[Path]:
    """Return the C sources that `SOURCES_ATTR` names."""
    return [_FOLDER / str(name) for name in names]


def libraries_of(sources: Iterable[Path]) -> tuple[VendorLibrary, ...]:
    """Return the libraries that C sources open."""
    names = {source.name for source in sources}
    return tuple(library for library in VENDOR_LIBRARIES if library.source in names)
