"""BERT on batches of sentences of many lengths: without padding, padded, and torch's attention over packed tokens.

    python -m benchmarks.whole_models.bench_unpad_gpu [--model bert-base] [--batch 32] [--batches 12]
        [--texts sentences:128,docstrings:512] [--arms unpadded,padded,static,torch,torch_padded] [--runs 20]
        [--folder DIR] [--budget S] [--out FILE.json]

The texts are the docstrings of the modules of Python's standard library, whole or by sentence (cut behind a full stop
before a capital letter). A word counts one token for each begun six letters, any other sign one, and [CLS] and [SEP]
two more; the tokens themselves are drawn at random. Batches are drawn at random (seed 0). `unpadded` is one artifact of
`--unpad`, `padded` the symbolic artifact at the longest text of each batch, `static` one at the number of tokens in
`--texts`, to which longer texts are cut. Artifacts that lie in `--folder` already are taken from there. `torch` is
torch.compile(dynamic=True) of the same model over packed tokens, with `torch.nn.attention.varlen`; `torch_padded` the
same as `padded`. Tokens are packed outside of torch's time.

Precision is fp16; nothing is tuned. Each arm's output is first compared with the float32 model on the rows that count
(relative error, Frobenius). Then the arms take turns; a time is what a caller waits for, by the host clock.
"""

from __future__ import annotations

import argparse
import ast
import json
import math
import os
import re
import statistics
import sysconfig
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.any_length.random_sizes import Arm
from benchmarks.whole_models.bench_any_length_gpu import compile_artifact, measure, own_arm

_ARMS = ("unpadded", "padded", "static", "torch", "torch_padded")


def list_texts(kind: str) -> list[str]:
    """Return the docstrings of the standard library, or their sentences."""
    texts: list[str] = []
    for path in sorted(Path(sysconfig.get_path("stdlib")).rglob("*.py")):
        if "site-packages" in path.parts or "test" in path.parts:
            continue
        try:
            tree = ast.parse(path.read_bytes())
        except (SyntaxError, ValueError):
            continue
        nodes = [one for one in ast.walk(tree) if isinstance(one, ast.Module | ast.ClassDef | ast.FunctionDef)]
        texts += [text for node in nodes if (text := ast.get_docstring(node))]
    if kind == "docstrings":
        return texts
    return [part for text in texts for part in re.split(r"(?<=[.!?])\s+(?=[A-Z])", text) if part.strip()]


def token_count(text: str) -> int:
    """Return how many tokens a text counts."""
    return 2 + sum(math.ceil(len(word) / 6) if word[0].isalnum() else 1 for word in re.findall(r"\w+|[^\w\s]", text))


def make_feeds(lengths: Sequence[int], width: int, vocabulary: int, seed: int) -> dict[str, np.ndarray]:
    """Return a batch of texts of some lengths, padded to `width`."""
    rng = np.random.default_rng(seed)
    mask = (np.arange(width)[None] < np.asarray(lengths)[:, None]).astype(np.int64)
    ids = rng.integers(1, vocabulary, mask.shape) * mask
    return {"input_ids": ids, "attention_mask": mask, "token_type_ids": np.zeros_like(mask)}


