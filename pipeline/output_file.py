"""The one way to write a file that a user names: whole or not at all, and never in place of a device or a pipe."""

from __future__ import annotations

import fcntl
import glob
import os
import secrets
import shutil
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from relaxtune.pipeline.errors import PipelineError
from relaxtune.pipeline.temporary import sweep


@contextmanager
def output_file(path: Path, named: str) -> Iterator[BinaryIO]:
    """Give a file to write, which becomes `path` when the block ends well; an error leaves `path` as it was.

    A symbolic link is followed. A device, a pipe or an open file (`/dev/stdout`) gets the bytes at the end.

    `named`: what named the path, such as `--out`.
    Raises `PipelineError`: it cannot be written.
    """
    try:
        if _takes_bytes(path):
            with path.open("wb") as place, tempfile.TemporaryFile() as file:
                yield file
                file.seek(0)
                shutil.copyfileobj(file, place)
            return
        followed = Path(os.path.realpath(path))
        sweep(followed.parent, f".{glob.escape(followed.name)}.staging-")
        staged = followed.with_name(f".{followed.name}.staging-{os.getpid()}-{secrets.token_hex(4)}")
        try:
            with staged.open("xb+") as file:
                with suppress(OSError):  # a file system without locks
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                yield file
                file.flush()
                os.fsync(file.fileno())
            staged.replace(followed)
        finally:
            staged.unlink(missing_ok=True)
    except OSError as e:
        raise PipelineError(
            f"{named} {path} cannot be written: {e.strerror or e}; name a file in a folder that exists, is writable "
            "and has room"
        ) from e


def _takes_bytes(path: Path) -> bool:
    """Return whether a path is no regular file to replace: a device, a pipe, a folder (an error), an open file."""
    try:
        mode = path.stat().st_mode
    except FileNotFoundError:
        return False
    first = Path(os.readlink(path)) if path.is_symlink() else path
    return not stat.S_ISREG(mode) or any(one.absolute().parts[1:2] in (("dev",), ("proc",)) for one in (path, first))
