"""The GPU table's cases: shapes and inputs of every case, and the orders that processes are given."""

from __future__ import annotations

import json

import numpy as np
import pytest

from benchmarks.gpu_arms.cases import CASES, Case, Family, find_cases
from benchmarks.gpu_arms.order import ARMS, Order, parse_arms
from relaxtune.models import load_model

TINY = (
    Case("bert-tiny", 2, 16),
    Case("gpt2-tiny", 1, 8),
    Case("llama-tiny", 1, 8),
    Case("llama-tiny-decode", 2, 8),
    Case("vit-tiny", 2),
)


def test_names_are_unique_and_every_case_has_peers() -> None:
    assert len({case.name for case in CASES}) == len(CASES) == 12
    assert {case.family for case in CASES} == set(Family)


@pytest.mark.parametrize("case", TINY, ids=lambda case: case.name)
def test_inputs_fit_the_model_that_the_case_is_tuned_as(case: Case) -> None:
    model = load_model(case.source, shapes=case.shapes)
    inputs = case.inputs()
    assert {spec.name: (spec.shape, spec.dtype) for spec in model.inputs} == {
        name: (array.shape, str(array.dtype)) for name, array in inputs.items()
    }


def test_a_decode_step_fills_the_last_place_of_its_cache() -> None:
    case = Case("llama-tiny-decode", 2, 8)
    inputs = case.inputs()
    assert inputs["past_key_values.0.key"].shape[2] == 7
    assert inputs["attention_mask"].shape == (2, 8)
    assert (inputs["position_ids"] == 7).all()


def test_inputs_follow_their_seed() -> None:
    case = TINY[0]
    assert np.array_equal(case.inputs()["input_ids"], case.inputs()["input_ids"])
    assert not np.array_equal(case.inputs()["input_ids"], case.inputs(seed=1)["input_ids"])


def test_cases_are_found_by_name_and_by_model_in_the_tables_order() -> None:
    names = [case.name for case in find_cases("vit-base-8x224,bert-base")]
    assert names == [
        *(f"bert-base-{size}" for size in ("1x128", "8x128", "32x128", "1x512", "8x512")),
        "vit-base-8x224",
    ]
    assert find_cases(None) == CASES


def test_an_unknown_case_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match="no case is called bert-huge; expected a model or one of bert-base-1x128"):
        find_cases("bert-huge")


def test_a_preset_without_peers_is_refused() -> None:
    with pytest.raises(ValueError, match="no peers for zoo model 't5-tiny'"):
        _ = Case("t5-tiny", 1, 8).family


def test_arms_are_put_in_the_tables_order_and_unknown_ones_refused() -> None:
    assert parse_arms("ort, relaxtune") == ("relaxtune", "ort")
    assert parse_arms(None) == ARMS
    with pytest.raises(ValueError, match="no arm is called tensorrt; expected relaxtune, max-autotune"):
        parse_arms("tensorrt")
    with pytest.raises(ValueError, match="no arm is called ','"):
        parse_arms(",")


def test_an_order_survives_json() -> None:
    order = Order("bert-tiny-2x16", ("relaxtune",), "out/x", 5, 1, True, "lock", TINY)
    assert Order.from_json(order.to_json()) == order
    assert "\n" not in order.to_json()
    assert json.loads(order.to_json())["masked"] is True
