"""The kernel that samples tokens: its code without a GPU, its source on a CPU, and on a GPU against the reference."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import tvm

from relaxtune.pipeline.codegen.cuda_compiler import cuda_compiler
from relaxtune.schedules.functions.sampling import SamplingSpec
from relaxtune.schedules.sampling import sampling_function
from relaxtune.schedules.targets import resolve_target
from relaxtune.schedules.templates.lowering import register_mixed_pipeline
from tests.schedules import sampling_cases as cases
from tests.schedules.sampling_reference import Row
from tests.schedules.templates.block_on_cpu import run_on_cpu
from tests.schedules.templates.cubin import captured_cubins, read_cubin

needs_gpu = pytest.mark.skipif(not tvm.cuda(0).exist, reason="needs a CUDA device")


@pytest.mark.parametrize(
    ("arch", "dtype", "inputs"),
    [
        ("sm_90a", "bfloat16", ()),
        ("sm_90a", "float16", ("counts", "bias", "mask")),
        ("sm_80", "float32", ("mask",)),
        ("sm_75", "float16", ()),
    ],
)
def test_kernel_compiles_without_spills(arch: str, dtype: str, inputs: tuple[str, ...]) -> None:
    target = resolve_target(f"cuda:{arch}")
    spec = SamplingSpec(2, 128_256, dtype, **dict.fromkeys(inputs, True))
    func = sampling_function(spec, target).with_attr("global_symbol", "main")
    with captured_cubins(target.arch) as found:
        tvm.tirx.build(tvm.IRModule({"main": func}), target=target.target, pipeline=register_mixed_pipeline())
    cubin = read_cubin(found[-1])
    assert cubin.registers <= 64
    assert cubin.frame_bytes == 0


@pytest.fixture(params=["sm_90a", "sm_80"])
def emulated(request: pytest.FixtureRequest, tmp_path: Path) -> cases.Run:
    target, cluster = resolve_target(f"cuda:{request.param}"), 8 if request.param == "sm_90a" else 1

    def run(spec: SamplingSpec, arrays: list[np.ndarray]) -> None:
        func = sampling_function(spec, target)
        named = dict(zip((str(param.name) for param in func.params), arrays, strict=True))
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        folder.mkdir()
        run_on_cpu(func, target, named, len(arrays[0]) * cluster, folder, cluster=cluster)

    return run


@pytest.mark.quick_cases("sm_90a")
def test_source_gives_the_references_tokens(emulated: cases.Run) -> None:
    cases.check_rows(emulated, cases.random_rows(np.random.default_rng(2), 1000, 2))
    # More tokens stay than a list holds.
    logits = np.round(np.random.default_rng(3).standard_normal(5003) * 8).astype("float32") / 8
    parameters = {"top_k": 4000.0, "top_p": 0.9, "typical_p": 0.8}
    cases.check_rows(emulated, [Row(logits, parameters=parameters)])


@pytest.mark.slow
def test_source_handles_extremes(emulated: cases.Run) -> None:
    cases.check_extremes(emulated)


@pytest.fixture(scope="module")
def run() -> Iterator[cases.Run]:
    target = resolve_target("cuda")
    with cuda_compiler(target.arch):
        yield cases.built(target, tvm.cuda(0))


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("vocabulary", [7, 500, 20011])
def test_each_filter_keeps_the_references_set(run: cases.Run, vocabulary: int) -> None:
    cases.check_sets(run, vocabulary, 256 if vocabulary < 1000 else 32)


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize(
    ("vocabulary", "rows", "dtype"),
    [
        (1, 2, "float32"),
        (7, 60, "float16"),
        (1000, 100, "float32"),
        (50257, 40, "bfloat16"),
        (128256, 30, "float16"),
        (128256, 20, "float32"),
        # Its x do not fit into shared memory.
        (500_009, 4, "bfloat16"),
    ],
)
def test_random_rows_with_all_inputs_give_the_references_tokens(
    run: cases.Run, vocabulary: int, rows: int, dtype: str
) -> None:
    cases.check_rows(run, cases.random_rows(np.random.default_rng(vocabulary), vocabulary, rows, dtype), dtype)


@pytest.mark.gpu
@needs_gpu
def test_draws_are_distributed_as_the_kept_probabilities(run: cases.Run) -> None:
    cases.check_distribution(run)


@pytest.mark.gpu
@needs_gpu
def test_extreme_logits_and_masks(run: cases.Run) -> None:
    cases.check_extremes(run)


@pytest.mark.gpu
@needs_gpu
def test_token_of_a_row_depends_on_no_other(run: cases.Run) -> None:
    cases.check_steadiness(run, 9001)
