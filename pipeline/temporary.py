"""Folders for a while: removed in the end, and where a run was killed by the next one.

Each is locked (flock) as long as its process lives. A folder that nothing locks was left by a killed run.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from relaxtune.pipeline.errors import PipelineError

PREFIX = "relaxtune-tmp-"
# Between making a folder and locking it lies a moment in which no other run may take it for an old one.
_LEFT_AFTER_S = 60.0

# The administrator may make folders for others.
_TRUSTED = (0,)

_swept: set[int] = set()


def cache_folder(name: str) -> Path:
    """Return the place of what runs keep to save time (in `$XDG_CACHE_HOME`); it may be deleted at any time."""
    place = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "relaxtune"
    return _require_own(_require_own(place) / name)


@contextmanager
def temporary_folder() -> Iterator[Path]:
    """Give a new folder of the system's place for them, removed in the end; the first call sweeps what was left."""
    place = Path(tempfile.gettempdir())
    if os.getpid() not in _swept:
        _swept.add(os.getpid())
        sweep(place, PREFIX)
    with locked_folder(place, PREFIX) as folder:
        yield folder


@contextmanager
def locked_folder(place: Path, prefix: str) -> Iterator[Path]:
    """Give a new folder in `place`, removed in the end if it is there still."""
    folder = Path(tempfile.mkdtemp(prefix=prefix, dir=place))
    descriptor: int | None = None
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        with suppress(OSError):  # a file system without locks: nothing is swept there
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        if descriptor is not None:
            os.close(descriptor)


@contextmanager
def shared_folder(name: str) -> Iterator[Path]:
    """Give a folder that processes of this machine share by its name; the last of them to leave removes it."""
    folder = shared_path(name)
    folder.mkdir(mode=0o700, exist_ok=True)
    _require_own(folder)
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        with suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        yield folder
    finally:
        with suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder, ignore_errors=True)
        os.close(descriptor)


def shared_path(name: str) -> Path:
    """Return the place of a shared folder, which may not be there.

    Raises `PipelineError`: another user has made it, or may write to it.
    """
    return _require_own(Path(tempfile.gettempdir()) / f"{PREFIX}{name}")


def _require_own(folder: Path) -> Path:
    """Return a folder, if others cannot put anything there; its name may be guessed."""
    with suppress(FileNotFoundError):
        status = folder.lstat()
        if not stat.S_ISDIR(status.st_mode) or status.st_uid not in (os.getuid(), *_TRUSTED) or status.st_mode & 0o002:
            raise PipelineError(
                f"{folder} is not used: it is no folder of your own, or others may write to it. Remove it, or name "
                "another place with TMPDIR (temporary folders) or XDG_CACHE_HOME (caches)"
            )
    return folder


def sweep(place: Path, prefix: str) -> None:
    """Remove the files and folders in `place` that begin with `prefix`, are ours, and were left by killed processes."""
    with suppress(OSError):
        for path in place.glob(f"{prefix}*"):
            with suppress(OSError):
                _remove_if_left(path)


def _remove_if_left(path: Path) -> None:
    status = path.lstat()
    if path.is_symlink() or status.st_uid != os.getuid() or time.time() - status.st_mtime < _LEFT_AFTER_S:
        return
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink()
    finally:
        os.close(descriptor)
