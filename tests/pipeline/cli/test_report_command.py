"""`relaxtune report` as a user runs it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from relaxtune.pipeline.artifact.compile import CompiledModule
from relaxtune.pipeline.artifact.export import write_artifact
from relaxtune.pipeline.cli.app import main
from relaxtune.tuning_db.store import TuningDatabase


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as exit_info:
        main(["report", *arguments])
    code = exit_info.value.code
    captured = capsys.readouterr()
    return int(code or 0), captured.out, captured.err


@pytest.fixture
def directory(compiled: CompiledModule, tmp_path: Path) -> Path:
    write_artifact(compiled, tmp_path / "bert-tiny")
    return tmp_path / "bert-tiny"


@pytest.mark.slow
def test_the_page_lies_beside_the_artifact_and_its_path_is_printed(
    directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, _ = run(capsys, str(directory))
    assert code == 0
    page = directory.with_name("bert-tiny.html")
    assert out.strip() == str(page)
    assert page.read_text().startswith("<!doctype html>")
    assert not (directory / page.name).exists()


@pytest.mark.slow
def test_a_profile_names_bottlenecks_on_this_cpu(
    directory: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, _ = run(capsys, str(directory), "--profile", "--format", "json")
    assert code == 0
    data = json.loads(out)
    assert all(kernel["time_source"] == "profile" and kernel["bottleneck"] for kernel in data["kernels"])
    assert data["ceilings"]["source"].startswith("measured on this machine now")


def test_a_table_goes_to_stdout(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, str(directory), "--no-profile", "--format", "table")
    assert code == 0
    assert "layer_norm" in out
    assert "have no time" in out


@pytest.mark.slow
def test_untuned_kernels_are_timed_where_their_device_is(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, str(directory), "--format", "json")
    assert code == 0
    assert all(kernel["time_source"] == "profile" for kernel in json.loads(out)["kernels"])


def test_a_database_gives_a_list(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "tuning.db"
    TuningDatabase.open(path).close()
    code, out, _ = run(capsys, "--db", str(path), "--format", "json")
    assert (code, json.loads(out)) == (0, [])
    code, out, _ = run(capsys, "--db", str(path), "--out", str(tmp_path / "page.html"))
    assert code == 0
    assert "No job" in (tmp_path / "page.html").read_text()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "nothing to report: name an artifact directory, a database with --db, or both"),
        (["--db", "x.db", "--profile"], "--profile runs the kernels of an artifact"),
        (["DIR", "--format", "json", "--out", "x.html"], "--format json goes to stdout"),
    ],
)
def test_requests_that_cannot_be_are_refused(
    arguments: list[str], message: str, directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, _, err = run(capsys, *(str(directory) if argument == "DIR" else argument for argument in arguments))
    assert code == 2
    assert message in err


@pytest.mark.slow
def test_a_page_that_cannot_be_written_is_told(
    directory: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, _, err = run(capsys, str(directory), "--out", str(tmp_path / "missing" / "page.html"))
    assert code == 1
    assert "--out" in err
    assert "cannot be written" in err


def test_what_is_no_artifact_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = run(capsys, str(tmp_path / "none"))
    assert code == 1
    assert "does not exist" in err


@pytest.mark.slow
def test_two_builds_stand_beside_each_other_kernel_by_kernel(
    directory: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    old = Path(shutil.copytree(directory, tmp_path / "old"))
    code, out, _ = run(capsys, str(directory), "--diff", str(old), "--format", "json")
    assert code == 0
    data = json.loads(out)
    assert {one["what"] for one in data["diff"]["kernels"]} == {"the same kernel"}
    assert len(data["diff"]["kernels"]) == len(data["kernels"])
    assert run(capsys, str(directory), "--diff", str(old))[0] == 0
    page = directory.with_name("bert-tiny.html").read_text()
    assert "before and after" in page
    code, out, _ = run(capsys, str(directory), "--diff", str(old), "--format", "table")
    assert code == 0
    assert "old before" in out


def test_a_diff_needs_an_artifact(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "tuning.db"
    TuningDatabase.open(path).close()
    code, _, err = run(capsys, "--db", str(path), "--diff", str(tmp_path))
    assert code == 2
    assert "--diff compares an artifact with OLD" in err
