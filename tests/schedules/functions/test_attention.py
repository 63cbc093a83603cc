from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import tvm
from tvm import tirx

from relaxtune.schedules.functions.attention import AttentionError, AttentionSpec, ScoreBias, spec_of
from relaxtune.schedules.functions.attention_checks import check_spec
from relaxtune.schedules.functions.plain_attention import attention_function
from relaxtune.schedules.marks import ATTENTION_ATTR
from relaxtune.schedules.sizes import parse_size, size_text
from relaxtune.schedules.tir.blocks import is_buffer
from tests.schedules.attention_cases import CASES, PLAIN, AttentionCase, distances, draw, keys_and_values, reference


def run(
    func: tirx.PrimFunc, inputs: list[np.ndarray], *written: tuple[tuple[int, ...], str], scalars: Sequence[int] = ()
) -> list[np.ndarray]:
    library = tirx.build(tvm.IRModule({"main": func.with_attr("global_symbol", "main")}), target="llvm")
    outputs = [tvm.runtime.tensor(np.full(shape, np.nan, dtype)) for shape, dtype in written]
    library["main"](*(tvm.runtime.tensor(value) for value in inputs), *scalars, *outputs)
    return [output.numpy() for output in outputs]


@pytest.mark.quick_cases(
    "plain",
    "grouped",
    "causal decode",
    "values of another width",
    "window of both sides",
    "keep by number",
    "relative bias",
    "distances",
    "guarded sum",
    "caches that grow by several",
    "caches of two widths that grow",
    "half",
)
@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_function_computes_attention(case: AttentionCase) -> None:
    spec, params = case.made()
    inputs = draw(params, spec, seed=0)
    found, *grown = run(attention_function(spec, params), inputs, *params[-spec.outputs :])
    tolerance = 2e-3 if case.dtype == "float16" else 2e-6
    np.testing.assert_allclose(found, reference(spec, params, inputs), rtol=tolerance, atol=tolerance)
    for cache, expected in zip(grown, keys_and_values(spec, inputs), strict=bool(grown)):
        np.testing.assert_array_equal(cache, expected)


B, S, PAST = (tirx.Var(name, "int64") for name in ("batch", "sequence", "past"))
SYMBOLIC = {
    "packed": (replace(PLAIN, batch=B, queries=S, keys=S, packed=True, causal=True), [(3, 7, 0), (1, 1, 0)]),
    "masked": (replace(PLAIN, batch=B, queries=S, keys=S, bias=("add", "float32", (B, 1, 1, S))), [(2, 9, 0)]),
    "longer keys": (
        replace(PLAIN, batch=B, queries=2, keys=PAST + 1, heads_first=True, bias=("keep", "bool", (1, 1, 1, PAST + 1))),
        [(2, 0, 5)],
    ),
    "distances": (
        replace(PLAIN, batch=B, queries=S, keys=S, bias=("add", "float32", (1, 2, 9, 1)), lies=distances(4)),
        [(2, 3, 0), (1, 9, 0)],
    ),
    "distances of one query": (
        replace(
            replace(PLAIN, batch=B, queries=1, keys=PAST + 1, heads_first=True),
            bias=("add", "float32", (1, 2, 9, 1)),
            lies=(("key_stride", 1), ("offset", 8 - PAST), ("limit", 8)),
        ),
        [(2, 0, 5), (1, 0, 11)],
    ),
    "windows": (
        replace(PLAIN, batch=3 * B, bias=("add", "float32", (3, 1, 8, 8)), lies=(("period", 3),)),
        [(1, 0, 0), (2, 0, 0)],
    ),
    "caches": (replace(PLAIN, batch=B, heads=4, kv_heads=2, queries=1, keys=PAST + 1, past=PAST), [(2, 0, 5)]),
    "caches by several": (replace(PLAIN, queries=S, keys=PAST + S, past=PAST, causal=True), [(0, 3, 6), (0, 1, 2)]),
}


@pytest.mark.quick_cases("masked", "distances of one query", "windows", "caches")
@pytest.mark.parametrize(("case", "sizes"), SYMBOLIC.values(), ids=SYMBOLIC.keys())
def test_symbolic_function_computes_attention_at_any_size(
    case: AttentionCase, sizes: list[tuple[int, int, int]]
) -> None:
    func = attention_function(*case.made())
    spec = spec_of(func)
    assert spec is not None
    assert not spec.is_static
    assert spec.to_json() == case.made()[0].to_json()
    assert not any(static.is_static for static in (spec, case.made()[0]))
    for batch, sequence, past in sizes:
        values = {"batch": batch, "sequence": sequence, "past": past}

        def number(size: object, values: dict[str, int] = values) -> object:
            return parse_size(size_text(size), values) if isinstance(size, tirx.Expr) else size

        bias = case.bias and (*case.bias[:2], tuple(map(number, case.bias[2])))
        lies = tuple((name, number(value)) for name, value in case.lies)
        static = replace(
            case,
            bias=bias,
            lies=lies,
            **{name: number(getattr(case, name)) for name in ("batch", "queries", "keys", "past")},
        )
        spec, params = static.made()
        inputs = draw(params, spec, seed=0)
        scalars = [values[param.name] for param in func.params if not is_buffer(param)]
        found, *grown = run(func, inputs, *params[-spec.outputs :], scalars=scalars)
        np.testing.assert_allclose(found, reference(spec, params, inputs), rtol=2e-6, atol=2e-6)
        for cache, expected in zip(grown, keys_and_values(spec, inputs), strict=bool(grown)):
            np.testing.assert_array_equal(cache, expected)


