"""Which candidates the benchmark of the GEMM on mma.sync measures, and that it builds them without a GPU."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.kernels.bench_gemm_sm80 import CASES, arms_of, build_case, line_of
from benchmarks.kernels.bench_gemm_sm90 import fused_matmul
from benchmarks.kernels.cubins import MANIFEST
from relaxtune.schedules.registry import TEMPLATES
from relaxtune.schedules.targets import resolve_target


def test_arms_are_candidates_one_of_a_power_of_two_and_some_that_share_sums() -> None:
    func = fused_matmul(CASES["ffn-down-1024"])
    found = list(TEMPLATES["gemm_sm80"].candidates(func, resolve_target("cuda:sm_80@H200")))
    arms = arms_of(found, 3)
    assert arms["first"] == found[0]
    assert arms["first"].block_m == 96
    assert arms["powers of two"].block_m == 64
    assert [arms["split 0"].split_k > 1, arms["1"].split_k] == [True, 1]


@pytest.mark.slow
def test_build_writes_a_manifest_that_names_the_arms(tmp_path: Path) -> None:
    told = build_case(tmp_path, "attention-output-128", "cuda:sm_90", 1)
    entries = json.loads((tmp_path / MANIFEST).read_text())
    assert told == f"attention-output-128: {len(entries)} kernels"
    assert [entry["arm"] for entry in entries][:1] == ["first"]
    assert {entry["case"] for entry in entries} == {"attention-output-128"}


def test_a_line_tells_the_best_and_what_is_wrong() -> None:
    times = {"first": [3.0, 2.0, 4.0], "1": [2.5], "split 0": [2.0], "torch": [1.0]}
    line = line_of("qkv-128", times, ["first", "1", "split 0"], ["2"])
    assert "first 3.00  best 2.00  split 2.00  torch 1.00  best is split 0, 226 TFLOP/s  WRONG: ['2']" in line
