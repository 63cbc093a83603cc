"""What README shows is true: its commands exist with those options, its Python runs."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from relaxtune.pipeline.cli.app import main

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
COMMANDS = re.findall(r"^relaxtune .*$", README, flags=re.MULTILINE)
TARGETS = re.findall(r"^make (\w[\w-]*)", README, flags=re.MULTILINE)


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, flags=re.DOTALL)


def test_readme_shows_commands() -> None:
    assert len(COMMANDS) >= 8
    assert {"demo", "test"} <= set(TARGETS)


@pytest.mark.parametrize("command", COMMANDS)
def test_command_of_the_readme_exists_with_its_options(command, capsys) -> None:
    words = shlex.split(command, comments=True)[1:]
    name = words[: 2 if words[0] == "db" else 1]
    with pytest.raises(SystemExit) as ended:
        main([*name, "--help"])
    assert not ended.value.code
    shown = re.sub(r"\x1b\[[0-9;]*m", "", capsys.readouterr().out)
    for option in (word for word in words if word.startswith("--")):
        assert option in shown, f"{' '.join(name)} has no option {option}"


@pytest.mark.parametrize("target", TARGETS)
def test_make_target_of_the_readme_exists(target) -> None:
    assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(encoding="utf-8"), flags=re.MULTILINE)


def test_ci_runs_the_readmes_test_command() -> None:
    commands = [line for line in (ROOT / ".ci" / "run").read_text(encoding="utf-8").splitlines() if "make" in line]
    assert commands == ["make test"]


@pytest.mark.parametrize("number", range(len(blocks("python"))))
def test_python_of_the_readme_runs(number, tmp_path) -> None:
    code = blocks("python")[number]
    outcome = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert outcome.returncode == 0, outcome.stderr
