"""Built artifacts in Ray's object store: the driver holds references, by the text that stands for each as its content.

The bytes go from the node that built them to the node that measures, and not through the driver.
"""

from __future__ import annotations

import threading
from typing import Protocol

from relaxtune.pipeline.tuning.measure.workload_spec import BuiltArtifact

_PREFIX = "ray:"


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
        """Return the reference to an artifact's bytes, or the bytes of one that carries them; None for none."""
        if artifact is None:
            return None
        if isinstance(artifact.content, bytes):
            return artifact.content
        with self._lock:
            return self._held[artifact.content]

    def drop(self, artifact: BuiltArtifact) -> None:
        """Give an artifact up."""
        with self._lock:
            self._held.pop(str(artifact.content), None)
