"""Stream-K in the GEMM template: who sums what, and that no wait is for ever."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest
import tvm
from tvm import tirx
from tvm.sym import Analyzer
from tvm.tirx.script import builder as T

from relaxtune.pipeline.codegen.cuda_compiler import cuda_compiler
from relaxtune.schedules.errors import Refusal
from relaxtune.schedules.marks import CONSTANT_PARAMS_ATTR
from relaxtune.schedules.targets import resolve_target
from relaxtune.schedules.templates.gemm_sm90.plan import GemmParameters, GemmPlan, make_plan
from relaxtune.schedules.templates.gemm_sm90.template import GemmSm90
from relaxtune.schedules.templates.gemm_sm90.tiles import StreamTiles
from relaxtune.schedules.templates.lowering import register_mixed_pipeline
from tests.schedules.templates.cubin import captured_cubins
from tests.schedules.templates.matmul_cases import MatmulCase
from tests.schedules.templates.norm_cases import known

TARGET = resolve_target("cuda:sm_90a")
CASE = MatmulCase((300,), 320, 1032, ("bias", "residual"))
STREAM = GemmParameters(64, 64, 3, 1, 50, dependent=True, stream_k=True)


def plan(case: MatmulCase, parameters: GemmParameters) -> GemmPlan:
    found = make_plan(known(case.func()), parameters, TARGET.limits)
    assert not isinstance(found, Refusal), found
    return found


@pytest.mark.parametrize(
    ("rows", "n", "k", "blocks"),
    [
        (300, 320, 1032, 50),
        (300, 320, 1032, 7),
        (64, 64, 1032, 5),
        (300, 320, 64, 25),
        (300, 320, 128, 999),
        (1, 1024, 768, 132),
    ],
)
def test_blocks_share_all_sums_and_wait_for_what_earlier_blocks_make_first(
    rows: int, n: int, k: int, blocks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = plan(MatmulCase((rows,), n, k), replace(STREAM, blocks=blocks))
    monkeypatch.setattr(T, "Bind", lambda value: value)
    analyzer = Analyzer()

    def number(value: tirx.Expr | int) -> int:
        return int(analyzer.simplify(tirx.convert(value)))

    summed: dict[tuple[int, int], list[int]] = {}
    first: dict[int, tuple[int, int]] = {}
    waits: list[tuple[int, int, tuple[int, int]]] = []
    shares = []
    for block in range(found.blocks):
        tiles = StreamTiles(found, tirx.IntImm("int32", block))
        share = 0
        for turn in range(number(tiles.count())):
            part = tiles.part(tirx.IntImm("int32", turn))
            place, start, count = (number(part.row), number(part.column)), number(part.start), number(part.count)
            assert count > 0
            summed.setdefault(place, []).extend(range(start, start + count))
            share += count
            ends = bool(number(part.ends))
            assert ends == (start + count == found.k_tiles)
            if turn == 0 and not ends:
                first[block] = place
            # Only a part that ends a sum is written, and only a first one does not.
            assert ends or turn == 0
            if ends:
                waits += [(block, helper, place) for helper in range(block - number(part.helpers), block)]
        shares.append(share)
    assert set(summed) == {(row, column) for row in range(found.tiles_m) for column in range(found.tiles_n)}
    assert all(sorted(positions) == list(range(found.k_tiles)) for positions in summed.values())
    assert max(shares) == found.k_share <= min(shares) + 1
    # Each sum that is handed over is waited for once, by a later block, in the tile that it is of.
    assert sorted(helper for _, helper, _ in waits) == sorted(first)
    assert all(first[helper] == place for _, helper, place in waits)


def source(*kernels: GemmParameters) -> str:
    """Return the CUDA source of a module of kernels."""
    functions = {}
    for number, parameters in enumerate(kernels):
        func = GemmSm90().apply(CASE.func(), TARGET, parameters)
        functions[f"main{number}"] = func.with_attr("global_symbol", f"main{number}")
    with captured_cubins("sm_90a") as cubins:
        built = tvm.tirx.build(tvm.IRModule(functions), target=TARGET.target, pipeline=register_mixed_pipeline())
    assert len(cubins) == 1
    return str(built.imports[0].inspect_source())


def test_kernels_of_a_module_share_memory_of_the_same_sizes() -> None:
    text = source(STREAM, replace(STREAM, stages=4), replace(STREAM, blocks=60))
    names = set(re.findall(r"__device__ float4 (\w+)\[", text))
    # The guard keeps one copy of each; all of it compiled.
    assert names == {f"relaxtune_stream_float32_{blocks * 8 * 128}_{blocks * 4}_sums" for blocks in (50, 60)}


@pytest.mark.gpu
@pytest.mark.skipif(
    not tvm.cuda(0).exist or str(tvm.cuda(0).compute_version) != "9.0", reason="needs a GPU of compute capability 9.0"
)
@pytest.mark.parametrize("blocks", [50, 132, 999])
def test_launches_one_after_another_agree_in_every_bit(blocks: int) -> None:
    """Flags are as at first when a launch ends; sums are added in one order. With 999 blocks, not all run at a time."""
    case = replace(CASE, rows=(1000,), k=4096)
    func = GemmSm90().apply(case.func().with_attr(CONSTANT_PARAMS_ATTR, [1]), TARGET, replace(STREAM, blocks=blocks))
    with cuda_compiler("sm_90a"):
        mod = tvm.IRModule({"main": func.with_attr("global_symbol", "main")})
        kernel = tvm.tirx.build(mod, target=TARGET.target, pipeline=register_mixed_pipeline())
    rng, device = np.random.default_rng(0), tvm.cuda(0)
    shapes = [[int(size) for size in param.ty.shape] for param in func.params]
    inputs = [
        tvm.runtime.tensor(rng.normal(size=shape).astype(str(param.ty.dtype)), device)
        for shape, param in zip(shapes[:-1], func.params[:-1], strict=True)
    ]
    outputs = [tvm.runtime.tensor(np.full(shapes[-1], np.nan, "float16"), device) for _ in range(30)]
    for output in outputs:
        kernel["main"](*inputs, output)
    first = outputs[0].numpy()
    assert np.isfinite(first).all()
    assert all(np.array_equal(first, output.numpy()) for output in outputs[1:])
