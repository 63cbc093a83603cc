"""Files that users name as outputs: devices and pipes are written to, links are followed, a failure changes nothing."""

from __future__ import annotations

import os
import stat
import threading
from pathlib import Path

import pytest

from relaxtune.pipeline import output_file as module
from relaxtune.pipeline.errors import PipelineError
from relaxtune.pipeline.output_file import output_file


def write(path: Path, content: bytes = b"new") -> None:
    with output_file(path, "--out") as file:
        file.write(content)


def test_a_file_is_replaced_whole_and_is_readable_by_others(tmp_path: Path) -> None:
    path = tmp_path / "page"
    path.write_bytes(b"old")
    with output_file(path, "--out") as file:
        file.write(b"new")
        assert path.read_bytes() == b"old"
    assert path.read_bytes() == b"new"
    (tmp_path / "plain").touch()
    assert path.stat().st_mode == (tmp_path / "plain").stat().st_mode


def test_a_link_is_followed_also_to_a_file_that_is_not_there_yet(tmp_path: Path) -> None:
    for there in (True, False):
        link, target = tmp_path / f"link-{there}", tmp_path / f"target-{there}"
        link.symlink_to(target.name)
        if there:
            target.write_bytes(b"old")
        write(link)
        assert link.is_symlink()
        assert target.read_bytes() == b"new"
    assert len(list(tmp_path.iterdir())) == 4


def test_a_pipe_gets_the_bytes(tmp_path: Path) -> None:
    path, got = tmp_path / "pipe", []
    os.mkfifo(path)
    reader = threading.Thread(target=lambda: got.append(path.read_bytes()))
    reader.start()
    write(path)
    reader.join()
    assert got == [b"new"]
    assert stat.S_ISFIFO(path.stat().st_mode)


@pytest.mark.parametrize("through_link", [False, True])
def test_a_device_stays_a_device(tmp_path: Path, through_link: bool) -> None:
    node = tmp_path / "full"
    try:
        os.mknod(node, 0o666 | stat.S_IFCHR, os.makedev(1, 7))
        node.open("wb").close()
    except PermissionError:
        pytest.skip("needs the right to make and to open a device node")
    path = node
    if through_link:
        path = tmp_path / "link"
        path.symlink_to(node)
    with pytest.raises(PipelineError, match=r"--out .* cannot be written: No space left on device; name a file"):
        write(path)
    assert stat.S_ISCHR(node.stat().st_mode)


def test_an_open_file_is_written_in_place(tmp_path: Path) -> None:
    with (tmp_path / "log").open("wb") as file:
        write(Path(f"/dev/fd/{file.fileno()}"))
        assert os.fstat(file.fileno()).st_nlink == 1
    assert (tmp_path / "log").read_bytes() == b"new"


@pytest.mark.parametrize("name", ["no/such", ".", "file/below", "loop"])
def test_a_place_that_cannot_be_written_is_named(tmp_path: Path, name: str) -> None:
    (tmp_path / "file").write_bytes(b"old")
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(PipelineError, match=r"--out .* cannot be written: .*; name a file in a folder that exists"):
        write(tmp_path / name)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "loop"]


def test_a_full_disk_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    (tmp_path / "page").write_bytes(b"old")
    monkeypatch.setattr(module.os, "fsync", full)
    with pytest.raises(PipelineError, match="No space left on device"):
        write(tmp_path / "page")
    assert [(path.name, path.read_bytes()) for path in tmp_path.iterdir()] == [("page", b"old")]


def test_what_a_killed_writer_left_goes_and_what_another_writes_stays(tmp_path: Path) -> None:
    with output_file(tmp_path / "page", "--out") as file:
        left = tmp_path / ".page.staging-1-left"
        left.touch()
        for path in tmp_path.iterdir():
            os.utime(path, (0, 0))
        write(tmp_path / "page", b"first")
        assert not left.exists()
        file.write(b"second")
    assert [(path.name, path.read_bytes()) for path in tmp_path.iterdir()] == [("page", b"second")]
