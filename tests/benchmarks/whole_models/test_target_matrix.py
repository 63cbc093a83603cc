from __future__ import annotations

import json
from pathlib import Path

from benchmarks.whole_models.target_matrix import rows_of, with_rows


def test_rows_that_are_not_compiled_again_stay_with_their_commit(tmp_path: Path) -> None:
    path = tmp_path / "matrix.json"
    assert rows_of(path) == []
    new = {"model": "bert-tiny", "target": "cuda:sm_80", "commit": "new"}
    other = {"model": "vit-tiny", "target": "cuda:sm_80"}
    path.write_text(json.dumps({"commit": "old", "rows": [other, {**new, "commit": "older"}]}))
    assert with_rows(rows_of(path), [new]) == [new, {**other, "commit": "old"}]
    assert with_rows(rows_of(path), []) == [{**new, "commit": "older"}, {**other, "commit": "old"}]
