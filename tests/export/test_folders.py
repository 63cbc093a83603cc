"""Folders in the hub's layout, small and of many families: from the folder to a validated artifact, tokens and vectors.

Asked for by `-m export`, as the exports are.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from relaxtune.models import ModelError, load_model
from relaxtune.pipeline.artifact.module import Module
from relaxtune.pipeline.jobs.compile_and_tune import compile_model
from relaxtune.pipeline.prepare import ModelRequest
from tests.command_line import Ended

pytestmark = [pytest.mark.export, pytest.mark.filterwarnings("default"), pytest.mark.slow]

VOCABULARY, HIDDEN, POSITIONS = 400, 64, 96
TEXTS = ["a cat sits on the mat", "compilers turn graphs into kernels", "the dog", "", "a cat " * 100]
_LAYERS = {"num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128}
_TEXT = {"vocab_size": VOCABULARY, "hidden_size": HIDDEN, "max_position_embeddings": POSITIONS, **_LAYERS}
_ENDS = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
_GROUPED = {**_TEXT, **_ENDS, "num_key_value_heads": 2}
_IMAGE = {"hidden_size": HIDDEN, "image_size": 32, "patch_size": 8, **_LAYERS}
# Class of the model -> its configuration's class and sizes, an input and an output of the graph.
FAMILIES: dict[str, tuple[str, dict[str, Any], str, str]] = {
    "BertModel": ("BertConfig", _TEXT, "token_type_ids", "sentence_embedding"),
    "DistilBertForSequenceClassification": (
        "DistilBertConfig",
        {"vocab_size": VOCABULARY, "dim": HIDDEN, "n_layers": 2, "n_heads": 4, "hidden_dim": 128, "num_labels": 3},
        "attention_mask",
        "logits",
    ),
    "XLMRobertaForSequenceClassification": ("XLMRobertaConfig", {**_TEXT, "num_labels": 1}, "attention_mask", "logits"),
    "ModernBertForMaskedLM": (
        "ModernBertConfig",
        {**_TEXT, **_ENDS, "cls_token_id": 2, "sep_token_id": 3, "local_attention": 16},
        "attention_mask",
        "logits",
    ),
    "GPT2LMHeadModel": (
        "GPT2Config",
        {"vocab_size": VOCABULARY, "n_embd": HIDDEN, "n_layer": 2, "n_head": 4, "n_positions": POSITIONS, **_ENDS},
        "past_key_values.1.value",
        "present.0.key",
    ),
    "LlamaForCausalLM": ("LlamaConfig", _GROUPED, "position_ids", "present.1.value"),
    "Qwen3ForCausalLM": ("Qwen3Config", {**_GROUPED, "head_dim": 32}, "position_ids", "logits"),
    "ViTForImageClassification": ("ViTConfig", _IMAGE, "pixel_values", "logits"),
    "SiglipModel": (
        "SiglipConfig",
        {"text_config": {**_TEXT}, "vision_config": _IMAGE},
        "pixel_values",
        "pooler_output",
    ),
    "WhisperForConditionalGeneration": (
        "WhisperConfig",
        {
            "vocab_size": VOCABULARY, "d_model": HIDDEN, "encoder_layers": 2, "decoder_layers": 2,
            "encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 128, "decoder_ffn_dim": 128,
            "num_mel_bins": 16, "max_source_positions": 100, "decoder_start_token_id": 0, **_ENDS,
        },
        "input_features",
        "last_hidden_state",
    ),
    "Wav2Vec2ForCTC": (
        "Wav2Vec2Config",
        {
            "vocab_size": 32, "hidden_size": HIDDEN, **_LAYERS, "conv_dim": (32, 32), "conv_stride": (5, 4),
            "conv_kernel": (10, 8), "num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 4,
        },
        "input_values",
        "logits",
    ),
}  # fmt: skip


@pytest.fixture(autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Give all tests one cache, beside the folder that pytest removes."""
    place = tmp_path_factory.getbasetemp() / "cache"
    monkeypatch.setenv("XDG_CACHE_HOME", str(place))
    return place


def save_tokenizer(folder: Path) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=VOCABULARY, special_tokens=["<end>"], initial_alphabet=alphabet)
    tokenizer.train_from_iterator(TEXTS, trainer)
    tokenizer.save(str(folder / "tokenizer.json"))


def make_folder(place: Path, architecture: str) -> Path:
    """Return a folder in the hub's layout with random weights, called as its class."""
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    torch.manual_seed(0)
    config, sizes, _, _ = FAMILIES[architecture]
    folder = place / architecture
    getattr(transformers, architecture)(getattr(transformers, config)(**sizes)).save_pretrained(folder)
    if "input_ids" in FAMILIES[architecture][2:] or "vocab_size" in sizes:
        save_tokenizer(folder)
    return folder


def add_pooling(folder: Path, mode: str) -> None:
    (folder / "1_Pooling").mkdir()
    modules = [{"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"}]
    modules += [{"idx": 1, "name": "1", "path": "1_Pooling", "type": "sentence_transformers.models.Pooling"}]
    (folder / "modules.json").write_text(json.dumps(modules))
    config = {"word_embedding_dimension": HIDDEN, f"pooling_mode_{mode}": True}
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize("architecture", FAMILIES)
def test_folder_becomes_a_validated_artifact(tmp_path: Path, architecture: str) -> None:
    folder = make_folder(tmp_path, architecture)
    made = compile_model(ModelRequest(folder, target="llvm"), tmp_path / "artifact")
    assert made.validation is not None
    assert made.validation.passed
    _, _, of_input, of_output = FAMILIES[architecture]
    assert made.manifest.model == architecture
    assert of_input in {spec.name for spec in made.manifest.inputs}
    assert of_output in {spec.name for spec in made.manifest.outputs}
    assert all(spec.shape[0] == "batch" for spec in made.manifest.inputs)


