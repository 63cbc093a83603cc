"""The speed of an artifact that generates, beside a torch model where torch is installed."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from relaxtune.pipeline.bench import generation
from relaxtune.pipeline.bench.generation import GenerationRequest, bench_generation
from relaxtune.pipeline.bench.peers.worker import Generate, start
from relaxtune.pipeline.bench.request import BenchRequest
from relaxtune.pipeline.errors import UsageError
from tests.command_line import Ended
from tests.pipeline.generation.conftest import artifact, decoder  # noqa: F401  fixtures

QUICK = GenerationRequest((5, 20), 20, (1, 2), price=3.6, bench=BenchRequest(duration_s=1e-9))


def measured(folder: Path, request: GenerationRequest) -> generation.GenerationReport:
    return bench_generation(folder, request, lambda _device: 1e10)


def test_each_prompt_and_batch_has_its_times(artifact: Path) -> None:  # noqa: F811
    report = measured(artifact, QUICK)
    assert [(one.batch, one.prompt) for one in report.points] == [(1, 5), (1, 20), (2, 5), (2, 20)]
    for one in report.points:
        assert 0 < one.ttft_ms["50"] <= one.ttft_ms["90"] <= one.ttft_ms["99"]
        assert 0 < one.tpot_ms["50"] <= one.tpot_ms["99"]
        assert one.million_tokens == pytest.approx(1e3 / one.tokens_per_s)
        assert one.token_bytes is not None
        assert one.bandwidth_use == pytest.approx(one.token_bytes * one.batch / one.tpot_ms["50"] * 1e3 / 1e10)
        assert one.differs_at is None
    short, long = report.points[:2]
    # Two layers of keys and values, two heads of width 32 in float32, for 15 positions more.
    assert long.token_bytes - short.token_bytes == 15 * 2 * 2 * 2 * 32 * 4


def test_peer_with_other_tokens_is_named(monkeypatch: pytest.MonkeyPatch, artifact: Path) -> None:  # noqa: F811
    class Peers:
        def __init__(self, module: object, _request: object) -> None:
            self._own = partial(generation._run, module)

        def __enter__(self) -> dict[str, generation.Run]:
            def run(ids: np.ndarray, new: int) -> tuple[list[float], list[list[int]]]:
                came, tokens = self._own(ids, new)
                tokens[3][0] += 1
                return came, tokens

            return {"torch": run}

        def __exit__(self, *_: object) -> None:
            pass

    monkeypatch.setattr(generation, "_peers", Peers)
    own, peer = measured(artifact, replace(QUICK, prompts=(5,), batches=(1,))).points
    assert (own.differs_at, peer.differs_at) == (None, 3)
    assert peer.token_bytes is None


def test_tables_fit_a_screen_of_80_columns(artifact: Path) -> None:  # noqa: F811
    console = Console(width=80, force_terminal=False)
    with console.capture() as shown:
        console.print(*measured(artifact, replace(QUICK, prompts=(20,))).tables())
    assert max(map(len, shown.get().splitlines())) <= 80
    assert len(re.findall(r"relaxtune *│ 2 *│ 20 ", shown.get())) == 2


@pytest.mark.parametrize(
    ("options", "said"),
    [(("--prompt", 150, "--new", 64), "hold 160"), (("--prompt", "x"), "--prompt"), (("--prompt", 0), "--prompt")],
)
def test_command_refuses_what_has_no_room(
    artifact: Path,  # noqa: F811
    relaxtune: Callable[..., Ended],
    options: tuple[object, ...],
    said: str,
) -> None:
    ended = relaxtune("bench", artifact, "--generate", *options)
    assert ended.code == 2
    assert said in ended.stderr


def test_command_writes_json(artifact: Path, relaxtune: Callable[..., Ended]) -> None:  # noqa: F811
    words = ("bench", artifact, "--generate", "--prompt", 9, "--new", 12, "--duration", 0.01, "--format", "json")
    (point,) = relaxtune(*words).data["points"]
    assert point["prompt"] == 9
    assert point["tokens_per_s"] > 0


def test_artifact_that_does_not_generate_is_refused(tmp_path: Path) -> None:
    import relaxtune

    relaxtune.compile("bert-tiny", tmp_path / "bert", target="llvm", samples=0)
    with pytest.raises(UsageError, match="does not generate"):
        measured(tmp_path / "bert", QUICK)


@pytest.mark.export
def test_torch_gives_tokens_and_their_times(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    from relaxtune.pipeline.bench.peers.callers import PeerOrder

    (tmp_path / "made.py").write_text(
        "import torch, transformers as tf\n"
        "def model():\n"
        "    torch.manual_seed(0)\n"
        "    sizes = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2)\n"
        "    return tf.LlamaForCausalLM(tf.LlamaConfig(vocab_size=50, num_key_value_heads=2, **sizes))\n"
    )
    answer = start()
    answer(PeerOrder("torch", "", "llvm", 1, 1, (), f"{tmp_path / 'made.py'}:model"))
    found = answer(Generate([[1, 2, 3], [4, 5, 6]], 7))
    assert isinstance(found, tuple)
    came, tokens = found
    assert len(came) == len(tokens) == 7
    assert came == sorted(came)
    assert all(len(row) == 2 for row in tokens)
