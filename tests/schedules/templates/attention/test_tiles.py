from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
from tvm import tirx

from relaxtune.schedules.errors import Refusal
from relaxtune.schedules.functions.plain_attention import attention_function
from relaxtune.schedules.sizes import simplify
from relaxtune.schedules.templates.attention.recognise import bias_bytes, refuse_attention
from relaxtune.schedules.templates.attention.sizes import ceil_div, least, most, with_values
from relaxtune.schedules.templates.attention.tiles import TilePlan, section_of
from tests.schedules.attention_cases import AttentionCase

HALF = AttentionCase(batch=2, heads=4, queries=300, keys=300, head_dim=64, dtype="float16")


@dataclass(frozen=True)
class Parameters:
    block_k: int = 64
    split: int = 1
    blocks: int = 0


def plan(case: AttentionCase, parameters: Parameters | None = None, queries: int = 128) -> TilePlan:
    spec, _ = case.made()
    return TilePlan(spec, parameters or Parameters(), 1, queries, spec.heads, spec.batch * spec.heads)


def refusal(case: AttentionCase, **changes: object) -> str:
    spec, params = case.made()
    func = attention_function(spec, params)
    found = refuse_attention(func, replace(spec, **changes))
    assert isinstance(found, Refusal)
    return found.reason


def test_tiles_and_blocks_of_keys_cover_everything() -> None:
    made = plan(HALF)
    assert (made.tiles, made.key_blocks, made.blocks) == (3, 5, 2 * 4 * 3)
    assert not made.whole_blocks
    assert plan(replace(HALF, keys=320)).whole_blocks


def test_causal_tiles_of_a_grid_of_few_blocks_are_made_in_pairs() -> None:
    """A long and a short tile together take the time of any other pair."""
    causal = replace(HALF, causal=True)
    assert plan(causal, Parameters(blocks=132)).paired
    assert plan(causal, Parameters(blocks=132)).head_items == 2
    assert not plan(causal).paired
    assert not plan(HALF, Parameters(blocks=132)).paired


def test_keys_that_are_split_have_a_block_each() -> None:
    assert plan(HALF, Parameters(split=3)).blocks == 3 * plan(HALF).blocks
    # A grid of a fixed number of blocks is never larger than what there is to do.
    assert plan(HALF, Parameters(blocks=132)).blocks == 24


@pytest.mark.parametrize(("keys", "nothing"), [(300, False), (400, False), (200, True)])
def test_queries_before_all_keys_see_nothing(keys: int, nothing: bool) -> None:
    assert plan(replace(HALF, causal=True, keys=keys)).sees_nothing == nothing
    assert not plan(replace(HALF, keys=keys)).sees_nothing


def test_a_section_of_heads_divides_them_and_fits_the_cache() -> None:
    spec, _ = AttentionCase(batch=4, heads=12, queries=4096, keys=4096, head_dim=128, dtype="float16").made()
    section = section_of(spec, 12)
    assert 48 % section == 0
    # 2 MB of keys and values a head, 16 MB of the cache: 8 of 48.
    assert section == 8
    assert section_of(HALF.made()[0], 4) == 8


def test_sizes_are_numbers_or_expressions() -> None:
    n = tirx.Var("n", "int64")
    assert (ceil_div(300, 128), least(3, 4), most(3, 4)) == (3, 3, 4)
    assert simplify(n + 1 - n) == 1
    spec, _ = replace(HALF, queries=n, keys=n).made()
    assert not spec.is_static
    assert with_values(spec, {"n": 300}).queries == 300


def test_attentions_that_no_kernel_makes_are_refused_with_the_reason() -> None:
    assert "head_dim is 20, expected a multiple of 8" in refusal(replace(HALF, head_dim=20))
    assert "value_dim is 512" in refusal(replace(HALF, value_dim=512))
    assert "scale is -1.0, expected a positive one" in refusal(HALF, scale=-1.0)
    masked = replace(HALF, bias=("keep", "float64", (2, 1, 1, 300)))
    assert "the keep mask is float64" in refusal(masked)


def test_an_attention_that_kernels_make_is_not_refused() -> None:
    masked = replace(HALF, bias=("add", "float16", (2, 1, 1, 300)))
    for case, size in ((HALF, 0), (masked, 2)):
        spec, params = case.made()
        func = attention_function(spec, params)
        assert refuse_attention(func, spec) is None
        assert bias_bytes(func, spec) == size
