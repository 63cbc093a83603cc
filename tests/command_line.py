"""One command of the command line, run in this process: how it ended and what it printed."""

from __future__ import annotations

import json
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
