"""What the command line does around each command."""

from __future__ import annotations

import gc
import importlib

import pytest

# The package has a name `app`, too.
app_module = importlib.import_module("relaxtune.pipeline.cli.app")


def test_garbage_is_collected_seldom_within_a_command_and_as_before_after_it(monkeypatch: pytest.MonkeyPatch) -> None:
    before, within = gc.get_threshold(), list[tuple[int, ...]]()
    monkeypatch.setattr(app_module, "app", lambda **_options: within.append(gc.get_threshold()))
    app_module.main([])
    assert within[0][0] > before[0]
    assert gc.get_threshold() == before
