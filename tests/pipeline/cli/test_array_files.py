"""`.npz` files that users name: what cannot be read is a usage error that says what is expected."""

from __future__ import annotations

import io
import os
import zipfile
from pathlib import Path

import numpy as np
import pytest

from relaxtune.pipeline.cli.app import main
from relaxtune.pipeline.cli.artifacts import read_arrays
from relaxtune.pipeline.errors import UsageError


def _archive(member: bytes, name: str = "x.npy") -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr(name, member)
    return file.getvalue()


def _saved(array: np.ndarray, save=np.save) -> bytes:
    file = io.BytesIO()
    save(file, array)
    return file.getvalue()


def _huge() -> bytes:
    """Return an archive whose one array has, by its header, 4 TB."""
    header = _saved(np.zeros(1, np.float32))
    return _archive(header[:-4].replace(b"(1,), }           ", b"(1000000000000,), }")[: len(header) - 4] + bytes(4))


@pytest.mark.parametrize(
    "content",
    [b"", b"text", _saved(np.zeros(3)), _archive(b""), _archive(b"\x93NUMPY"), _huge(), _archive(b"x" * 9)[:-40]],
    ids=["empty", "text", "npy", "empty member", "cut header", "huge", "cut"],
)
def test_what_is_no_archive_of_arrays_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "x.npz"
    path.write_bytes(content)
    with pytest.raises(UsageError, match=r"x\.npz cannot be read .*; expected for --inputs a \.npz file"):
        read_arrays(path)


def test_an_archive_that_unpacks_to_more_than_the_memory_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.npz"
    np.savez(path, x=np.zeros(4))
    # The size that the central directory states.
    content = path.read_bytes()
    at = content.index(b"PK\x01\x02") + 24
    path.write_bytes(content[:at] + b"\xfe\xff\xff\xff" + content[at + 4 :])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "sysconf", lambda _: 4096)
        with pytest.raises(UsageError, match=r"unpacks to 4 GB, and this machine has 0 GB of memory"):
            read_arrays(path)


def test_a_pipe_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "x.npz")
    with pytest.raises(UsageError, match="it is a pipe or a device; save its content to a file"):
        read_arrays(tmp_path / "x.npz")


def test_names_that_are_not_utf8_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["compile", os.fsdecode(b"caf\xe9.onnx"), "--target", "llvm"])
    assert ended.value.code == 2
    assert "the name caf?.onnx is not UTF-8; rename the file or the folder" in " ".join(capsys.readouterr().err.split())