class Packed:
    """The torch model over packed tokens, compiled."""

    def __init__(self, model: str) -> None:
        """Build it."""
        import torch
        from torch.nn.attention.varlen import varlen_attn

        from benchmarks.gpu_arms import torch_models
        from benchmarks.gpu_arms.cases import Case, weights_of
        from relaxtune.models import load_model

        weights = weights_of(load_model(model).proto)
        bert = torch_models.build(Case(model, 1, 16), weights, {}, device="cuda", dtype=torch.float16, masked=True)

        def forward(ids: Any, types: Any, places: Any, starts: Any, longest: int) -> dict[str, Any]:
            x = bert.norm(bert.words[ids] + bert.types[types] + bert.positions[places])
            for layer in bert.layers:
                q, k, v = layer.qkv(x).unflatten(-1, (3, layer.heads, -1)).unbind(1)
                attended = varlen_attn(q, k, v, starts, starts, longest, longest)
                x = layer.mixed_norm(layer.mixed(attended.flatten(1)) + x)
                x = layer.norm(layer.narrow(torch.nn.functional.gelu(layer.wide(x))) + x)
            return {"last_hidden_state": x, "pooler_output": torch.tanh(bert.pooler(x[starts[:-1].long()]))}

        self._forward = torch.compile(forward, dynamic=True)

    def arm(self, feeds: Mapping[str, np.ndarray]) -> Arm:
        """Return a call whose output is the padded one."""
        import torch

        mask = feeds["attention_mask"] != 0
        rows = torch.from_numpy(np.flatnonzero(mask)).cuda()
        ids, types = (torch.from_numpy(feeds[name][mask]).cuda() for name in ("input_ids", "token_type_ids"))
        places = torch.from_numpy(np.nonzero(mask)[1]).cuda()
        lengths = mask.sum(axis=1)
        starts = torch.from_numpy(np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)).cuda()

        def run() -> dict[str, Any]:
            outputs: dict[str, Any] = self._forward(ids, types, places, starts, int(lengths.max()))
            torch.cuda.synchronize()
            return outputs

        def padded() -> dict[str, Any]:
            """Return the outputs in the padded form, the first time it is asked for; later the packed ones."""
            outputs = run()
            if checked:
                return outputs
            checked.append(True)
            hidden = outputs["last_hidden_state"]
            wide = hidden.new_zeros((mask.size, hidden.shape[-1]))
            wide[rows] = hidden
            return {**outputs, "last_hidden_state": wide.reshape(*mask.shape, -1)}

        checked: list[bool] = []
        return padded


