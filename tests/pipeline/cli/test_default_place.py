from __future__ import annotations

import pytest

from relaxtune.pipeline.cli.compilation import _default_out


@pytest.mark.parametrize(
    ("model", "name"),
    [
        ("bert-tiny", "bert-tiny-llvm"),
        ("/models/bert.onnx", "bert-llvm"),
        ("/models/bert/model.onnx", "bert-llvm"),
        ("/models/bert/onnx/model.onnx", "bert-llvm"),
        ("/models/bert/onnx/model_fp16.onnx", "bert-model_fp16-llvm"),
        ("/models/whisper/encoder_model.onnx", "whisper-encoder_model-llvm"),
        ("/models/whisper/decoder.onnx", "whisper-decoder-llvm"),
        ("/models/sd/unet/model.onnx", "unet-llvm"),
        ("/model.onnx", "model-llvm"),
        ("hf:Qwen/Qwen3-0.6B", "Qwen3-0.6B-llvm"),
        ("hf:gpt2", "gpt2-llvm"),
        ("/models/Qwen3-0.6B", "Qwen3-0.6B-llvm"),
    ],
)
def test_an_artifact_is_named_by_its_folder_when_every_model_has_that_file(model: str, name: str) -> None:
    assert str(_default_out(model, "llvm")) == f"out/{name}"
