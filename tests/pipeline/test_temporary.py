from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from relaxtune.pipeline.artifact.export import write_artifact
from relaxtune.pipeline.temporary import PREFIX, locked_folder, sweep

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
