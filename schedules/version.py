"""Which version of the default schedules this is: what a measurement of a fallback kernel is true for."""

from __future__ import annotations

import hashlib
from functools import cache
from pathlib import Path

_ROOT = Path(__file__).parent
#: Sources that decide what the fallback makes, beside those of the target's own folder.
_SHARED = ("fallback.py", "cpu/vector_math.py")
_FOLDERS = {"llvm": "cpu", "cuda": "gpu"}
_DIGITS = 16


@cache
def fallback_version(kind: str, root: Path = _ROOT) -> str:
    """Return the version of the default schedules of a target kind: a hash over their source.

    Any change of the source is a new version, since nothing else tells for certain that the kernels stayed the same.
    Kernel templates and the search's rules take no part.

    Parameters
    ----------
    kind : str
        `llvm` or `cuda`; of another kind, which has no default schedules, only the shared sources count.
    root : Path
        The folder of the package.
    """
    folder = _FOLDERS.get(kind)
    paths = [root / name for name in _SHARED]
    paths += sorted((root / folder).glob("*.py")) if folder is not None else []
    digest = hashlib.sha256()
    for path in paths:
        # The name too, so that code moved from one rule to another is a change. Lines end as they end here.
        digest.update(f"{path.relative_to(root).as_posix()}\n{path.read_text(encoding='utf-8')}\0".encode())
    return digest.hexdigest()[:_DIGITS]
