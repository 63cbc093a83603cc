from __future__ import annotations

import sys
from pathlib import Path

import pytest

from benchmarks.gpu_arms.cases import find_cases
from benchmarks.whole_models import bench_targets_gpu
from relaxtune.pipeline.jobs import compile_and_tune as jobs
from relaxtune.pipeline.prepare import ModelRequest


def test_build_compiles_what_is_missing_portably_where_that_can_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[str, bool]] = []

    def compiled(request: ModelRequest, out: Path, *, samples: int) -> None:
        assert samples == 0
        asked.append((request.target, request.portable))
        out.mkdir()

    monkeypatch.setattr(jobs, "compile_model", compiled)
    cases = find_cases("bert-base-1x128")
    (tmp_path / "bert-base-1x128" / "sm_90").mkdir(parents=True)
    for _ in range(2):
        bench_targets_gpu.build(tmp_path, cases, bench_targets_gpu.TARGETS.split(","), jobs=1)
    assert asked == [("cuda:sm_80", True), ("cuda:sm_90a", False)]
    assert set(bench_targets_gpu.compile_seconds(tmp_path)) == {"bert-base-1x128 sm_80", "bert-base-1x128 sm_90a"}


def test_run_without_artifacts_says_how_to_make_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["bench_targets_gpu", "run", str(tmp_path), "--cases", "bert-base"])
    monkeypatch.setattr(bench_targets_gpu, "run_case", None)
    with pytest.raises(SystemExit, match="has no artifact of these cases; make them with `build`"):
        bench_targets_gpu.main()
