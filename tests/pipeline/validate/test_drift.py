from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from relaxtune.models import OnnxModel, load_model
from relaxtune.models.inputs import random_inputs
from relaxtune.pipeline.errors import UsageError
from relaxtune.pipeline.validate.drift import (
    EMBEDDING,
    LOGITS,
    inputs_source,
    logits_of,
    measure_drift,
    measure_perplexity,
    read_tokens,
)
from relaxtune.pipeline.validate.report import DriftOptions

RNG = np.random.default_rng(0)


@pytest.fixture(scope="module")
def llama() -> OnnxModel:
    return load_model("llama-tiny", shapes={"input_ids": (2, 8), "attention_mask": (2, 8)})


def test_logits_are_found_by_name_and_vocabulary_and_chosen_by_hand(llama: OnnxModel) -> None:
    assert logits_of(llama) == {"logits"}
    bert = load_model("bert-tiny")
    assert logits_of(bert) == frozenset()
    assert logits_of(bert, ["pooler_output"]) == {"pooler_output"}
    with pytest.raises(UsageError, match="has no output 'lm'; expected last_hidden_state, pooler_output"):
        logits_of(bert, ["lm"])


def test_identical_outputs_have_no_drift(llama: OnnxModel) -> None:
    sample = {"logits": RNG.standard_normal((2, 8, 1024)).astype(np.float32)}
    (drift,) = measure_drift(llama, [sample], [sample])
    assert (drift.kind, drift.max_abs, drift.argmax_agreement, drift.kl_max, drift.broken) == (LOGITS, 0.0, 1.0, 0.0, 0)
    assert drift.row_cosine_min == pytest.approx(1.0)


def test_divergence_is_that_of_the_two_distributions(llama: OnnxModel) -> None:
    original = RNG.standard_normal((2, 8, 1024)).astype(np.float32)
    ours = original + 0.5 * RNG.standard_normal(original.shape).astype(np.float32)
    p, q = (
        np.exp(x.astype(np.float64)) / np.exp(x.astype(np.float64)).sum(-1, keepdims=True) for x in (original, ours)
    )
    expected = (p * np.log(p / q)).sum(-1)
    (drift,) = measure_drift(llama, [{"logits": original}], [{"logits": ours}])
    assert drift.kl_mean == pytest.approx(expected.mean(), rel=1e-9)
    assert drift.kl_max == pytest.approx(expected.max(), rel=1e-9)
    agreement = (original.argmax(-1) == ours.argmax(-1)).mean()
    assert drift.argmax_agreement == pytest.approx(agreement)
    assert drift.max_rel == pytest.approx(np.abs(original - ours).max() / np.sqrt((original**2).mean()), rel=1e-5)
    # A constant added to all logits changes no probability.
    (shifted,) = measure_drift(llama, [{"logits": original}], [{"logits": original + 3}])
    assert shifted.kl_max == pytest.approx(0.0, abs=1e-6)


def test_embeddings_are_compared_vector_by_vector() -> None:
    bert = load_model("bert-tiny")
    original = RNG.standard_normal((1, 4, 128)).astype(np.float32)
    ours = original.copy()
    ours[0, 2] *= -1
    (drift,) = measure_drift(bert, [{"last_hidden_state": original}], [{"last_hidden_state": ours}])
    assert drift.kind == EMBEDDING
    assert drift.row_cosine_min == pytest.approx(-1.0)
    assert drift.row_cosine_mean == pytest.approx(0.5)
    assert drift.argmax_agreement is None


def test_what_is_not_finite_is_counted_and_left_out(llama: OnnxModel) -> None:
    original = RNG.standard_normal((1, 2, 1024)).astype(np.float32)
    ours = original.copy()
    ours[0, 0, :3] = np.nan
    (drift,) = measure_drift(llama, [{"logits": original}], [{"logits": ours}])
    assert drift.broken == 3
    assert np.isfinite(drift.kl_max or 0.0)


def test_the_hash_of_inputs_tells_inputs_apart(llama: OnnxModel) -> None:
    first, second = ([random_inputs(llama, seed=seed)] for seed in (0, 1))
    assert inputs_source(first, 0) == inputs_source([random_inputs(llama, seed=0)], 0)
    assert inputs_source(first, 0).sha256 != inputs_source(second, 1).sha256


@pytest.mark.parametrize("suffix", [".npy", ".txt"])
def test_tokens_are_read_from_arrays_and_text(suffix: str, tmp_path: Path) -> None:
    path = tmp_path / f"tokens{suffix}"
    ids = np.arange(12)
    if suffix == ".npy":
        np.save(path, ids.reshape(3, 4))
    else:
        path.write_text("\n".join(" ".join(map(str, row)) for row in ids.reshape(3, 4)))
    got, source = read_tokens(path)
    np.testing.assert_array_equal(got, ids)
    assert (source.name, source.count, len(source.sha256)) == (path.name, 12, 64)


@pytest.mark.parametrize("text", ["1 2 three", "", "1.5 2"])
def test_what_is_no_file_of_tokens_is_refused(text: str, tmp_path: Path) -> None:
    path = tmp_path / "tokens.txt"
    path.write_text(text)
    with pytest.raises(UsageError, match="tokens"):
        read_tokens(path)
    with pytest.raises(UsageError, match="cannot be read"):
        read_tokens(tmp_path / "missing.npy")


def uniform_but(ids: np.ndarray, favoured: float):
    """Return a model that gives the next token of `ids` a logit of its own, and all others 0."""

    def run(feeds):
        logits = np.zeros((*feeds["input_ids"].shape, 1024), np.float32)
        for row, sequence in enumerate(feeds["input_ids"]):
            logits[row, np.arange(len(sequence) - 1), sequence[1:]] = favoured
        return {"logits": logits}

    return run


def test_perplexity_of_known_distributions(llama: OnnxModel, tmp_path: Path) -> None:
    ids = RNG.integers(0, 1024, 8 * 5 + 3)
    path = tmp_path / "tokens.npy"
    np.save(path, ids)
    found = measure_perplexity(llama, uniform_but(ids, 0.0), uniform_but(ids, 9.0), DriftOptions(tokens=path), {})
    assert found.original == pytest.approx(1024)
    assert found.ours == pytest.approx((np.exp(9) + 1023) / np.exp(9))
    # Five sequences of 8, of which the last runs beside itself in a batch of 2 and counts once.
    assert found.tokens == 5 * 7


@pytest.mark.parametrize(
    ("ids", "message"),
    [([1, 2, 3], "has 3 ids"), ([5000] * 8, "ids from 5000 to 5000, the vocabulary of llama-tiny has 1024")],
)
def test_tokens_that_do_not_fit_the_model_are_refused(
    llama: OnnxModel, ids: list[int], message: str, tmp_path: Path
) -> None:
    path = tmp_path / "tokens.npy"
    np.save(path, ids)
    with pytest.raises(UsageError, match=message):
        measure_perplexity(llama, dict, dict, DriftOptions(tokens=path), {})


def test_a_model_without_logits_has_no_perplexity(tmp_path: Path) -> None:
    path = tmp_path / "tokens.npy"
    np.save(path, np.arange(64))
    bert = load_model("bert-tiny", shapes=dict.fromkeys(("input_ids", "attention_mask", "token_type_ids"), (1, 8)))
    with pytest.raises(UsageError, match="found logits: none"):
        measure_perplexity(bert, dict, dict, DriftOptions(tokens=path), {})
