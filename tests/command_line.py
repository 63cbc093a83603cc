"""The words of the command line, and one of them run in this process: how it ended and what it printed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest


class Ended(NamedTuple):
    """An exit code, and all that was printed."""

    code: int
    stdout: str
    stderr: str

    @property
    def data(self) -> Any:
        """What a command with `--format json` printed."""
        return json.loads(self.stdout)


def exit_code(*arguments: object) -> int:
    """Run `relaxtune ARGUMENTS` and return its exit code."""
    from relaxtune.pipeline.cli.app import main

    with pytest.raises(SystemExit) as ended:
        main([str(argument) for argument in arguments])
    return int(ended.value.code or 0)


def all_words() -> list[str]:
    """Return the words of the command line: "tune", "db top", ..."""
    import typer

    from relaxtune.pipeline.cli.app import app

    def below(command: Any, path: str) -> Iterator[str]:
        for name, one in command.commands.items():
            word = f"{path} {name}".strip()
            if hasattr(one, "commands"):
                yield from below(one, word)
            else:
                yield word

    return list(below(typer.main.get_command(app), ""))
