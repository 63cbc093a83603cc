from __future__ import annotations

import ast
import io
import json
import logging
import subprocess
import sys
from pathlib import Path

import pytest

from relaxtune.pipeline.cli.output import (
    DataFormat,
    OutputFormat,
    SafeConsole,
    configure_logging,
    emit,
    print_error,
    stdout_console,
)
from relaxtune.pipeline.printed_tables import TableView

VIEW = TableView("title", ("name", "fix"), (("x", "pip install 'relaxtune[export]'"),))


def test_logs_go_to_the_stderr_of_the_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    configure_logging(verbose=False)
    for _ in range(2):
        stream = io.StringIO()
        monkeypatch.setattr(sys, "stderr", stream)
        logging.getLogger("relaxtune.pipeline.something").info("found it")
        logging.getLogger("relaxtune.pipeline.something").debug("a detail")
        assert stream.getvalue() == "INFO found it\n"


@pytest.mark.parametrize("verbose", [False, True])
def test_steps_of_the_search_are_logged_when_verbose(verbose: bool, capsys: pytest.CaptureFixture[str]) -> None:
    configure_logging(verbose=verbose)
    search = logging.getLogger("relaxtune.metaschedule")
    search.info("a round")
    search.warning("a fault")
    assert capsys.readouterr().err == ("INFO a round\n" if verbose else "") + "WARNING a fault\n"


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


HOSTILE = "a\x1b]0;owned\x07\x1b[2Jb\x9b31m\u202egpj.\ud800c"


def test_no_control_character_reaches_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logging(verbose=False)
    view = TableView(HOSTILE, ("name", HOSTILE), ((HOSTILE, "x"),))
    for form in (OutputFormat.TABLE, OutputFormat.JSON, DataFormat.CSV):
        emit(form, [{"name": HOSTILE}], view)
    stdout_console().print(HOSTILE)
    print_error(HOSTILE)
    # pytest keeps what is logged, and its processes cannot send half a surrogate pair to each other.
    logging.getLogger("relaxtune").warning("%s", HOSTILE.replace("\ud800", "\x1b"))
    captured = capsys.readouterr()
    written = captured.out + captured.err
    assert not set(written) & set("\x1b\x07\x9b\u202e\ud800")
    assert written.count("?[2Jb?31m?gpj.?c") >= 5


def test_console_keeps_its_own_colours() -> None:
    stream = io.StringIO()
    SafeConsole(file=stream, force_terminal=True, color_system="standard").print("a\x1bb", style="red")
    assert stream.getvalue() == "\x1b[31ma?b\x1b[0m\n"


def test_an_error_shows_no_password(capsys: pytest.CaptureFixture[str]) -> None:
    print_error("cannot reach postgresql://user:s3cr3t@host/name")
    assert capsys.readouterr().err == "error: cannot reach postgresql://user:***@host/name\n"


def test_only_the_consoles_of_this_file_print() -> None:
    """`Console()` elsewhere, or a bare print, would write what models call their tensors as it is."""
    for path in (Path(__file__).parents[3] / "pipeline").rglob("*.py"):
        calls = [n for n in ast.walk(ast.parse(path.read_text(encoding="utf-8"))) if isinstance(n, ast.Call)]
        names = {call.func.id for call in calls if isinstance(call.func, ast.Name)}
        assert not names & {"Console", "print"}, path


def test_help_and_version_of_every_command_load_no_tvm() -> None:
    code = (
        "import sys\n"
        "from relaxtune.pipeline.cli.app import main\n"
        "try:\n    main(['tune', '--help'])\n"
        "except SystemExit as ended:\n    assert not ended.code\n"
        "sys.exit(any(name in sys.modules for name in ('tvm', 'onnx', 'sqlalchemy')))\n"
    )
    outcome = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert outcome.returncode == 0, outcome.stderr
    assert "--time-budget" in outcome.stdout


@pytest.mark.parametrize("width", [80, 120])
def test_numbers_and_words_of_a_table_are_not_folded_where_names_have_room(width: int) -> None:
    row = ("fused_packed_matmul_add_gelu_and_all_that", "batch_matmul", "m=32 n=256 k=64 and more", "2", "1,089.536")
    console = SafeConsole(file=io.StringIO(), width=width)
    console.print(TableView("title", ("task", "family", "sizes", "runs", "MFLOP"), (row,)))
    text = console.file.getvalue()
    assert all(word in text for word in ("batch_matmul", "runs", "1,089.536"))
    assert max(map(len, text.splitlines())) <= width


def test_a_row_of_many_columns_is_a_section_where_the_terminal_is_narrow() -> None:
    names = tuple(f"measure {number}" for number in range(9))
    view = TableView("title", ("output", *names), (("last_hidden_state", *["1.000000"] * 9), ("pooler", *["0"] * 9)))
    console = SafeConsole(file=io.StringIO(), width=80)
    console.print(view)
    lines = console.file.getvalue().splitlines()
    assert [line.split()[1:4:2] for line in lines if "output" in line] == [
        ["output", "last_hidden_state"],
        ["output", "pooler"],
    ]
    assert sum("measure 8" in line for line in lines) == 2
    wide = SafeConsole(file=io.StringIO(), width=160)
    wide.print(view)
    assert sum("measure 8" in line for line in wide.file.getvalue().splitlines()) == 1
