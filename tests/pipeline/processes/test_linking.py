"""What compilers and linkers write for a while lies where the next run sweeps it."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from relaxtune.pipeline.artifact.export import write_artifact
from relaxtune.pipeline.processes.linking import linker_in, run_compiler
from relaxtune.pipeline.temporary import PREFIX


def test_linker_of_an_export_writes_its_files_into_a_folder_that_is_swept(
    compiled, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[Path] = []
    run = subprocess.Popen

    def noted(command, *args, **kwargs):
        given.append(Path((kwargs.get("env") or {})["TMPDIR"]))
        return run(command, *args, **kwargs)

    monkeypatch.setattr(subprocess, "Popen", noted)
    write_artifact(compiled, tmp_path / "artifact")
    assert given
    assert all(place.name.startswith(PREFIX) for place in given)


def test_text_is_compiled_and_its_compiler_knows_the_folder(tmp_path: Path) -> None:
    done = run_compiler(["sh", "-c", "cat; printf $TMPDIR"], tmp_path, text="given ")
    assert (done.returncode, done.stdout) == (0, f"given {tmp_path}")


def test_a_failed_link_says_what_the_linker_said(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=r"ended with status 1: .*missing\.o"):
        linker_in(tmp_path)(str(tmp_path / "a.so"), [str(tmp_path / "missing.o")])
