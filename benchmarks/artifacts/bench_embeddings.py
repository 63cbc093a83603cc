"""Sentences a second of an embedding model: artifacts beside the backends of sentence-transformers, on real text.

    python -m benchmarks.artifacts.bench_embeddings FOLDER [--texts FILE.txt] [--count 1000] [--threads 1] [--rounds 5]

FOLDER is a model in the hub's layout, such as all-MiniLM-L6-v2. It is compiled for this CPU, untuned, with and without
padding. Every arm embeds the same texts, by turns, with the same number of threads; the median of its rounds counts. A
backend that is not installed, or does not load the folder, is left out with its reason. Without --texts, paragraphs and
sentences of Newton's Opticks are taken, which the package apache-tvm-ffi has. Needs sentence-transformers 6; for
more arms, optimum-onnx, optimum-intel and openvino.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import re
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import onnxruntime as ort
import torch
import tvm_ffi
from sentence_transformers import SentenceTransformer

import relaxtune
from benchmarks.this_run import run_facts
from relaxtune.models import load_model

RESULTS = Path(__file__).parents[1] / "results" / "cpu-embeddings.json"
_BOOK = Path(tvm_ffi.__file__).parent / "3rdparty" / "libbacktrace" / "Isaac.Newton-Opticks.txt"
_BATCH = 32
_PACKAGES = ("torch", "sentence-transformers", "onnxruntime", "openvino", "optimum-onnx", "optimum-intel")

Arm = Callable[[Sequence[str]], np.ndarray]


def book_texts(count: int) -> list[str]:
    """Return texts of a few words up to whole paragraphs, in the book's order."""
    paragraphs = [" ".join(part.split()) for part in re.split(r"\n\s*\n", _BOOK.read_text(encoding="utf-8"))]
    sentences = [re.split(r"(?<=[.;:]) ", part) if number % 2 else [part] for number, part in enumerate(paragraphs)]
    texts = [text for parts in sentences for text in parts]
    return [text for text in texts if len(text) > 20][:count]


def arms_of(folder: Path, out: Path, threads: int) -> tuple[dict[str, Arm], dict[str, str]]:
    """Return what embeds texts, by name, and why others are left out."""
    arms: dict[str, Arm] = {}
    left_out: dict[str, str] = {}
    for name, unpad in (("relaxtune", False), ("relaxtune --unpad", True)):
        relaxtune.compile(folder, out / name, target="llvm", unpad=unpad, samples=1)
        arms[name] = relaxtune.load(out / name, threads=threads).embed
    sessions = ort.SessionOptions()
    sessions.intra_op_num_threads = threads
    torch.set_num_threads(threads)
    backends = {
        "torch": {},
        "onnx": {"session_options": sessions, "provider": "CPUExecutionProvider"},
        "openvino": {"ov_config": {"INFERENCE_NUM_THREADS": threads}},
    }
    for name, options in backends.items():
        try:
            model = SentenceTransformer(str(folder), device="cpu", backend=name, model_kwargs=options)
        except Exception as e:  # a library of the backend raises what it likes; the arm is left out
            left_out[name] = f"{type(e).__name__}: {e}"[:300]
            continue
        arms[f"sentence-transformers {name}"] = lambda texts, model=model: model.encode(texts, batch_size=_BATCH)
    encoder = SentenceTransformer(modules=[relaxtune.SentenceEncoder(out / "relaxtune")], device="cpu")
    arms["SentenceEncoder"] = lambda texts: encoder.encode(texts, batch_size=_BATCH)
    return arms, left_out


def onnx_runtime_arm(folder: Path, artifact: Path, threads: int) -> Arm:
    """Return our own tokenising and batching around ONNX Runtime: the pooled graph that the artifact was made of."""
    embedder = relaxtune.load(artifact).embedder
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    session = ort.InferenceSession(load_model(folder).path, options, providers=["CPUExecutionProvider"])
    names = [one.name for one in session.get_outputs()]
    embedder._run = lambda inputs: dict(zip(names, session.run(None, dict(inputs)), strict=True))
    return embedder


def main() -> None:
    """Measure the arms by turns; print sentences a second and ratios, and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--texts", type=Path)
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--results", type=Path, default=RESULTS)
    options = parser.parse_args()
    os.environ["TOKENIZERS_PARALLELISM"] = str(options.threads > 1).lower()
    texts = options.texts.read_text().splitlines()[: options.count] if options.texts else book_texts(options.count)
    with tempfile.TemporaryDirectory() as out:
        arms, left_out = arms_of(options.folder, Path(out), options.threads)
        arms["ONNX Runtime, pooled graph"] = onnx_runtime_arm(options.folder, Path(out) / "relaxtune", options.threads)
        expected = arms["sentence-transformers torch"](texts)
        seconds: dict[str, list[float]] = {name: [] for name in arms}
        errors = {name: float(np.abs(arm(texts) - expected).max()) for name, arm in arms.items()}
        for _ in range(options.rounds):
            for name, arm in arms.items():
                started = time.perf_counter()
                arm(texts)
                seconds[name].append(time.perf_counter() - started)
    medians = {name: statistics.median(times) for name, times in seconds.items()}
    rows = [
        {"arm": name, "texts_per_s": len(texts) / median, "seconds": seconds[name], "largest_difference": errors[name],
         "times_as_fast": medians[name] / medians["relaxtune"]}
        for name, median in sorted(medians.items(), key=lambda one: one[1])
    ]  # fmt: skip
    for row in rows:
        ours = f"relaxtune is {row['times_as_fast']:.2f} times as fast"
        print(f"{row['arm']:32} {row['texts_per_s']:8.1f} texts/s, {ours}, differs by {row['largest_difference']:.1e}")
    for name, reason in left_out.items():
        print(f"{name}: left out: {reason}")
    lengths = sorted(map(len, texts))
    facts = {"texts": len(texts), "characters": [lengths[0], lengths[len(texts) // 2], lengths[-1]]}
    packages = {name: _version(name) for name in _PACKAGES}
    run = {**run_facts(), "packages": packages, "threads": options.threads, "model": options.folder.name, **facts}
    options.results.write_text(json.dumps({"run": run, "rows": rows, "left_out": left_out}, indent=1) + "\n")


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


if __name__ == "__main__":
    main()
