from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.whole_models.target_matrix import compiled, rows_of, with_rows

pytestmark = pytest.mark.slow


def test_rows_that_are_not_compiled_again_stay_with_their_commit(tmp_path: Path) -> None:
    path = tmp_path / "matrix.json"
    assert rows_of(path) == []
    new = {"model": "bert-tiny", "target": "cuda:sm_80", "commit": "new"}
    other = {"model": "vit-tiny", "target": "cuda:sm_80"}
    path.write_text(json.dumps({"commit": "old", "rows": [other, {**new, "commit": "older"}]}))
    assert with_rows(rows_of(path), [new]) == [new, {**other, "commit": "old"}]
    assert with_rows(rows_of(path), []) == [{**new, "commit": "older"}, {**other, "commit": "old"}]


def test_what_a_model_takes_of_a_target_is_overheard() -> None:
    row = compiled("bert-tiny:fp16", "cuda:sm_80")
    assert "error" not in row, row
    assert row["registers_max"] > 0
    assert 0 < row["shared_bytes_max"] <= row["shared_bytes_limit"]
    assert row["spill_bytes"] == {}
