"""What the command line does around each command."""

from __future__ import annotations

import gc
import importlib
from pathlib import Path

import pytest

from relaxtune.pipeline.errors import UsageError
from relaxtune.pipeline.jobs.values import TuneRequest
from relaxtune.tuning_db.records import Mode

# The package has a name `app`, too.
app_module = importlib.import_module("relaxtune.pipeline.cli.app")


def test_garbage_is_collected_seldom_within_a_command_and_as_before_after_it(monkeypatch: pytest.MonkeyPatch) -> None:
    before, within = gc.get_threshold(), list[tuple[int, ...]]()
    monkeypatch.setattr(app_module, "app", lambda **_options: within.append(gc.get_threshold()))
    app_module.main([])
    assert within[0][0] > before[0]
    assert gc.get_threshold() == before


@pytest.mark.parametrize("setting", [["--set", "rerank=6"], ["--set=rerank=6"], ["--rerank", "6"]])
def test_a_rare_setting_is_an_option_and_a_key_of_set(setting: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[TuneRequest] = []

    def tune_model(_model: object, request: TuneRequest, *_others: object, **_more: object) -> None:
        kept.append(request)
        raise UsageError("far enough")

    monkeypatch.setattr("relaxtune.pipeline.jobs.compile_and_tune.tune_model", tune_model)
    with pytest.raises(SystemExit):
        app_module.main(["tune", "bert-tiny", *setting, "--set", "graph-search=off", "--set", "mode=force"])
    assert (kept[0].tuning.rerank, kept[0].tuning.graph_s, kept[0].tuning.mode) == (6, 0.0, Mode.FORCE)


@pytest.mark.parametrize(
    ("setting", "message"),
    [("speed=9", "--set 'speed=9': expected KEY=VALUE with a key of "), ("rerank", "expected KEY=VALUE"),
     ("embed-weights=perhaps", "expected true or false")],
)  # fmt: skip
def test_a_setting_that_is_none_is_refused(setting: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        app_module.main(["compile", "bert-tiny", "--set", setting])
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [(["compile", "bert-tiny", "--trials", "3"],
      "--trials is no option of `relaxtune compile`; these commands have it: tune"),
     (["db", "top", "--dry-run"], "--dry-run is no option of `relaxtune db top`; these commands have it: db prune"),
     (["tune", "bert-tiny", "--rtol", "1"], "have it: validate, compare, gate, artifact promote")],
)  # fmt: skip
def test_an_option_of_another_command_is_refused_with_that_command(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        app_module.main(arguments)
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


def test_an_option_of_no_command_is_refused_as_typer_does(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        app_module.main(["tune", "bert-tiny", "--nonsense"])
    assert ended.value.code == 2
    assert "No such option: --nonsense" in capsys.readouterr().err


def test_the_default_database_is_used_if_it_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    used: list[object] = []

    def compile_model(*_arguments: object, database: object, **_options: object) -> None:
        used.append(None if database is None else str(database))
        raise UsageError("far enough")

    monkeypatch.setattr("relaxtune.pipeline.jobs.compile_and_tune.compile_model", compile_model)
    monkeypatch.chdir(tmp_path)
    for arguments in [], ["--db", "none"], ["--db", "other.db"]:
        with pytest.raises(SystemExit):
            app_module.main(["compile", "bert-tiny", *arguments])
    (tmp_path / "relaxtune.db").touch()
    for arguments in [], ["--db", "none"]:
        with pytest.raises(SystemExit):
            app_module.main(["compile", "bert-tiny", *arguments])
    monkeypatch.setenv("RELAXTUNE_DB", "mine.db")
    with pytest.raises(SystemExit):
        app_module.main(["compile", "bert-tiny"])
    assert used == [None, None, "other.db", "relaxtune.db", None, "mine.db"]