@pytest.mark.parametrize("architecture", ["GPT2LMHeadModel", "LlamaForCausalLM"])
def test_decoder_generates_the_text_of_transformers(
    tmp_path: Path, relaxtune: Callable[..., Ended], architecture: str
) -> None:
    folder = make_folder(tmp_path, architecture)
    (folder / "generation_config.json").unlink(missing_ok=True)
    assert relaxtune("compile", folder, "--generate", "--target", "llvm", "--out", tmp_path / "artifact").code == 0
    words = ("--prompt", "a cat sits", "--max-new-tokens", 16, "--format", "json")
    shown = relaxtune("generate", tmp_path / "artifact", *words)
    assert shown.code == 0, shown.stderr
    import torch
    import transformers

    model = getattr(transformers, architecture).from_pretrained(folder)
    model.generation_config.eos_token_id = None
    prompt = torch.tensor([shown.data["prompt"]])
    expected = model.generate(input_ids=prompt, do_sample=False, max_new_tokens=16, pad_token_id=0)
    assert shown.data["tokens"] == expected[0, prompt.shape[1] :].tolist()
    assert shown.data["text"]
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": shown.data["tokens"][3]}))
    assert relaxtune("compile", folder, "--generate", "--target", "llvm", "--out", tmp_path / "artifact").code == 0
    ended = relaxtune("generate", tmp_path / "artifact", *words).data["tokens"]
    assert ended == shown.data["tokens"][: len(ended)]
    assert ended[-1] == shown.data["tokens"][3]


@pytest.mark.parametrize("mode", ["mean_tokens", "cls_token", "lasttoken"])
def test_vectors_are_those_of_sentence_transformers(tmp_path: Path, relaxtune: Callable[..., Ended], mode: str) -> None:
    sentence_transformers = pytest.importorskip("sentence_transformers")
    from transformers import PreTrainedTokenizerFast

    from relaxtune import SentenceEncoder

    folder = make_folder(tmp_path, "BertModel")
    add_pooling(folder, mode)
    file = str(folder / "tokenizer.json")
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=file, pad_token="<end>", model_max_length=POSITIONS)
    tokenizer.save_pretrained(folder)
    (folder / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": POSITIONS}))
    expected = sentence_transformers.SentenceTransformer(str(folder), device="cpu").encode(TEXTS)
    artifact, out = tmp_path / "artifact", tmp_path / "x.npy"
    assert relaxtune("compile", folder, "--target", "llvm", "--out", artifact).code == 0
    (tmp_path / "texts.txt").write_text("\n".join(TEXTS) + "\n")
    assert relaxtune("embed", artifact, tmp_path / "texts.txt", "--out", out).code == 0
    # A text without tokens has no vector that means anything.
    some = [row for row, text in enumerate(TEXTS) if text]
    np.testing.assert_allclose(np.load(out)[some], expected[some], atol=1e-5)
    inside = sentence_transformers.SentenceTransformer(modules=[SentenceEncoder(artifact, threads=1)], device="cpu")
    np.testing.assert_allclose(inside.encode(TEXTS)[some], expected[some], atol=1e-5)
    assert inside.get_embedding_dimension() == HIDDEN
    assert inside.max_seq_length == POSITIONS
    inside.save_pretrained(str(tmp_path / "saved"))
    again = SentenceEncoder.load(str(tmp_path / "saved"), subfolder="0_SentenceEncoder")
    assert Module.load(again.directory).manifest.model == "BertModel"


def test_repository_is_read_from_the_local_cache(tmp_path: Path) -> None:
    pytest.importorskip("huggingface_hub")
    folder = make_folder(tmp_path, "BertModel")
    repository, commit = tmp_path / "hub" / "models--org--tiny", "0123456789abcdef" * 2
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text(commit)
    shutil.copytree(folder, repository / "snapshots" / commit)
    code = "import sys; from relaxtune.models import load_model; print(load_model(sys.argv[1]).path)"
    environment = {"HF_HUB_CACHE": str(tmp_path / "hub"), "HF_HUB_OFFLINE": "1"}

    def loaded(name: str) -> subprocess.CompletedProcess[str]:
        import os

        command = [sys.executable, "-c", code, name]
        return subprocess.run(command, env=os.environ | environment, capture_output=True, text=True, check=False)

    first, second = loaded("hf:org/tiny"), loaded("hf:org/tiny@main")
    assert first.stdout.strip().endswith("tiny.onnx"), first.stderr
    assert commit[:16] in first.stdout
    assert second.stdout == first.stdout
    assert "is not on this machine and the hub does not answer" in loaded("hf:org/other").stderr


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"architectures": ["BertModell"]}, "architecture BertModell is none of the .* these are alike: BertModel"),
        ({"model_type": "nonsense", "architectures": None}, "model_type nonsense is none of the"),
        ({"weights": None}, "has no weights; expected model.safetensors"),
    ],
)
def test_folder_that_cannot_be_exported_says_why(tmp_path: Path, change: dict[str, Any], said: str) -> None:
    folder = make_folder(tmp_path, "BertModel")
    if "weights" in change:
        (folder / "model.safetensors").unlink()
    else:
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | change))
    with pytest.raises(ModelError, match=said):
        load_model(folder)
