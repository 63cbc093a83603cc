"""Arrays that another process of this machine reads where they lie."""

from __future__ import annotations

import mmap
import os
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from typing import IO

import numpy as np

_ALIGNMENT = 64


@dataclass(frozen=True)
class Place:
    """Where one array lies."""

    name: str
    dtype: np.dtype
    shape: tuple[int, ...]
    offset: int


@dataclass(frozen=True)
class ArraysPlace:
    """The place of arrays that another process reads."""

    path: str  # A file; one in memory is seen under the process that has it open.
    size: int  # Its bytes.
    places: tuple[Place, ...]  # Where each array lies in it.


class SharedArrays:
    """Arrays in a file in memory, as long as this lives or until it is closed.

    They are written one after another: no two of them need to be in this process's memory at once.
    """

    def __init__(self, arrays: Iterable[tuple[str, np.ndarray]]) -> None:
        self._file, path = _new_file()
        places, end = [], 0
        try:
            for name, array in arrays:
                end += -end % _ALIGNMENT
                places.append(Place(name, array.dtype, array.shape, end))
                self._file.seek(end)
                self._file.write(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
                end += array.nbytes
            self._file.truncate(end)
            self._file.flush()
        except BaseException:
            self.close()
            raise
        self.where = ArraysPlace(path, end, tuple(places))

    def __del__(self) -> None:
        """Give the memory back."""
        self.close()

    def close(self) -> None:
        """Give the memory back; who has read the arrays keeps them."""
        self._file.close()


def read_arrays(where: ArraysPlace) -> dict[str, np.ndarray]:
    """Return arrays of another process by name, as a copy that is made where one is written to."""
    if not where.size:
        return {place.name: np.empty(place.shape, place.dtype) for place in where.places}
    with open(where.path, "rb") as file:
        memory = mmap.mmap(file.fileno(), where.size, access=mmap.ACCESS_COPY)
    return {
        place.name: np.ndarray(place.shape, place.dtype, buffer=memory, offset=place.offset)
        if 0 not in place.shape
        else np.empty(place.shape, place.dtype)
        for place in where.places
    }


def _new_file() -> tuple[IO[bytes], str]:
    # In memory where that can be: a full disk is no reason to validate nothing.
    if hasattr(os, "memfd_create"):
        file = os.fdopen(os.memfd_create("relaxtune-arrays"), "w+b")
        return file, f"/proc/{os.getpid()}/fd/{file.fileno()}"
    named = tempfile.NamedTemporaryFile(prefix="relaxtune-tmp-")  # noqa: SIM115 - closed by its owner
    return named, named.name