def main() -> None:
    """Compile, check, time, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="bert-base")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--batches", type=int, default=12)
    parser.add_argument("--texts", default="sentences:128,docstrings:512", type=_kinds)
    parser.add_argument("--folder", type=Path, help="where artifacts are kept")
    parser.add_argument("--arms", default=",".join(_ARMS), type=lambda text: text.split(","))
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--jobs", type=int, default=3, help="artifacts that are compiled at a time")
    parser.add_argument("--budget", type=float, default=1e9, help="seconds after which no further batch is begun")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    began = time.monotonic()
    sizes: dict[str, dict[str, int]] = {name: {} for name in ("unpadded", "padded") if name in arguments.arms}
    if "static" in arguments.arms:
        sizes |= {f"static-{most}": {"batch": arguments.batch, "sequence": most} for most in arguments.texts.values()}
    with (
        tempfile.TemporaryDirectory() as temporary,
        ProcessPoolExecutor(arguments.jobs, get_context("spawn")) as pool,
    ):
        folder = arguments.folder or Path(temporary)
        jobs = {
            name: pool.submit(compile_artifact, arguments.model, given, str(folder / name), unpad=name == "unpadded")
            for name, given in sizes.items()
            if not (folder / name).is_dir()
        }
        compiled = {name: job.result() for name, job in jobs.items()}
        print({name: {key: round(one) for key, one in facts.items()} for name, facts in compiled.items()}, flush=True)
        _run(arguments, list(sizes), folder, compiled, began)


def _kinds(text: str) -> dict[str, int]:
    """Return kind of text -> the most tokens of one."""
    pairs = [part.split(":") for part in text.split(",")]
    return {kind: int(most) for kind, most in pairs}


def _run(
    arguments: argparse.Namespace,
    own: Sequence[str],
    folder: Path,
    compiled: Mapping[str, Mapping[str, float]],
    began: float,
) -> None:
    from benchmarks.any_length.peers import Peers
    from benchmarks.gpu_arms.results import machine
    from relaxtune.models.zoo.presets import get_preset
    from relaxtune.pipeline.artifact.module import Module

    modules = {name: Module.load(folder / name) for name in own}
    arms = ["torch"] if "torch_padded" in arguments.arms else []
    peers = Peers(arguments.model, arms)
    makers: dict[str, Callable[[Mapping[str, np.ndarray]], Arm]] = {}
    if "torch" in arguments.arms:
        try:
            makers["torch"] = Packed(arguments.model).arm
        except ImportError as error:
            print(f"torch has no attention over packed tokens: {error}", flush=True)
    document: dict[str, Any] = {**machine(), "model": arguments.model, "compiled": compiled, "texts": {}}
    vocabulary = int(getattr(get_preset(arguments.model).config, "vocab", 1000))
    for kind, most in arguments.texts.items():
        lengths = np.minimum([token_count(text) for text in list_texts(kind)], most)
        rng = np.random.default_rng(0)
        found: dict[str, Any] = {
            "count": len(lengths),
            "most": most,
            "mean": float(np.mean(lengths)),
            "quantiles": [int(one) for one in np.quantile(lengths, (0.1, 0.5, 0.9, 0.99, 1))],
            "batches": [],
        }
        print(kind, found, flush=True)
        document["texts"][kind] = found
        for number in range(arguments.batches):
            if time.monotonic() - began > arguments.budget:
                print("the budget is spent", flush=True)
                break
            drawn = rng.choice(lengths, arguments.batch)
            feeds = make_feeds(drawn, int(drawn.max()), vocabulary, number)
            arms = _own_arms(modules, feeds, most)
            arms |= {name: make(feeds) for name, make in makers.items()}
            if "torch_padded" in arguments.arms:
                arms["torch_padded"] = _cut(peers.torch_arms(feeds)["torch"], feeds["attention_mask"])
            expected = _without_padding(peers.expected(feeds), feeds["attention_mask"])
            result = measure(arms, expected, arguments.runs)
            found["batches"].append({"tokens": int(drawn.sum()), "longest": int(drawn.max()), "arms": result})
            text = ", ".join(
                f"{name} {one['median_us']:.0f}" if "median_us" in one else f"{name} WRONG {one['error']:.3g}"
                for name, one in result.items()
            )
            print(f"{int(drawn.sum())} tokens, longest {int(drawn.max())}: {text} us", flush=True)
            _summarise(found)
            if arguments.out:
                arguments.out.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
        print(found.get("mean_us"), {name: round(one, 2) for name, one in found.get("ratios", {}).items()}, flush=True)
    os._exit(0)  # torch's compile workers may hang at exit


def _own_arms(modules: Mapping[str, Any], feeds: Mapping[str, np.ndarray], most: int) -> dict[str, Arm]:
    """Return a call of each artifact; of a static one, with inputs padded to its size."""
    wide = {name: np.pad(one, ((0, 0), (0, most - one.shape[1]))) for name, one in feeds.items()}
    given = {"unpadded": feeds, "padded": feeds, f"static-{most}": wide}
    return {
        name.partition("-")[0]: _cut(own_arm(module, given[name])[0], feeds["attention_mask"])
        for name, module in modules.items()
        if name in given
    }


def _without_padding(outputs: Mapping[str, Any], mask: np.ndarray) -> dict[str, Any]:
    """Return outputs, of the first places, with zeros at padding."""
    import torch

    seen = torch.from_numpy(mask != 0).cuda()
    result = {}
    for name, one in outputs.items():
        tensor = one if isinstance(one, torch.Tensor) else torch.from_numpy(np.asarray(one.numpy())).cuda()
        if tensor.ndim > 2:
            tensor = torch.where(seen[..., None], tensor[:, : mask.shape[1]], torch.zeros_like(tensor[:1, :1, :1]))
        result[name] = tensor
    return result


def _cut(arm: Arm, mask: np.ndarray) -> Arm:
    """Return an arm whose first call gives outputs to compare, with zeros at padding."""

    def run() -> Any:
        outputs = arm()
        if not checked:
            checked.append(True)
            return _without_padding(outputs, mask)
        return outputs

    checked: list[bool] = []
    return run


def _summarise(found: dict[str, Any]) -> None:
    """Sum the arms up over the batches: mean medians, and each arm's as a multiple of the unpadded one's."""
    names = {name for batch in found["batches"] for name in batch["arms"]}
    means = {}
    for name in sorted(names):
        medians = [batch["arms"].get(name, {}).get("median_us") for batch in found["batches"]]
        if None not in medians:
            means[name] = statistics.fmean(medians)
    found["mean_us"] = means
    base = means.get("unpadded")
    found["ratios"] = {name: one / base for name, one in means.items()} if base else {}


if __name__ == "__main__":
    main()
