"""What is never built: schedules beyond a GPU's limits, searches that cannot win."""

from __future__ import annotations

import math
import re
from dataclasses import replace

import pytest

from relaxtune.pipeline.tuning.search import matmul_bound as bounds
from relaxtune.pipeline.tuning.search.cost_model import WARMUP_CANDIDATES, FastCostModel
from relaxtune.pipeline.tuning.search.evolution import TaskSearch
from relaxtune.pipeline.tuning.search.matmul_bound import bound_us, search_bound_us
from relaxtune.schedules.search.space import make_space
from relaxtune.schedules.targets import resolve_target
from tests.pipeline.tuning.tuning_cases import Place, add_one_mod, matmul_task, task_of

H200 = (132, 1.98e9)


def test_the_search_proposes_nothing_beyond_the_threads_of_a_block() -> None:
    target = resolve_target("cuda:sm_90a").target
    search = TaskSearch(
        matmul_task(64, 128, 64).mod,
        target,
        make_space(target),
        FastCostModel(WARMUP_CANDIDATES, 0),
        [],
        name="matmul",
        seed=0,
        per_round=8,
        population=16,
        threads=1,
    )
    # It is this postprocessor that refuses too many threads and too much shared memory, before anything is built.
    assert "VerifyGPUCode" in str([type(rule).__name__ for rule in search.context.space_generator.postprocs])
    proposed = search.propose()
    assert proposed
    for one in proposed:
        found = re.findall(r'thread_binding\((\d+), thread="(threadIdx\.[xyz])"', one.module.script())
        extents = {axis: int(extent) for extent, axis in found}
        assert 1 <= math.prod(extents.values()) <= 1024


def test_the_bound_is_the_float32_rate() -> None:
    # 60 TFLOP/s on an H200's CUDA cores at its highest clock.
    assert bound_us(6.04e8, *H200) == pytest.approx(9.03, rel=0.01)


def test_only_float_contractions_on_a_known_gpu_are_bound(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    class Device:
        exist = True
        max_clock_rate = 1_980_000

    cuda = resolve_target("cuda:sm_90a")
    known = replace(cuda, limits=replace(cuda.limits, sm_count=132))
    monkeypatch.setattr(bounds.tvm, "cuda", lambda index: Device())
    matmul = matmul_task(128, 768, 768)
    assert search_bound_us(matmul, known) == pytest.approx(bound_us(matmul.flops, *H200))
    assert search_bound_us(matmul, replace(cuda, limits=replace(cuda.limits, sm_count=None))) is None
    assert search_bound_us(matmul, place.target) is None
    assert search_bound_us(task_of("add", add_one_mod()), known) is None
