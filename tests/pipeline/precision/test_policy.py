from __future__ import annotations

import numpy as np
import pytest

from relaxtune.models import load_model
from relaxtune.pipeline.errors import UsageError
from relaxtune.pipeline.passes.module import LoweringOptions
from relaxtune.pipeline.precision import POLICY_NAMES, named_policy
from relaxtune.pipeline.precision.policy import AS_GIVEN, policy_entry


def test_every_policy_states_weights_activations_accumulators_and_norms_apart() -> None:
    stated = {
        name: (p.weights, p.activations, p.accumulators, p.norms, p.group_size, p.scale_dtype)
        for name in POLICY_NAMES
        for p in [named_policy(name)]
    }
    assert stated == {
        "fp32": ("float32", "float32", "float32", "float32", None, None),
        "tf32": ("tf32", "tf32", "float32", "float32", None, None),
        "fp16": ("float16", "float16", "float32", "float32", None, None),
        "bf16": ("bfloat16", "bfloat16", "float32", "float32", None, None),
        "w8a16": ("uint8", "float16", "float32", "float32", 128, "float16"),
        "w4a16": ("uint4", "float16", "float32", "float32", 128, "float16"),
        "int8": ("int8", "int8 or uint8", "int32", "float32", None, None),
        "fp8": ("float8_e4m3fn", "float8_e4m3fn", "float32", "float32", None, "float32"),
    }


@pytest.mark.parametrize(
    ("name", "group", "message"),
    [
        ("int4", None, "unknown precision 'int4'; expected fp32, tf32"),
        ("int8", 128, "precision 'int8' has no groups of weights"),
        ("fp16", 128, "precision 'fp16' has no groups of weights; a group size is for w8a16, w4a16"),
        ("w4a16", 48, "group size 48; expected a multiple of 32, or 0"),
        ("w4a16", -32, "group size -32"),
    ],
)
def test_what_has_no_effect_is_refused(name: str, group: int | None, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        named_policy(name, group)


def test_a_group_size_needs_a_precision() -> None:
    with pytest.raises(UsageError, match="a group size without a precision"):
        _ = LoweringOptions(group_size=64).policy


def test_the_kv_cache_is_recorded_beside_the_policy() -> None:
    decode = load_model("llama-tiny-decode")
    entry = policy_entry(named_policy("w4a16", 64), decode, {}, ("node",), "float32")
    assert (entry.kv_cache, entry.weights, entry.group_size, entry.weight_bits) == ("float32", "uint4", 64, 4)
    assert policy_entry(None, load_model("bert-tiny"), {}, (), "float32").kv_cache == "none"


def test_fp8_without_a_matmul_in_float8_is_recorded_as_16_bits() -> None:
    model, policy = load_model("bert-tiny"), named_policy("fp8")
    assert (policy.half, policy.quantises, policy.weight_bits) == ("float16", True, None)
    entry = policy_entry(policy, model, {}, (), "float32", ("b",))
    assert (entry.name, entry.weights, entry.activations, entry.float8) == ("fp8", "float16", "float16", False)
    assert policy_entry(policy, model, {}, ("a",), "float32").float8


def test_int8_without_a_matmul_in_integers_is_not_recorded_as_int8() -> None:
    model, policy = load_model("bert-tiny"), named_policy("int8")
    entry = policy_entry(policy, model, {}, ("a",), "float32", ("b",))
    assert (entry.name, entry.weights, entry.accumulators, entry.float_nodes) == ("int8", "int8", "int32", ("b",))
    assert entry.weight_bits is None
    without = policy_entry(policy, model, {}, (), "float32")
    assert (without.name, without.weights, without.accumulators) == ("fp32", "float32", "float32")


def test_a_graph_as_given_is_named_after_what_it_holds() -> None:
    model = load_model("llama-tiny-decode:fp16")
    halves = {"w": np.zeros((4, 4), np.float16)}
    entry = policy_entry(None, model, halves, (), "float16")
    assert (entry.name, entry.weights, entry.kv_cache, entry.accumulators) == (
        AS_GIVEN,
        "float16",
        "float16",
        "float32",
    )
    assert policy_entry(None, model, {"w": np.zeros((4, 4), np.float32)}, (), "float32").name == "fp32"