def test_size_that_is_no_sum_or_product_is_an_error() -> None:
    spec = replace(PLAIN, keys=tirx.max(S, B)).made()[0]
    with pytest.raises(ValueError, match="no sum, product or quotient of axes"):
        spec.to_json()


def test_row_without_keys_is_nan_and_others_are_not() -> None:
    spec, params = replace(PLAIN, bias=("keep", "bool", (1, 1, 8, 8))).made()
    inputs = draw(params, spec, seed=1)
    inputs[3][0, 0, 2] = False
    (found,) = run(attention_function(spec, params), inputs, params[-1])
    assert np.isnan(found[0, 2]).all()
    assert np.isfinite(np.delete(found, 2, axis=1)).all()


def test_row_of_a_low_finite_bias_is_an_ordinary_softmax() -> None:
    spec, params = replace(PLAIN, bias=("add", "float32", (1, 1, 1, 8))).made()
    inputs = draw(params, spec, seed=2)
    inputs[3][...] = np.finfo(np.float32).min
    (found,) = run(attention_function(spec, params), inputs, params[-1])
    value = inputs[2].reshape(1, 8, 2, 16)
    np.testing.assert_allclose(
        found.reshape(1, 8, 2, 16), np.broadcast_to(value.mean(axis=1, keepdims=True), value.shape), atol=1e-6
    )


def test_function_is_marked_and_opaque() -> None:
    spec, params = CASES["keep"].made()
    func = attention_function(spec, params)
    assert spec_of(func) == spec
    assert int(func.attrs["op_pattern"]) == 8
    assert [tuple(int(size) for size in param.ty.shape) for param in func.params] == [shape for shape, _ in params]


def test_unmarked_function_has_no_spec() -> None:
    func = attention_function(*PLAIN.made())
    assert spec_of(func.without_attr(ATTENTION_ATTR)) is None


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_spec_survives_json(case: AttentionCase) -> None:
    spec, _ = case.made()
    assert AttentionSpec.from_json(spec.to_json()) == spec


@pytest.mark.parametrize("text", ["{}", "no json", "[]", '{"query": {}}'])
def test_text_that_is_no_spec_is_an_error(text: str) -> None:
    with pytest.raises(AttentionError, match="no attention specification of this version"):
        AttentionSpec.from_json(text)


def test_spec_without_growth_reads_as_before() -> None:
    assert "growth" not in PLAIN.made()[0].to_json()


SPEC, PARAMS = PLAIN.made()


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (replace(SPEC, queries=0), "expected positive ones"),
        (replace(SPEC, kv_heads=3), "heads a multiple of kv_heads"),
        (replace(SPEC, window=-1), "window is -1"),
        (replace(SPEC, output=replace(SPEC.output, param=0)), "the output is parameter 0, expected the last, 3"),
        (replace(SPEC, key=replace(SPEC.key, param=9)), "the key is parameter 9, expected one of the 4"),
        (replace(SPEC, value=replace(SPEC.value, offset=1)), "the value spans elements 1 to 256"),
        (replace(SPEC, query=replace(SPEC.query, head_stride=-1)), "the query spans"),
        (replace(SPEC, bias=ScoreBias(0, "add", 0, 0, 0, 99)), "the bias spans elements 0 to 693"),
        (replace(SPEC, bias=ScoreBias(0, "drop", 0, 0, 0, 1)), "kind 'drop', expected 'add' or 'keep'"),  # type: ignore[arg-type]
        (replace(SPEC, output=replace(SPEC.output, position_stride=16)), "leaves elements of"),
    ],
)
def test_spec_outside_its_parameters_is_an_error(spec: AttentionSpec, message: str) -> None:
    with pytest.raises(AttentionError, match=message):
        check_spec(spec, PARAMS)


GROWING, GROWING_PARAMS = CASES["caches that grow"].made()


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (replace(GROWING, growth=replace(GROWING.growth, past=6)), "the caches have 6 positions, expected 1 to 5"),
        (replace(GROWING, value=GROWING.key), "the value that is written is parameter 4, expected 5"),
        (replace(GROWING, key=replace(GROWING.key, offset=1)), "the key .* leaves elements of"),
        (replace(GROWING, output=replace(GROWING.output, param=5)), "expected the third from the last, 3"),
        (
            replace(GROWING, growth=replace(GROWING.growth, new_key=replace(GROWING.query, head_stride=999))),
            "the new key spans elements 0 to",
        ),
    ],
)
def test_growing_spec_outside_its_parameters_is_an_error(spec: AttentionSpec, message: str) -> None:
    with pytest.raises(AttentionError, match=message):
        check_spec(spec, GROWING_PARAMS)
