"""Tokens of encoder-decoders beside those of transformers' `generate` for the same weights; run by `-m export`."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from relaxtune.models import load_model
from relaxtune.pipeline.artifact.module import Module
from relaxtune.pipeline.errors import UsageError
from relaxtune.pipeline.jobs.compile_and_tune import compile_model
from relaxtune.pipeline.prepare import ModelRequest
from tests.command_line import Ended
from tests.export.test_exports import exporter  # noqa: F401  a fixture

pytestmark = [pytest.mark.export, pytest.mark.filterwarnings("default")]

CAPACITY = 48
_WORDS = 128


@pytest.mark.parametrize(
    ("family", "kind"),
    [
        *((family, "torchscript") for family in ("t5", "bart", "whisper")),
        *((family, "merged") for family in ("t5", "whisper")),
        ("t5", "dynamo"),
    ],
)
def test_tokens_are_those_of_transformers(
    family: str,
    kind: str,
    exporter: ModuleType,  # noqa: F811
    tmp_path: Path,
    relaxtune: Callable[..., Ended],
) -> None:
    torch = pytest.importorskip("torch")
    from tests.export.encoder_decoders import export_files

    torch.manual_seed(0)
    model = exporter.FAMILIES[family].build(64).eval()
    exporter.disturb(model)
    model.generation_config.eos_token_id = model.generation_config.forced_eos_token_id = None
    exported = "dynamo" if kind == "dynamo" else "torchscript"
    folder = export_files(model, tmp_path / "model", merged=kind == "merged", exporter=exported)
    if kind == "merged":
        for name in ("decoder_model.onnx", "decoder_with_past_model.onnx"):
            (folder / name).unlink()
    length = 32 if family == "whisper" else CAPACITY
    made = compile_model(ModelRequest(folder, target="llvm", generate=True, max_length=length), tmp_path / "artifact")
    assert made.validation is not None
    assert made.validation.passed
    assert Module.load(made.directory / "encoder").manifest.validation["passed"]
    count = length - 8
    if family == "whisper":
        inputs = {"input_features": torch.randn(2, 8, 64)}
    else:
        ids = torch.randint(2, _WORDS - 8, (2, 11))
        mask = torch.ones_like(ids)
        mask[1, -4:] = 0
        inputs = {"input_ids": ids, "attention_mask": mask}

    def expected(**given: object) -> list[list[int]]:
        with torch.no_grad():
            return model.generate(**given, do_sample=False, max_new_tokens=count)[:, -count:].tolist()

    module = Module.load(made.directory)
    arrays = {name: tensor.numpy() for name, tensor in inputs.items()}
    rows = list(module.generate_batch(inputs=arrays, max_new_tokens=count))
    assert np.transpose(rows).tolist() == expected(**inputs)
    # Another input of another length, behind the first.
    first = {name: tensor[:1, :7] if family != "whisper" else tensor[1:] for name, tensor in inputs.items()}
    tokens = list(module.generate(inputs={name: one.numpy() for name, one in first.items()}, max_new_tokens=count))
    assert tokens == expected(**first)[0]
    with pytest.raises(UsageError, match="give inputs of that too"):
        module.generate([1])
    np.savez(tmp_path / "inputs.npz", **{name: one.numpy() for name, one in first.items()})
    words = ("generate", made.directory, "--max-new-tokens", count, "--format", "json")
    assert relaxtune(*words, "--inputs", tmp_path / "inputs.npz").data["tokens"] == tokens
    if family != "whisper":
        given = ",".join(map(str, first["input_ids"][0].tolist()))
        assert relaxtune(*words, "--ids", given).data["tokens"] == tokens


def test_keys_of_the_encoder_are_those_of_the_decoder_without_past(exporter: ModuleType, tmp_path: Path) -> None:  # noqa: F811
    torch = pytest.importorskip("torch")
    import onnxruntime as ort

    from tests.export.encoder_decoders import export_files

    torch.manual_seed(0)
    folder = export_files(exporter.FAMILIES["bart"].build(64).eval(), tmp_path / "model")
    given = {"input_ids": np.array([[5, 7, 9, 11]]), "attention_mask": np.ones((1, 4), np.int64)}
    encoder = ort.InferenceSession(folder / "encoder_model.onnx")
    (hidden,) = encoder.run(None, given)
    decoder = ort.InferenceSession(folder / "decoder_model.onnx")
    mask, ids = given["attention_mask"], np.array([[3, 4]])
    names = [one.name for one in decoder.get_outputs()]
    values = decoder.run(None, {"encoder_attention_mask": mask, "input_ids": ids, "encoder_hidden_states": hidden})
    expected = dict(zip(names, values, strict=True))
    model = load_model(folder)
    found = ort.InferenceSession(model.serialize()).run(None, given)
    for spec, array in zip(model.outputs, found, strict=True):
        np.testing.assert_allclose(array, expected[spec.name.replace("past_key_values", "present")], atol=1e-6)
    (folder / "decoder_model.onnx").unlink()
    with pytest.raises(Exception, match=r"expected the decoder without past"):
        load_model(folder)
    assert json.loads((folder / "config.json").read_text())["decoder_start_token_id"] == 0
