"""Gains by turns on synthetic series: real ones are found, noise is not, whatever its distribution."""

from __future__ import annotations

import numpy as np
import pytest

from relaxtune.pipeline.bench.paired_gain import PairedGain, is_hopeless, paired_gain, useful_turns
from relaxtune.pipeline.choose.rerank import is_gain

DOUBT = 0.01 / 3


def noise(kind: str, rng: np.random.Generator, turns: int) -> np.ndarray:
    """Return three columns of relative noise of about 1 %."""
    shape = (turns, 3)
    if kind == "normal":
        return rng.normal(0, 0.01, shape)
    if kind == "outliers":
        return rng.normal(0, 0.005, shape) + rng.exponential(0.3, shape) * (rng.random(shape) < 0.1)
    if kind == "drift":
        # The machine slows down by a fifth, and jumps between two clocks.
        slow = np.linspace(0, 0.2, turns)[:, None] + 0.1 * (rng.random((turns, 1)) < 0.3)
        return slow + rng.normal(0, 0.01, shape)
    if kind == "skewed":
        return rng.lognormal(-4.6, 0.8, shape)
    raise ValueError(kind)


def gain_of(kind: str, seed: int, turns: int, shorter: float = 0.0) -> PairedGain:
    off = 1 + noise(kind, np.random.default_rng(seed), turns)
    before, latency, after = off.T
    return paired_gain(latency * (1 - shorter), before, after, doubt=DOUBT)


@pytest.mark.parametrize("kind", ["normal", "outliers", "drift", "skewed"])
@pytest.mark.parametrize("turns", [30, 60, 120])
def test_noise_is_never_a_gain(kind: str, turns: int) -> None:
    assert not any(is_gain(gain_of(kind, seed, turns)) for seed in range(400))


@pytest.mark.parametrize("kind", ["normal", "outliers", "drift", "skewed"])
def test_a_gain_of_one_percent_is_found_when_the_turns_suffice(kind: str) -> None:
    found = {turns: np.mean([is_gain(gain_of(kind, seed, turns, 0.01)) for seed in range(100)]) for turns in (30, 480)}
    assert found[480] > 0.9 > found[30]


def test_a_steady_machine_needs_few_turns_for_one_percent() -> None:
    rng = np.random.default_rng(0)
    taken = 0
    for _ in range(100):
        before, latency, after = 1 + rng.normal(0, 0.004, (3, 30))
        taken += is_gain(paired_gain(latency * 0.99, before, after, doubt=DOUBT))
    assert taken > 90


@pytest.mark.parametrize("shorter", [-0.05, 0.0, 0.002, 0.03])
def test_bounds_hold_the_true_gain(shorter: float) -> None:
    gains = [gain_of("normal", seed, 60, shorter) for seed in range(300)]
    assert np.mean([one.least <= shorter <= one.most for one in gains]) >= 0.99
    assert np.mean([one.median for one in gains]) == pytest.approx(shorter, abs=1e-3)


def test_what_a_place_in_the_turn_makes_is_no_gain() -> None:
    """The last arm of a turn always takes 3 % longer than the first: a gain of 2 % over their mean may be the place."""
    series = np.ones(120)
    gain = paired_gain(0.995 * series, series, 1.03 * series, doubt=DOUBT)
    assert gain.median == pytest.approx(0.0196, abs=1e-3)
    assert gain.bias == pytest.approx(0.03)
    assert not is_gain(gain)


@pytest.mark.parametrize("shorter", [-0.02, 0.0, 0.005, 0.02])
def test_what_was_given_up_is_no_gain_after_all_turns_either(shorter: float) -> None:
    given_up, turns = 0, 30
    for seed in range(60):
        before, latency, after = (1 + noise("normal", np.random.default_rng(seed), turns)).T
        latency = latency * (1 - shorter)
        for count in range(6, turns):
            series = [one[:count] for one in (latency, before, after)]
            if is_hopeless(*series, turns=turns, doubt=DOUBT):
                given_up += 1
                assert not is_gain(paired_gain(*series, doubt=DOUBT))
                assert not is_gain(paired_gain(latency, before, after, doubt=DOUBT))
                break
    assert given_up > 55 if shorter <= 0 else given_up < 60


def test_too_few_turns_tell_nothing() -> None:
    gain = paired_gain([0.5] * 4, [1.0] * 4, [1.0] * 4, doubt=DOUBT)
    assert gain.least == float("-inf")
    assert gain.most == 1.0
    assert not is_gain(gain)


@pytest.mark.parametrize(("turns", "useful"), [(6, 6), (7, 6), (8, 6), (9, 9), (11, 9), (30, 28)])
def test_turns_that_only_make_a_gain_harder_to_find_are_left_out(turns: int, useful: int) -> None:
    assert useful_turns(turns, 6, doubt=0.02) == useful
    for missed in range(turns):
        # As many turns without a gain are forgiven: what the longer row finds, the shorter one does.
        gains = [
            paired_gain(_row(n, missed), np.ones(n), np.ones(n), doubt=0.02) for n in (turns, useful) if missed < n
        ]
        assert len({gain.least > 0 for gain in gains}) == 1


def _row(turns: int, missed: int) -> np.ndarray:
    return np.where(np.arange(turns) < missed, 1.1, 0.9)
