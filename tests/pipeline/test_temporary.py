from __future__ import annotations

import os
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from relaxtune.pipeline import temporary
from relaxtune.pipeline.artifact.export import write_artifact
from relaxtune.pipeline.errors import PipelineError
from relaxtune.pipeline.temporary import PREFIX, cache_folder, locked_folder, shared_folder, shared_path, sweep

HOLD = """
import sys
from relaxtune.pipeline.temporary import temporary_folder
with temporary_folder() as folder:
    print(folder, flush=True)
    sys.stdin.read()
"""


def test_the_next_run_sweeps_what_a_killed_one_left_and_nothing_else(tmp_path: Path) -> None:
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    of_others = tmp_path / "relaxtune-results"
    of_others.mkdir()
    os.utime(of_others, (0, 0))
    folders, holders = [], []
    for _ in range(2):
        holder = subprocess.Popen(
            [sys.executable, "-c", HOLD], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, text=True
        )
        assert holder.stdout is not None
        holders.append(holder)
        folders.append(Path(holder.stdout.readline().strip()))
    killed, living = holders
    killed.kill()
    killed.communicate()
    for folder in folders:
        assert folder.is_dir()
        os.utime(folder, (0, 0))
    sweep(tmp_path, PREFIX)
    assert not folders[0].exists()
    assert folders[1].is_dir()
    assert of_others.is_dir()
    living.communicate("")
    assert living.returncode == 0
    assert not folders[1].exists()


def test_a_folder_goes_with_its_block(tmp_path: Path) -> None:
    with locked_folder(tmp_path, "x-") as folder:
        (folder / "file").write_text("")
    assert list(tmp_path.iterdir()) == []


def test_an_export_makes_no_folder_that_the_next_run_would_not_sweep(compiled, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("tvm.support.utils.tempdir", lambda: pytest.fail("TVM made a folder of its own"))
    assert write_artifact(compiled, tmp_path / "artifact").files


@pytest.mark.parametrize("wrong", ["link", "file", "open to all", "of another"])
def test_a_folder_that_others_could_fill_is_not_shared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wrong: str
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with shared_folder("run") as folder:
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    cached = cache_folder("plans")
    cached.parent.mkdir(parents=True)
    for path in (folder, cached):
        if wrong == "link":
            path.symlink_to(tmp_path)
        elif wrong == "file":
            path.touch()
        else:
            path.mkdir()
            path.chmod(0o777 if wrong == "open to all" else 0o700)
    if wrong == "of another":
        monkeypatch.setattr(os, "getuid", lambda: 12345)
        monkeypatch.setattr(temporary, "_TRUSTED", ())
    for call in (lambda: shared_folder("run").__enter__(), lambda: shared_path("run"), lambda: cache_folder("plans")):
        with pytest.raises(PipelineError, match="is not used: it is no folder of your own, or others may write to it"):
            call()
