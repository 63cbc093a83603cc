from __future__ import annotations

import io
import json
import logging
import sys

import pytest

from relaxtune.pipeline.cli.output import OutputFormat, TableView, configure_logging, emit

VIEW = TableView("title", ("name", "fix"), (("x", "pip install 'relaxtune[export]'"),))


def test_logs_go_to_the_stderr_of_the_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    configure_logging(verbose=False)
    for _ in range(2):
        stream = io.StringIO()
        monkeypatch.setattr(sys, "stderr", stream)
        logging.getLogger("relaxtune.pipeline.something").info("found it")
        logging.getLogger("relaxtune.pipeline.something").debug("a detail")
        assert stream.getvalue() == "INFO found it\n"


def test_details_are_logged_when_verbose(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logging(verbose=True)
    logging.getLogger("relaxtune.schedules.something").debug("a detail")
    assert capsys.readouterr().err == "DEBUG a detail\n"


def test_other_handlers_still_see_the_records(caplog: pytest.LogCaptureFixture) -> None:
    configure_logging(verbose=False)
    logging.getLogger("relaxtune.models").warning("look")
    assert "look" in caplog.text


def test_cells_with_brackets_are_printed_as_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    emit(OutputFormat.TABLE, {}, VIEW)
    assert "relaxtune[export]" in capsys.readouterr().out


def test_json_is_one_document(capsys: pytest.CaptureFixture[str]) -> None:
    emit(OutputFormat.JSON, [{"a": 1}], VIEW)
    assert json.loads(capsys.readouterr().out) == [{"a": 1}]
