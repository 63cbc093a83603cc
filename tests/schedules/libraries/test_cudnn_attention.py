from __future__ import annotations

import struct
from dataclasses import replace

import pytest
from tvm import tirx

from relaxtune.schedules.errors import Refusal
from relaxtune.schedules.functions.plain_attention import attention_function
from relaxtune.schedules.gpu.binding import count_launches, list_unbound_blocks
from relaxtune.schedules.libraries.cublaslt import CublasLtParameters
from relaxtune.schedules.libraries.cudnn_attention import CudnnAttention, CudnnAttentionParameters
from relaxtune.schedules.libraries.vendors import CUDNN, libraries_of, library_sources
from relaxtune.schedules.marks import SOURCES_ATTR
from relaxtune.schedules.targets import ResolvedTarget, resolve_target
from relaxtune.schedules.templates.base import TemplateError
from tests.schedules.attention_cases import AttentionCase
from tests.schedules.templates.matmul_cases import MatmulCase

PLAIN = AttentionCase(2, 4, 40, 48, 64, dtype="float16")
LIBRARY = CudnnAttention()


@pytest.fixture(scope="module")
def target() -> ResolvedTarget:
    return resolve_target("cuda:sm_90a")


def made_of(case: AttentionCase, target: ResolvedTarget, plan: int = 0) -> tirx.PrimFunc:
    made = LIBRARY.apply(attention_function(*case.made()), target, CudnnAttentionParameters(plan))
    assert isinstance(made, tirx.PrimFunc), made
    assert list_unbound_blocks(made) == []
    return made


def call_of(made: tirx.PrimFunc) -> str:
    return next(line for line in made.script().splitlines() if "call_extern" in line)


def numbers_of(made: tirx.PrimFunc) -> list[int]:
    return [int(number) for number in call_of(made).split('"relaxtune_cudnn_attention", "')[1].split('"')[0].split()]


def test_the_function_becomes_one_call_with_what_the_library_must_know(target: ResolvedTarget) -> None:
    made = made_of(PLAIN, target, plan=2)
    numbers = numbers_of(made)
    assert numbers[:12] == [2, 4, 4, 40, 48, 64, 2, -1, 0, 0, 2, struct.unpack("<I", struct.pack("<f", 0.125))[0]]
    width = 4 * 64
    strides = [40 * width, 64, width], [48 * width, 64, width]
    assert numbers[12:24] == [*strides[0], *strides[1], *strides[1], *strides[0]]
    assert len(numbers) == 36
    sources = library_sources(list(made.attrs[SOURCES_ATTR]))
    assert [path.name for path in sources] == ["cudnn_attention.c"]
    assert libraries_of(sources) == (CUDNN,)
    assert count_launches(made) == 1


def test_slices_of_a_packed_product_are_one_pointer_and_offsets(target: ResolvedTarget) -> None:
    made = made_of(replace(PLAIN, queries=48, packed=True, kv_heads=2), target)
    assert call_of(made).count("p0.data") == 3
    assert numbers_of(made)[-4:] == [0, 4 * 64, 6 * 64, 0]


@pytest.mark.parametrize(
    ("shape", "sizes", "strides"),
    [
        ((2, 1, 1, 48), [2, 1, 1, 48], [48, 48, 48, 1]),
        ((1, 4, 40, 48), [1, 4, 40, 48], [4 * 40 * 48, 40 * 48, 48, 1]),
        ((2, 1, 40, 48), [2, 1, 40, 48], [40 * 48, 40 * 48, 48, 1]),
    ],
)
def test_a_mask_broadcasts_by_sizes_of_one(
    target: ResolvedTarget, shape: tuple[int, int, int, int], sizes: list[int], strides: list[int]
) -> None:
    made = made_of(replace(PLAIN, bias=("add", "float32", shape)), target)
    numbers = numbers_of(made)
    assert numbers[7] == 0
    assert numbers[24:28] == strides
    assert numbers[28:32] == sizes
    assert "p3.data" in call_of(made)


@pytest.mark.parametrize("dtype", ["bool", "int64", "float32"])
def test_a_keep_mask_is_made_an_added_one_before_the_call(target: ResolvedTarget, dtype: str) -> None:
    made = made_of(replace(PLAIN, bias=("keep", dtype, (2, 1, 1, 48))), target)
    assert "added_mask.data" in call_of(made)
    assert numbers_of(made)[7] == 2
    assert 'added_mask = T.sblock_alloc_buffer((96,), "float16")' in made.script()
    assert count_launches(made) == 2


def test_a_last_query_needs_no_causal_mask(target: ResolvedTarget) -> None:
    assert numbers_of(made_of(replace(PLAIN, causal=True), target))[8] == 1
    assert numbers_of(made_of(replace(PLAIN, causal=True, queries=1), target))[8] == 0
    assert numbers_of(made_of(replace(PLAIN, causal=True, window=7), target))[8:10] == [1, 7]


@pytest.mark.parametrize(
    ("case", "reason"),
    [
        (replace(PLAIN, dtype="float32"), "expected float16 or bfloat16 for all"),
        (replace(PLAIN, head_dim=20), "expected a multiple of 8"),
        (replace(PLAIN, head_dim=264), "expected a multiple of 8 up to 256"),
        (replace(PLAIN, queries=50, causal=True), "some see none"),
        (replace(PLAIN, queries=1, keys=9, past=8), "does not write caches"),
        (replace(PLAIN, bias=("add", "int32", (2, 1, 1, 48))), "the add mask is int32"),
    ],
)
def test_what_the_library_does_not_compute_is_refused(target: ResolvedTarget, case: AttentionCase, reason: str) -> None:
    refused = LIBRARY.candidates(attention_function(*case.made()), target)
    assert isinstance(refused, Refusal)
    assert reason in refused.reason


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"offset": 4}, "starts at element 4"),
        ({"head_stride": 0}, "head stride is 0"),
        ({"position_stride": 260}, "260"),
    ],
)
def test_layouts_that_vectors_do_not_fit_are_refused(
    target: ResolvedTarget, change: dict[str, int], reason: str
) -> None:
    spec, params = PLAIN.made()
    # Room for any of the changes.
    params = [((2, 60, 4 * 64), "float16"), *params[1:]]
    moved = replace(spec, query=replace(spec.query, **change))
    refused = LIBRARY.candidates(attention_function(moved, params), target)
    assert isinstance(refused, Refusal)
    assert reason in refused.reason


def test_what_is_no_attention_and_other_targets_are_refused(target: ResolvedTarget) -> None:
    refused = LIBRARY.candidates(MatmulCase((64,), 64, 64).func(), target)
    assert isinstance(refused, Refusal)
    assert "not marked" in refused.reason
    elsewhere = LIBRARY.apply(attention_function(*PLAIN.made()), resolve_target("llvm"), CudnnAttentionParameters())
    assert isinstance(elsewhere, Refusal)
    assert "expected cuda" in elsewhere.reason


def test_decisions_survive_a_round_trip(target: ResolvedTarget) -> None:
    func = attention_function(*PLAIN.made())
    offered = LIBRARY.candidates(func, target)
    assert not isinstance(offered, Refusal)
    assert [LIBRARY.parse(one.to_json()) for one in offered] == list(offered)
    with pytest.raises(TemplateError, match="expected CudnnAttentionParameters"):
        LIBRARY.apply(func, target, CublasLtParameters())
