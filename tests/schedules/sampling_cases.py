"""Checks of sampling against the reference, for every implementation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import ml_dtypes
import numpy as np
import tvm
from tvm import tirx

from relaxtune.schedules.functions.sampling import PARAMETERS, PROMPT_BIT, SamplingSpec
from relaxtune.schedules.sampling import sampling_function
from relaxtune.schedules.targets import ResolvedTarget
from relaxtune.schedules.templates.lowering import register_mixed_pipeline
from tests.schedules.sampling_reference import Row, kept, sample

DTYPES = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}
# Runs a specification on the arrays of its parameters, and writes the outputs among them.
Run = Callable[[SamplingSpec, list[np.ndarray]], None]


def built(target: ResolvedTarget, device: tvm.runtime.Device) -> Run:
    """Return what builds each specification once, for any number of rows, and runs it."""
    modules: dict[SamplingSpec, tvm.runtime.Module] = {}
    rows = tirx.Var("rows", "int64")

    def run(spec: SamplingSpec, arrays: list[np.ndarray]) -> None:
        key = replace(spec, batch=0)
        if key not in modules:
            func = sampling_function(replace(spec, batch=rows), target).with_attr("global_symbol", "main")
            modules[key] = tvm.tirx.build(
                tvm.IRModule({"main": func}), target=target.target, pipeline=register_mixed_pipeline()
            )
        tensors = [tvm.runtime.tensor(array, device) for array in arrays]
        modules[key]["main"](*tensors)
        for array, tensor in zip(arrays, tensors, strict=True):
            array[...] = tensor.numpy()

    return run


def sampled(run: Run, rows: Sequence[Row], dtype: str = "float32") -> tuple[list[int], list[float], np.ndarray | None]:
    """Return the tokens and log-probabilities of some rows, and their counts afterwards."""
    batch, vocabulary = len(rows), len(rows[0].logits)
    flags = {"counts": rows[0].counts, "bias": rows[0].bias, "mask": rows[0].allowed}
    spec = SamplingSpec(batch, vocabulary, dtype, **{name: value is not None for name, value in flags.items()})
    arrays = {
        "logits": np.stack([row.logits for row in rows]).astype(DTYPES[dtype]),
        "parameters": np.array([[row.parameter(name) for name in PARAMETERS] for row in rows], "float32"),
        "seed": np.array([row.seed for row in rows]),
        "position": np.array([row.position for row in rows]),
    }
    if rows[0].counts is not None:
        arrays["counts"] = np.stack([row.counts for row in rows]).astype("int32")
    if rows[0].bias is not None:
        arrays["bias"] = np.stack([row.bias for row in rows]).astype("float32")
    if rows[0].allowed is not None:
        arrays["mask"] = np.stack([mask_words(row.allowed) for row in rows])
    for name, shape, output in spec.outputs:
        arrays[name] = np.full(shape, -1, output)
    run(spec, list(arrays.values()))
    return arrays["token"].tolist(), arrays["log_probability"].tolist(), arrays.get("counts")


def mask_words(allowed: np.ndarray) -> np.ndarray:
    padded = np.pad(allowed, (0, -len(allowed) % 32))
    return np.packbits(padded, bitorder="little").view("int32")


def random_parameters(rng: np.random.Generator) -> dict[str, float]:
    """Return parameters of which each is neutral now and then."""
    drawn = {
        "temperature": rng.choice([1.0, 0.3, 0.7, 1.7]),
        "top_k": rng.integers(1, 60),
        "top_p": rng.uniform(0.01, 1),
        "min_p": rng.choice([0.001, 0.05, 0.5]),
        "typical_p": rng.uniform(0.05, 1),
        "repetition": rng.uniform(0.8, 1.5),
        "presence": rng.uniform(-1, 1),
        "frequency": rng.uniform(-0.5, 0.5),
    }
    return {name: float(value) for name, value in drawn.items() if rng.random() < 0.5}


def random_rows(rng: np.random.Generator, vocabulary: int, count: int, dtype: str = "float32") -> list[Row]:
    """Return rows of one vocabulary, half of them with many ties, with all optional inputs."""
    rows = []
    for _ in range(count):
        logits = rng.standard_normal(vocabulary) * rng.choice([0.5, 2.0, 6.0])
        if rng.random() < 0.5:
            logits = np.round(logits * 4) / 4
        counts = rng.integers(1, 9, vocabulary) * (rng.random(vocabulary) < 0.1)
        counts = np.where(rng.random(vocabulary) < 0.1, counts + PROMPT_BIT, counts)
        rows.append(
            Row(
                logits.astype(DTYPES[dtype]).astype("float32"),
                int(rng.integers(-(2**63), 2**63)),
                int(rng.integers(0, 2**33)),
                counts.astype("int32"),
                np.where(rng.random(vocabulary) < 0.05, rng.standard_normal(vocabulary) * 3, 0).astype("float32"),
                rng.random(vocabulary) < 0.9,
                random_parameters(rng),
            )
        )
    return rows


def check_rows(run: Run, rows: Sequence[Row], dtype: str = "float32") -> None:
    """Check tokens, log-probabilities and counts against the reference."""
    tokens, log_probabilities, counts = sampled(run, rows, dtype)
    expected = [sample(row) for row in rows]
    assert tokens == [token for token, _ in expected]
    np.testing.assert_allclose(log_probabilities, [found for _, found in expected], rtol=1e-5, atol=2e-5)
    if counts is not None:
        for row, token, after in zip(rows, tokens, counts, strict=True):
            assert after[token] == row.counts[token] + 1
            after[token] -= 1
            np.testing.assert_array_equal(after, row.counts)


def check_sets(run: Run, vocabulary: int, draws: int = 256) -> None:
    """Check filters, alone and together, with ties and without: all draws of one set are the reference's."""
    rng = np.random.default_rng(vocabulary)
    for ties in (False, True):
        logits = rng.standard_normal(vocabulary) * 3
        logits = (np.round(logits * 2) / 2 if ties else logits).astype("float32")
        for parameters in (
            {},
            {"top_k": 5},
            {"top_k": vocabulary},
            {"top_p": 0.0},
            {"top_p": 0.4},
            {"top_p": 0.999},
            {"min_p": 0.1},
            {"min_p": 1.0},
            {"typical_p": 0.3},
            {"typical_p": 0.9},
            # With 1 the list has no more tokens than the filter keeps.
            {"top_k": 1, "top_p": 0.9},
            {"temperature": 0.6, "top_k": 40, "top_p": 0.9},
            *({"top_k": top_k, "top_p": 0.6} for top_k in range(2, 9)),
            {"temperature": 3.0, "top_k": 40, "top_p": 0.9, "min_p": 0.01, "typical_p": 0.8},
        ):
            row = Row(logits, parameters=parameters)
            check_rows(run, [replace(row, seed=seed) for seed in range(draws)])


