"""Text in and out of `relaxtune generate`, with a tokenizer that is made here."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from relaxtune import Module
from tests.command_line import Ended

tokenizers = pytest.importorskip("tokenizers", reason="the extra `tokenizer` is not installed")

TEXT = "Once upon a time, a café met a naïve 猫."


@pytest.fixture
def tokenizer(tmp_path: Path) -> Path:
    """Return a byte-level BPE whose characters take several tokens, of the decoder's vocabulary."""
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=1024, initial_alphabet=alphabet, show_progress=False)
    made.train_from_iterator([TEXT, "to be or not to be"] * 50, trainer)
    made.save(str(tmp_path / "tokenizer.json"))
    return tmp_path / "tokenizer.json"


def test_text_is_that_of_the_tokens(
    artifact: Path, module: Module, tokenizer: Path, relaxtune: Callable[..., Ended]
) -> None:
    words = ("generate", artifact, "--prompt", TEXT, "--tokenizer", tokenizer, "--max-new-tokens", 40)
    data = relaxtune(*words, "--format", "json").data
    made = tokenizers.Tokenizer.from_file(str(tokenizer))
    assert made.decode(data["prompt"]) == TEXT
    assert data["tokens"] == list(module.generate(data["prompt"], max_new_tokens=40))
    # The end may be a character that is not complete yet.
    whole = made.decode(data["tokens"])
    assert whole.startswith(data["text"].rstrip("\ufffd"))
    assert len(whole) - len(data["text"]) <= 4
    assert relaxtune(*words).stdout.removesuffix("\n") == data["text"]


def test_file_that_is_no_tokenizer_is_refused(artifact: Path, tmp_path: Path, relaxtune: Callable[..., Ended]) -> None:
    (tmp_path / "other.json").write_text("{}")
    ended = relaxtune("generate", artifact, "--prompt", "a", "--tokenizer", tmp_path / "other.json")
    assert ended.code == 2
    assert "cannot be read as a tokenizer.json" in ended.stderr
