"""What README and the pages of docs/ show is true: commands and options exist, links lead to files, Python runs."""

from __future__ import annotations

import contextlib
import functools
import io
import re
import shlex
import sys
from pathlib import Path

import pytest

from relaxtune.pipeline.cli.app import main
from tests import warm_python

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
TEXTS = {path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8") for path in PAGES}


def blocks(language: str) -> list[tuple[str, str]]:
    found = rf"^```{language}\n(.*?)^```"
    return [
        (page, block) for page, text in TEXTS.items() for block in re.findall(found, text, re.DOTALL | re.MULTILINE)
    ]


# Lines of shell blocks, and after the prompt of sessions; without a comment or what the output is piped to.
LINES = [line for _, block in blocks("sh") for line in block.splitlines()]
LINES += [line[2:] for _, block in blocks("console") for line in block.splitlines() if line.startswith("$ ")]
COMMANDS = sorted({line.split(" | ")[0] for line in LINES if line.startswith("relaxtune ")})
TARGETS = sorted({target for line in LINES for target in re.findall(r"^make (\w[\w-]*)", line)})


def test_pages_show_commands() -> None:
    assert len(COMMANDS) >= 20
    assert {"demo", "test"} <= set(TARGETS)


def test_readme_fits_on_two_screens() -> None:
    assert len(TEXTS["README.md"].splitlines()) <= 100


@functools.cache
def help_of(*name: str) -> str:
    with contextlib.redirect_stdout(io.StringIO()) as shown, pytest.raises(SystemExit) as ended:
        main([*name, "--help"])
    assert not ended.value.code
    return re.sub(r"\x1b\[[0-9;]*m", "", shown.getvalue())


@pytest.mark.parametrize("command", COMMANDS)
def test_command_of_a_page_exists_with_its_options(command) -> None:
    words = shlex.split(command, comments=True)[1:]
    name = words[: 2 if words[0] in ("artifact", "batch", "cluster", "db") else 1]
    shown = help_of(*name)
    for option in (word for word in words if word.startswith("--")):
        assert option in shown, f"{' '.join(name)} has no option {option}"


@pytest.mark.parametrize("page", TEXTS)
def test_options_in_the_text_of_a_page_are_options_of_some_command(page, every_option) -> None:
    text = re.sub(r"```.*?```", "", TEXTS[page], flags=re.DOTALL)
    # `python -m ...`, `pytest ...` and `pip ...` have options of their own.
    shown = [code for code in re.findall(r"`([^`\n]+)`", text) if not re.match(r"python |pytest|pip |make ", code)]
    unknown = {option for code in shown for option in re.findall(r"(?<![\w-])--[a-z][\w-]*", code)} - every_option
    assert not unknown


@pytest.fixture(scope="module")
def every_option() -> set[str]:
    from typer.main import get_command

    from relaxtune.pipeline.cli.app import app

    found = {"--help"}
    todo = [get_command(app)]
    while todo:
        command = todo.pop()
        todo += getattr(command, "commands", {}).values()
        found |= {name for option in command.params for name in (*option.opts, *option.secondary_opts)}
    return found


@pytest.mark.parametrize("page", TEXTS)
def test_links_of_a_page_lead_to_files(page) -> None:
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", TEXTS[page]):
        if "://" not in target:
            assert ((ROOT / page).parent / target).exists(), target


@pytest.mark.parametrize("page", TEXTS)
def test_files_that_a_page_names_exist(page) -> None:
    rooms = "benchmarks|docs|models|notebooks|pipeline|relaxtune|requirements|schedules|tests|tuning_db"
    named = re.findall(rf"`((?:{rooms})/[\w./-]*)`", TEXTS[page])
    assert [name for name in named if not (ROOT / name).exists()] == []
    assert named or page != "docs/house.md"


def test_the_page_about_the_house_names_every_room() -> None:
    rooms = [
        path.parent.relative_to(ROOT)
        for top in ("models", "pipeline", "schedules", "tuning_db")
        for path in ROOT.glob(f"{top}/*/__init__.py")
    ]
    assert rooms
    text = TEXTS["docs/house.md"]
    assert [str(room) for room in rooms if f"`{room}/" not in text] == []


@pytest.mark.parametrize("target", TARGETS)
def test_make_target_of_a_page_exists(target) -> None:
    assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(encoding="utf-8"), flags=re.MULTILINE)


def test_ci_runs_the_readmes_test_command() -> None:
    commands = [line for line in (ROOT / ".ci" / "run").read_text(encoding="utf-8").splitlines() if "make" in line]
    assert commands == ["make check", "make test"]


PYTHON = [
    pytest.param(page, code, id=page, marks=pytest.mark.slow if page == "docs/generation.md" else ())
    for page, code in blocks("python")
]


@pytest.mark.parametrize(("page", "code"), PYTHON)
def test_python_of_a_page_runs(page, code, tmp_path) -> None:
    outcome = warm_python.run([sys.executable, "-c", code], cwd=tmp_path)
    assert outcome.returncode == 0, outcome.stderr


def test_every_test_that_the_guarantees_name_exists() -> None:
    named = re.findall(
        r"`(tests/\S+?\.py|)(?:::(test_\w+))?`", (ROOT / "tests" / "guarantees.md").read_text(encoding="utf-8")
    )
    path, found = "", 0
    for own, test in named:
        path = own or path
        assert (ROOT / path).is_file(), path
        if test:
            found += 1
            assert re.search(rf"def {test}\(", (ROOT / path).read_text(encoding="utf-8")), f"{path}::{test}"
    assert found > 40
