"""The sizes that a validation draws for free axes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from tests.command_line import Ended
from tests.models.axes.test_windows import FREE, saved


def test_a_pooling_behind_strides_is_validated_where_its_window_has_room(
    relaxtune: Callable[..., Ended], tmp_path: Path
) -> None:
    model = saved(tmp_path, FREE, halvings=3)
    options = ["--target", "llvm", "--samples", 1, "--out", tmp_path / "out", "--format", "json"]
    ended = relaxtune("compile", model, *options)
    assert ended.code == 0, ended.stderr
    ended = relaxtune("compile", model, "--dim", "height=8", *options)
    assert ended.code == 1
    assert "MaxPool node 'the_last' slides a window over 1 places of axis 2" in ended.stderr
