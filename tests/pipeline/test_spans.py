"""What processes write of their stages, and that nothing is written unless it is asked for."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from relaxtune.pipeline.spans import VARIABLE, note_span, read_spans, span


def test_stages_of_several_processes_are_in_one_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, str(tmp_path / "spans"))
    with pytest.raises(ZeroDivisionError), span("fails", "a task"):
        _ = 1 / 0
    note_span("waited", "", 1.0, 3.5)
    code = "from relaxtune.pipeline.spans import span\nwith span('elsewhere'): sum(range(10000))"
    subprocess.run([sys.executable, "-c", code], check=True)
    failed, waited, elsewhere = read_spans(tmp_path / "spans")
    assert (failed.stage, failed.of, failed.process) == ("fails", "a task", os.getpid())
    assert (waited.seconds, waited.ended_s, waited.cpu_s) == (2.5, 3.5, None)
    assert elsewhere.process != os.getpid()
    assert 0 < (elsewhere.cpu_s or 0) <= elsewhere.seconds + 0.01
    assert failed.ended_s < elsewhere.began_s


def test_nothing_is_written_unless_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.chdir(tmp_path)
    with span("quiet"):
        note_span("quiet", "", 0.0, 1.0)
    assert not list(tmp_path.iterdir())