def check_distribution(run: Run) -> None:
    """Check 100,000 draws by chi-square, and that no other tokens than the kept ones come."""
    logits = np.random.default_rng(5).standard_normal(64).astype("float32") * 1.5
    row = Row(logits, parameters={"temperature": 1.2, "top_k": 30, "top_p": 0.95})
    tokens: list[int] = []
    for start in range(0, 100_000, 10_000):
        # One seed at 100 positions, 1,000 seeds.
        rows = [replace(row, seed=at // 100, position=at % 100) for at in range(start, start + 10_000)]
        tokens += sampled(run, rows)[0]
    names, masses = kept(row)
    found = np.bincount(tokens, minlength=64)
    assert set(np.nonzero(found)[0]) == set(names)
    expected = masses / masses.sum() * len(tokens)
    statistic, freedom = float(((found[names] - expected) ** 2 / expected).sum()), len(names) - 1
    # Of a chi-square, mean and standard deviation; 4 of these are exceeded in fewer than 1 of 2,000 runs.
    assert abs(statistic - freedom) < 4 * np.sqrt(2 * freedom)


def check_extremes(run: Run) -> None:
    """Check ties of arg-max, signed zeros, NaN, infinities, and masks that allow nothing."""
    greedy, nothing = {"temperature": 0.0}, np.zeros(5, bool)
    everything = np.ones(5, bool)
    cases = {
        (1.0, 3.0, 3.0, 2.0, 3.0): (greedy, everything, 1),
        (-1.0, -0.0, 0.0, -2.0, 0.0): (greedy, everything, 1),
        (np.nan, 1.0, -np.inf, np.nan, 2.0): (greedy, everything, 4),
        (1.0, np.inf, 0.0, -np.inf, 1.0): ({"top_k": 1}, everything, 1),
        (9.0, 1.0, 2.0, 8.0, 7.0): (greedy, np.array([0, 1, 1, 0, 0], bool), 2),
        (0.0, 0.0, -0.0, 0.0, -0.0): ({"top_p": 0.0}, everything, 0),
        (1.0, 2.0, 3.0, 4.0, 5.0): (greedy, nothing, 0),
        (1.0, 2.0, 3.0, 4.0, 6.0): ({"top_p": 0.5, "typical_p": 0.5}, nothing, 0),
    }
    rows = [Row(np.array(key, "float32"), allowed=mask, parameters=one) for key, (one, mask, _) in cases.items()]
    assert sampled(run, rows)[0] == [token for _, _, token in cases.values()]
    check_rows(run, rows)


def check_steadiness(run: Run, vocabulary: int) -> None:
    """Check that a row's token depends on no other row."""
    rng = np.random.default_rng(3)
    rows = random_rows(rng, vocabulary, 5)
    alone = [sampled(run, [row])[0][0] for row in rows]
    assert sampled(run, rows)[0] == alone
    assert sampled(run, rows[::-1])[0] == alone[::-1]
