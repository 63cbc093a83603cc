from __future__ import annotations

import pytest
from tvm import tirx

from relaxtune.pipeline.importer import import_model
from relaxtune.pipeline.passes import LoweredModule, LoweringOptions, lower
from relaxtune.schedules.marks import TF32_ATTR
from relaxtune.schedules.search.tensor_tile import takes_tensor_tiles
from relaxtune.schedules.targets import resolve_target
from tests.pipeline.passes.pass_cases import small_model

HOPPER = resolve_target("cuda:sm_90a").target


def marked(target: object, options: LoweringOptions) -> list[tirx.PrimFunc]:
    lowered: LoweredModule = lower(import_model(small_model("gpt2-tiny")), target, options)
    functions = [func for _, func in lowered.mod.functions_items() if isinstance(func, tirx.PrimFunc)]
    return [func for func in functions if func.attrs.get(TF32_ATTR, False)]


def test_matmuls_with_rounded_operands_may_multiply_in_tf32() -> None:
    found = marked(HOPPER, LoweringOptions(precision="tf32"))
    assert len(found) >= 4
    assert all(takes_tensor_tiles(func, HOPPER) for func in found)


@pytest.mark.parametrize(
    ("target", "options"),
    [
        ("cuda:sm_90a", LoweringOptions()),
        ("cuda:sm_90a", LoweringOptions(precision="tf32", disabled_passes=frozenset({"round_to_tf32"}))),
        ("cuda:sm_90a", LoweringOptions(precision="tf32", disabled_passes=frozenset({"mark_tf32"}))),
        ("cuda:sm_75", LoweringOptions(precision="tf32")),
        ("llvm", LoweringOptions(precision="tf32")),
    ],
    ids=["float32", "not rounded", "switched off", "no tf32", "CPU"],
)
def test_no_others(target: str, options: LoweringOptions) -> None:
    assert marked(resolve_target(target).target, options) == []
