"""Tokens of an artifact that owns its caches, beside ONNX Runtime's with the caches in and out."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import psutil
import pytest

from relaxtune import Module, Sampling, UsageError
from relaxtune.pipeline.jobs.compile_and_tune import compile_model
from relaxtune.pipeline.prepare import ModelRequest
from tests.command_line import Ended
from tests.pipeline.generation.conftest import CAPACITY
from tests.pipeline.generation.reference import greedy

PROMPT = [3, 141, 59, 26, 535, 89, 79]
PROMPTS = [PROMPT, PROMPT[:3], [7, 11, 13, 17, 19]]


@pytest.mark.parametrize("chunk", [512, 3, 1])
def test_tokens_equal_the_models_own_when_the_prompt_is_cut(module: Module, decoder: Path, chunk: int) -> None:
    expected = greedy(decoder, [PROMPT], 120)
    assert list(module.generate(PROMPT, max_new_tokens=120, chunk=chunk)) == expected[0]
    assert len(set(expected[0])) > 10


@pytest.mark.parametrize("chunk", [512, 2])
def test_batch_of_several_lengths_equals_the_models_own(module: Module, decoder: Path, chunk: int) -> None:
    rows = list(module.generate_batch(PROMPTS, max_new_tokens=100, chunk=chunk))
    assert np.transpose(rows).tolist() == greedy(decoder, PROMPTS, 100)


def test_same_seed_draws_the_same_tokens(module: Module) -> None:
    drawn = [list(module.generate(PROMPT, max_new_tokens=40, sampling=Sampling(1.0, seed=seed))) for seed in (7, 7, 8)]
    assert drawn[0] == drawn[1] != drawn[2]
    assert drawn[0] == list(module.generate(PROMPT, max_new_tokens=40, sampling=Sampling(1.0, seed=7), chunk=2))


@pytest.mark.parametrize("sampling", [Sampling(0.0, top_k=3), Sampling(2.0, top_k=1), Sampling(1.0, top_p=1e-6)])
def test_draw_of_the_likeliest_token_alone_is_greedy(module: Module, sampling: Sampling) -> None:
    greedy_tokens = list(module.generate(PROMPT, max_new_tokens=30))
    assert list(module.generate(PROMPT, max_new_tokens=30, sampling=sampling)) == greedy_tokens


@pytest.mark.parametrize("chunk", [512, 2])
def test_penalties_keep_tokens_of_the_text_away(module: Module, chunk: int) -> None:
    once = list(module.generate(PROMPT, max_new_tokens=100, sampling=Sampling(presence_penalty=1e6), chunk=chunk))
    assert len(set(once)) == 100
    rows = module.generate_batch(
        [PROMPT, PROMPTS[2]], max_new_tokens=80, sampling=Sampling(repetition_penalty=1e6), chunk=chunk
    )
    for prompt, tokens in zip([PROMPT, PROMPTS[2]], np.transpose(list(rows)).tolist(), strict=True):
        assert not set(prompt) & set(tokens)
        assert len(set(tokens)) == 80


def test_wrong_sampling_is_refused() -> None:
    with pytest.raises(UsageError, match="expected 0 to 1"):
        Sampling(top_p=1.5)
    with pytest.raises(UsageError, match="repetition_penalty above 0"):
        Sampling(repetition_penalty=0.0)


def test_next_text_is_not_touched_by_what_the_caches_hold(module: Module) -> None:
    first = list(module.generate(PROMPT, max_new_tokens=30))
    list(module.generate([5] * 100, max_new_tokens=40))
    assert list(module.generate(PROMPT, max_new_tokens=30)) == first


def test_sequence_ends_behind_its_stop_token(module: Module) -> None:
    tokens = list(module.generate(PROMPT, max_new_tokens=30))
    stop = tokens[10]
    ended = tokens[: tokens.index(stop) + 1]
    assert list(module.generate(PROMPT, max_new_tokens=30, stop=[stop])) == ended
    rows = list(module.generate_batch([PROMPT, PROMPTS[2]], max_new_tokens=30, stop=[stop]))
    assert [row[0] for row in rows[: len(ended)]] == ended
    assert all(row[0] is None for row in rows[len(ended) :])


def test_sequence_ends_behind_several_tokens_in_turn(module: Module) -> None:
    tokens = list(module.generate(PROMPT, max_new_tokens=30))
    assert list(module.generate(PROMPT, max_new_tokens=30, stop=[tokens[10:13], [1023, 1023]])) == tokens[:13]
    assert list(module.generate(PROMPT, max_new_tokens=30, stop=[tokens[12:9:-1]])) == tokens


def test_tokens_come_without_holding_up_the_event_loop(module: Module) -> None:
    turns = 0

    async def count_turns() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    async def tokens() -> list[int]:
        counting = asyncio.create_task(count_turns())
        found = [token async for token in module.generate_async(PROMPT, max_new_tokens=20)]
        counting.cancel()
        return found

    assert asyncio.run(tokens()) == list(module.generate(PROMPT, max_new_tokens=20))
    assert turns > 20


def test_inputs_of_an_encoder_are_refused_without_one(module: Module) -> None:
    with pytest.raises(UsageError, match="has no encoder"):
        module.generate(PROMPT, inputs={"input_ids": np.ones((1, 3), np.int64)})


def test_tokens_go_on_until_the_caches_are_full(module: Module, decoder: Path) -> None:
    tokens = list(module.generate(PROMPT))
    assert len(tokens) == CAPACITY - len(PROMPT) + 1
    assert tokens == greedy(decoder, [PROMPT], len(tokens))[0]
    assert len(list(module.generate([4] * CAPACITY))) == 1


@pytest.mark.slow
def test_memory_stays_flat_over_2000_tokens(decoder: Path, tmp_path: Path) -> None:
    request = ModelRequest(decoder, target="llvm", generate=True, max_length=2008)
    module = Module.load(compile_model(request, tmp_path / "artifact", samples=0).directory)
    process, sampling = psutil.Process(), Sampling(1.0, seed=5)
    texts, bytes_after = [], []
    for _ in range(2):
        text = []
        for token in module.generate(PROMPT, max_new_tokens=2000, sampling=sampling):
            text.append(token)
            if len(text) % 500 == 0:
                bytes_after.append(process.memory_info().rss)
        texts.append(text)
    assert texts[0] == texts[1]
    assert len(texts[0]) == 2000
    assert max(bytes_after[1:]) - bytes_after[0] < 16e6


@pytest.mark.parametrize(
    ("prompts", "said"),
    [
        ([[1] * (CAPACITY + 1)], f"{CAPACITY + 1} tokens, and the artifact's caches hold {CAPACITY}"),
        ([[]], "no tokens"),
        ([], "no tokens"),
        ([[1, 5000]], "token 5000 of a prompt is not in 0 to 1023"),
    ],
)
def test_wrong_prompt_is_refused(module: Module, prompts: list[list[int]], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        module.generate_batch(prompts)


def test_artifact_that_generates_is_not_run(module: Module) -> None:
    with pytest.raises(UsageError, match="call `generate`"):
        module.run({})


def test_command_writes_tokens(artifact: Path, module: Module, relaxtune: Callable[..., Ended]) -> None:
    expected = list(module.generate(PROMPT, max_new_tokens=12))
    words = ("generate", artifact, "--ids", ",".join(map(str, PROMPT)), "--max-new-tokens", 12)
    shown = relaxtune(*words)
    assert shown.code == 0
    assert [int(token) for token in shown.stdout.split()] == expected
    assert "12 tokens: the first after" in shown.stderr
    assert relaxtune(*words, "--format", "json").data["tokens"] == expected
    drawn = list(module.generate(PROMPT, max_new_tokens=12, sampling=Sampling(0.9, top_k=40, seed=3)))
    options = ("--temperature", 0.9, "--top-k", 40, "--seed", 3)
    assert relaxtune(*words, *options, "--format", "json").data["tokens"] == drawn


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "expected one prompt"),
        (["--prompt", "once"], "--tokenizer FILE"),
        (["--ids", "1,x"], "expected token ids"),
        (["--ids", ",".join(["1"] * 200)], "--max-length"),
    ],
)
def test_command_refuses_a_wrong_prompt(
    artifact: Path, relaxtune: Callable[..., Ended], words: list[str], said: str
) -> None:
    ended: Ended = relaxtune("generate", artifact, *words)
    assert ended.code == 2
    assert said in ended.stderr


def test_manifest_says_how_the_artifact_generates(artifact: Path) -> None:
    generation = json.loads((artifact / "manifest.json").read_text())["generation"]
    assert (generation["capacity"], generation["batch"], generation["new"]) == (CAPACITY, "batch", "sequence")


@pytest.mark.parametrize(
    ("word", "options", "code", "said"),
    [
        ("validate", ("--samples", 1), 0, "passed"),
        ("bench", (), 2, "compile the model without --generate"),
        ("refit", ("--weights", "other.onnx"), 2, "compile again"),
    ],
)
def test_other_words_know_the_artifact(
    artifact: Path, relaxtune: Callable[..., Ended], word: str, options: tuple[object, ...], code: int, said: str
) -> None:
    words = ("artifact", "refit") if word == "refit" else (word,)
    ended = relaxtune(*words, artifact, *options, *(() if word == "refit" else ("--db", "none")))
    assert said in " ".join((ended.stdout + ended.stderr).split())
    assert ended.code == code
