"""Tokens of artifacts that generate, beside those of transformers' `generate` for the same weights.

Asked for by `-m export`, as the exports are.
"""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest

from relaxtune.pipeline.artifact.module import Module
from relaxtune.pipeline.jobs.compile_and_tune import compile_model
from relaxtune.pipeline.prepare import ModelRequest
from tests.export.test_exports import exporter  # noqa: F401  a fixture

pytestmark = [pytest.mark.export, pytest.mark.filterwarnings("default")]

PROMPTS = [[5, 17, 88, 23, 64, 9, 41], [5, 17, 88], [3, 99, 120, 7, 7]]
COUNT = 48
# Decoders without positions as an input count padding too: they have no batch of several lengths.
COUNTS_PADDING = ("gpt2",)


@pytest.mark.parametrize(
    ("family", "kind"),
    [
        *(
            (family, "optimum")
            for family in ("gpt2", "llama", "qwen3", "mistral", "gemma2", "opt", "bloom", "gpt-neox")
        ),
        ("gpt2", "dynamo"),
        ("llama", "dynamo"),
        ("mistral", "dynamo"),
    ],
)
def test_tokens_are_those_of_transformers(family: str, kind: str, exporter: ModuleType, tmp_path: Path) -> None:  # noqa: F811
    check(family, kind, COUNT, exporter, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["phi3", "mixtral", "gemma3"])
def test_300_tokens_are_those_of_transformers(family: str, exporter: ModuleType, tmp_path: Path) -> None:  # noqa: F811
    check(family, "optimum", 300, exporter, tmp_path)


def check(family: str, kind: str, count: int, exporter: ModuleType, folder: Path) -> None:  # noqa: F811
    """Compare the tokens of one sequence, cut at other places, and of a batch; windows have 8 places."""
    torch = pytest.importorskip("torch")
    path = exporter.export(f"{family}-decode", kind, folder, dynamic=True)
    torch.manual_seed(0)
    model = exporter.FAMILIES[f"{family}-decode"].build(64).eval()
    exporter.disturb(model)
    model.generation_config.eos_token_id = None
    made = compile_model(ModelRequest(path, target="llvm", generate=True, max_length=count + 12), folder / "artifact")
    assert made.validation is not None
    assert made.validation.passed
    module = Module.load(made.directory)

    def expected(prompts: list[list[int]]) -> list[list[int]]:
        length = max(map(len, prompts))
        ids = torch.tensor([[0] * (length - len(one)) + one for one in prompts])
        mask = torch.tensor([[0] * (length - len(one)) + [1] * len(one) for one in prompts])
        with torch.no_grad():
            found = model.generate(
                input_ids=ids, attention_mask=mask, do_sample=False, max_new_tokens=count, pad_token_id=0
            )
        return found[:, length:].tolist()

    alone = expected(PROMPTS[:1])[0]
    for chunk in (512, 3):
        assert list(module.generate(PROMPTS[0], max_new_tokens=count, chunk=chunk)) == alone
    if family not in COUNTS_PADDING:
        rows = list(module.generate_batch(PROMPTS, max_new_tokens=count))
        assert [list(column) for column in zip(*rows, strict=True)] == expected(PROMPTS)
