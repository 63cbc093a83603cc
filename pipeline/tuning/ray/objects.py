"""Built artifacts in Ray's object store: the driver holds references, by the text that stands for each as its content.

The bytes go from the node that built them to the node that measures, and not through the driver. They go packed: a
kernel's shared object has 30 to 78 KB, packed 8 to 21 (0.3 to 0.7 ms). What is below 100 KB Ray keeps in the memory of
the process that asked for it, the driver, which holds six artifacts of each task.
"""

from __future__ import annotations

import threading
import zlib
from typing import Protocol

from relaxtune.pipeline.tuning.measure.workload_spec import BuiltArtifact

_PREFIX = "ray:"


def packed(code: bytes) -> bytes:
    """Return an artifact's bytes as they are kept."""
    return zlib.compress(code, 1)


def unpacked(kept: bytes) -> bytes:
    """Return an artifact's bytes.

    Raises
    ------
    OSError
        They were damaged on the way; that is no fault of the candidate.
    """
    try:
        return zlib.decompress(kept)
    except zlib.error as e:
        raise OSError(f"a built artifact came damaged out of Ray's object store: {e}") from e


class Reference(Protocol):
    """Ray's reference to an object in its store."""

    def hex(self) -> str:
        """Return its name."""
        ...


class ArtifactStore:
    """References to artifacts, as long as a run may ask for them. Safe between threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._held: dict[str, Reference] = {}

    def keep(self, reference: Reference) -> str:
        """Keep a reference; return the URI that stands for it."""
        uri = f"{_PREFIX}{reference.hex()}"
        with self._lock:
            self._held[uri] = reference
        return uri

    def find(self, artifact: BuiltArtifact | None) -> Reference | bytes | None:
        """Return the reference to an artifact's packed bytes, or these where it carries its bytes; None for none."""
        if artifact is None:
            return None
        if isinstance(artifact.content, bytes):
            return packed(artifact.content)
        with self._lock:
            return self._held[artifact.content]

    def drop(self, artifact: BuiltArtifact) -> None:
        """Give an artifact up."""
        with self._lock:
            self._held.pop(str(artifact.content), None)
