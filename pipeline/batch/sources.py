"""What tells the models of a plan apart, before any is imported."""

from __future__ import annotations

import hashlib
from functools import lru_cache
from pathlib import Path

from relaxtune.models import ModelError
from relaxtune.models.files import read_proto
from relaxtune.models.hashing import content_sha256


def source_key(source: str) -> str:
    """Return the sha256 of a model file with its weights; of a zoo model, its name."""
    path = Path(source)
    if not path.is_file():
        return source
    status = path.stat()
    return _content_key(path, status.st_mtime_ns, status.st_size)


@lru_cache(maxsize=4096)
def _content_key(path: Path, _changed_ns: int, _size: int) -> str:
    try:
        return content_sha256(read_proto(path), path.parent)
    except (ModelError, OSError):
        # The import will say what is wrong with it.
        return hashlib.sha256(path.read_bytes()).hexdigest()
