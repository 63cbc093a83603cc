"""Every word of the command line is run once as a user runs it: nightly, by `tests.guardrails.words`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.command_line import all_words
from tests.guardrails.words import words_with_a_step

ROOT = Path(__file__).parents[2]


def test_every_word_has_a_step() -> None:
    assert sorted(words_with_a_step()) == sorted(all_words()), "add a step to tests/guardrails/words.py"


@pytest.mark.nightly
def test_every_word_ends_as_it_should_and_says_what_it_should() -> None:
    command = [sys.executable, "-m", "tests.guardrails.words"]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=1800, check=False)
    assert ended.returncode == 0, ended.stdout
