"""Runs every word of the command line once, as a user does after an installation, and checks what each says.

    python -m tests.guardrails.words --relaxtune .venv/bin/relaxtune --out words.json

A small model of the zoo, saved as a file, is tuned on this CPU, compiled, validated, measured, kept, promoted, refitted
and carried out as a plan of two cells. The words run in a folder of their own, without this project on their path, so
what is tried is the installation that the script belongs to. A word that the command line has and no step runs is a
fault, and so is another exit code than a step's, a traceback, and an output that lacks what a step looks for.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import onnx
from onnx import numpy_helper

import relaxtune
from relaxtune.models import load_model, random_inputs
from relaxtune.tuning_db.batches import list_batches
from relaxtune.tuning_db.records import Mode
from relaxtune.tuning_db.store import TuningDatabase
from tests.command_line import Ended, all_words
from tests.pipeline.tuning.ray.clusters import small_cluster

ENDS_WITHIN_S = 300.0
_MODEL = "bert-tiny"
_DECODER = "llama-tiny-with-past"
_PLAN = """\
name = "night"
database = "tuning.db"
out = "out/batch"
samples = 1
[budget]
candidates = 40
[defaults]
targets = ["llvm"]
[[cells]]
models = ["model.onnx", "other.onnx"]
"""


@dataclass(frozen=True)
class Step:
    """A word with its options, the exit code that is right, and what must be so of what it wrote."""

    word: str
    options: tuple[str, ...]
    holds: Callable[[Ended], object]
    code: int = 0


@dataclass(frozen=True)
class Tried:
    """How a step ended; `fault` is empty where all is well."""

    word: str
    code: int | None
    seconds: float
    fault: str


class Words:
    """The steps, in an order in which each finds what it needs.

    Parameters
    ----------
    program
        The `relaxtune` that is tried.
    root
        A folder of its own.
    """

    def __init__(self, program: Path, root: Path) -> None:
        self._program = program
        self._root = root
        hidden = {"PYTHONPATH", "PYTHONHOME"}
        self._environment = {name: value for name, value in os.environ.items() if name not in hidden}
        self._environment |= {"XDG_CACHE_HOME": str(root / "cache"), "COLUMNS": "200"}
        save_models(root)
        (root / "plan.toml").write_text(_PLAN, encoding="utf-8")

    def run(self) -> Iterator[Tried]:
        """Run all steps, one after the other."""
        for step in before_the_batch():
            yield self._try(step)
        yield from self._batch()
        with self._database() as database:
            job, record = database.list_jobs()[0].id, database.list_records()[0].id
        for step in after_the_batch(self._root, job, str(record)):
            yield self._try(step)
        yield self._dashboard()
        with small_cluster() as cluster:
            nodes = "--format", "json"
            yield self._try(Step("cluster check", (cluster.address, *nodes), lambda ended: len(ended.data) == 3))

    def _try(self, step: Step) -> Tried:
        began = time.monotonic()
        with self._started(step.word, *step.options) as process:
            return judged(step, process, began)

    def _batch(self) -> Iterator[Tried]:
        """Carry the plan out, and cancel one of its cells meanwhile."""
        began = time.monotonic()
        # A cell that is not accepted, whyever, is exit code 1.
        ran = Step("batch run", ("plan.toml",), lambda ended: "1 of 2 cells accepted" in ended.stdout, 1)
        left_out = Step(
            "batch cancel",
            ("other-llvm", "plan.toml"),
            lambda ended: "other-llvm of night is cancelled" in ended.stdout,
        )
        with self._started(ran.word, *ran.options) as process:
            while process.poll() is None and not self._begun():
                time.sleep(0.2)
            yield self._try(left_out)
            yield judged(ran, process, began)

    def _begun(self) -> bool:
        """Return whether the database knows the plan."""
        with self._database() as database:
            return bool(list_batches(database))

    def _database(self) -> TuningDatabase:
        return TuningDatabase.open(self._root / "tuning.db", mode=Mode.READ_ONLY, create=False)

    def _dashboard(self) -> Tried:
        """Ask the dashboard for one page, and end it with Ctrl-C."""
        began = time.monotonic()
        step = Step("dashboard", ("--port", "0", "--db", "tuning.db"), lambda _: "night" in page)
        page = ""
        with self._started(step.word, *step.options) as process:
            assert process.stderr is not None
            line = process.stderr.readline()
            if found := re.search(r"http://\S+", line):
                with urllib.request.urlopen(found[0], timeout=ENDS_WITHIN_S) as answer:
                    page = answer.read().decode()
            process.send_signal(signal.SIGINT)
            return judged(step, process, began)

    @contextmanager
    def _started(self, word: str, *options: str) -> Iterator[subprocess.Popen[str]]:
        with subprocess.Popen(
            [self._program, *word.split(), *options], cwd=self._root, env=self._environment, text=True,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        ) as process:  # fmt: skip
            try:
                yield process
            finally:
                process.kill()


def judged(step: Step, process: subprocess.Popen[str], began: float) -> Tried:
    """Wait for a word and return how it ended."""
    try:
        out, err = process.communicate(timeout=ENDS_WITHIN_S)
    except subprocess.TimeoutExpired:
        return Tried(step.word, None, time.monotonic() - began, "it has not ended")
    seconds, ended = time.monotonic() - began, Ended(process.returncode, out, err)
    told = f"\n{out[-2000:]}\n{err[-2000:]}"
    if "Traceback" in err:
        fault = f"it wrote a traceback{told}"
    elif ended.code != step.code:
        fault = f"exit code {ended.code}, expected {step.code}{told}"
    else:
        fault = "" if step.holds(ended) else f"it does not say what it should{told}"
    return Tried(step.word, ended.code, seconds, fault)


def save_models(root: Path) -> None:
    """Write a model of the zoo as two files, the second with other weights, inputs for them, and a decoder."""
    model = load_model(_MODEL)
    onnx.save(model.proto, root / "model.onnx")
    for tensor in model.proto.graph.initializer:
        array = numpy_helper.to_array(tensor)
        if array.ndim == 2 and array.dtype == np.float32:
            tensor.CopyFrom(numpy_helper.from_array(array * np.float32(1.25), tensor.name))
    onnx.save(model.proto, root / "other.onnx")
    np.savez(root / "x.npz", **random_inputs(model, seed=0))
    relaxtune.compile(_DECODER, root / "decoder", target="llvm", generate=True, max_length=64, samples=0)


def before_the_batch() -> list[Step]:
    """Return the steps of one model, from its file to a tag."""
    json_, db = ("--format", "json"), ("--db", "tuning.db")
    kept = ("--store", "store", *db)
    model, first, second = "model.onnx", "out/tuned", "out/plain"
    few = ("--target", "llvm", "--samples", "1", *json_)
    quick = ("--max-slowdown", "900%", "--seconds", "0.5", *json_)
    return [
        Step("doctor", json_, lambda ended: all(one["status"] == "ok" for one in ended.data if one["required"])),
        Step("inspect", (model, "--target", "llvm", *json_), lambda ended: len(ended.data["tasks"]) > 3),
        Step("db init", ("--db", "empty.db", *json_), lambda ended: "schema_revision" in ended.stdout),
        Step(
            "tune", (model, "--trials", "12", *db, "--out", first, *few),
            lambda ended: ended.data["tuning"] and ended.data["validation"]["passed"] and ended.data["benchmark"],
        ),
        Step(
            "calibrate", (model, "--data", "x.npz", "--out", "ranges.json", *json_),
            lambda ended: ended.data["ranges"],
        ),
        Step(
            "compile", (model, "--disable-pass", "combine_matmuls", "--out", second, *few),
            lambda ended: ended.data["validation"]["passed"],
        ),
        Step("validate", (first, *json_), _passed),
        Step("run", (first, "--inputs", "x.npz", "--outputs", "y.npz", *json_), lambda ended: ended.data),
        Step(
            "generate", ("decoder", "--ids", "1,938,251", "--max-new-tokens", "5", *json_),
            lambda ended: len(ended.data["tokens"]) == 5,
        ),
        Step(
            "embed", ("decoder", "plan.toml"),
            lambda ended: "generates tokens" in ended.stderr, 2,
        ),
        Step("compare", (first, "y.npz", "--inputs", "x.npz", "--exact", *json_), _passed),
        Step("bench", (first, "--runs", "5", *json_), lambda ended: {a["name"] for a in ended.data["arms"]} >= {"ort"}),
        Step("report", (first, *db, *json_), lambda ended: ended.data["kernels"]),
        Step("gate", (first, "--baseline", second, *quick), _passed),
        Step("artifact tag", ("prod", "--to", second, *kept, *json_), lambda ended: ended.data[0]["kind"] == "tag"),
        Step(
            "artifact promote", (first, "prod", *kept, *quick), lambda ended: ended.data[0]["kind"] == "promote"
        ),
        Step("artifact list", (*kept, *json_), lambda ended: [one["tags"] for one in ended.data].count(["prod"]) == 1),
        Step("artifact rollback", ("prod", *kept, *json_), lambda ended: ended.data[0]["kind"] == "rollback"),
        Step("artifact show", ("prod", *kept, *json_), lambda ended: len(ended.data["history"]) == 3),
        Step("artifact fetch", ("prod", "--store", "store", "--out", "out/fetched", *json_), lambda ended: ended.data),
        Step(
            "artifact export-ep",
            ("prod", "out/onnxruntime", "--store", "store", *json_),
            lambda ended: Path(ended.data["library"]).name == "librelaxtune_onnxruntime.so",
        ),
        Step("artifact gc", ("--older-than", "0", *kept, *json_), lambda ended: len(ended.data["removed"]) == 1),
        Step("artifact rebuild", (first, *db, *json_), lambda ended: ended.data["same"]),
        Step(
            "artifact refit", (first, "--weights", "other.onnx", "--out", "out/refitted", *json_),
            lambda ended: ended.data["validation_passed"] and ended.data["changed"],
        ),
        Step("batch plan", ("plan.toml", *json_), lambda ended: len(ended.data["cells"]) == 2),
    ]  # fmt: skip


def after_the_batch(root: Path, job: str, record: str) -> list[Step]:
    """Return the steps that ask what a batch and a database hold, a job and a record among it, and move records."""
    json_, db = ("--format", "json"), ("--db", "tuning.db")
    asked = (*db, *json_)
    other = ("--db", "other.db", *json_)
    return [
        Step("batch resume", ("night", "--retry", *db), lambda ended: "2 of 2 cells accepted" in ended.stdout),
        Step(
            "batch status", ("night", *asked), lambda ended: [c["status"] for c in ended.data["cells"]] == ["done"] * 2
        ),
        Step("batch watch", ("night", *db), lambda ended: "accepted" in ended.stdout),
        Step("batch report", ("night", "--out", "night.html", *db), lambda _: "</html>" in _text(root / "night.html")),
        Step("db batches", asked, lambda ended: [one["name"] for one in ended.data] == ["night"]),
        Step("db artifacts", asked, lambda ended: any(one["benchmarks"] for one in ended.data)),
        Step("db info", asked, lambda ended: ended.data["records_by_status"]["ok"] > 0),
        Step("db jobs", asked, _data),
        Step("db cost", (job, *asked), _data),
        Step("db top", asked, lambda ended: all(one["best"] for one in ended.data) and ended.data),
        Step("db query", asked, _data),
        Step("db workloads", asked, _data),
        Step("db history", asked, _data),
        Step("db failures", asked, lambda ended: isinstance(ended.data, list)),
        Step("db coverage", ("model", *asked), lambda ended: any(one["covered"] for one in ended.data)),
        Step("db regressions", ("--split-at", "2026-01-01", *asked), lambda ended: isinstance(ended.data, list)),
        Step("db explain", ("model.onnx", "--target", "llvm", *asked), lambda ended: ended.data["kernels"]),
        Step("db export", ("records.jsonl", *asked), _data),
        Step("db import", ("records.jsonl", *other), lambda ended: ended.data["new_records"] > 0),
        Step("db merge", ("tuning.db", *other), lambda ended: ended.data["new_records"] == 0),
        Step("db bundle", ("out/tuned", "--out", "bundle.db", *asked), _data),
        Step("db delete", (record, *other), lambda ended: ended.data["removed"] == 1),
        Step("db prune", ("--keep", "1", *other), lambda ended: ended.data["left"] > 0),
        Step("db upgrade", asked, lambda ended: ended.data["before"] == ended.data["after"]),
    ]


def _data(ended: Ended) -> object:
    return ended.data


def _passed(ended: Ended) -> object:
    return ended.data["passed"]


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8") if path.exists() else ""


def words_with_a_step() -> list[str]:
    """Return the words that are run."""
    steps = [*before_the_batch(), *after_the_batch(Path(), "", "")]
    return [*(one.word for one in steps), "batch run", "batch cancel", "dashboard", "cluster check"]


def main() -> None:
    """Run all words; exit 1 when any found a fault or was not run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--relaxtune", type=Path, default=Path(sys.executable).with_name("relaxtune"))
    parser.add_argument("--out", type=Path, help="JSON file of what was found")
    asked = parser.parse_args()
    tried = []
    with tempfile.TemporaryDirectory(prefix="words-") as folder:
        for one in Words(asked.relaxtune.absolute(), Path(folder)).run():
            tried.append(one)
            print(f"{one.word:18} {one.code!s:>4} {one.seconds:6.1f} s {one.fault or 'ok'}", flush=True)
    left = sorted(set(all_words()) - {one.word for one in tried})
    if asked.out is not None:
        asked.out.write_text(json.dumps({"words": [asdict(one) for one in tried], "not_run": left}, indent=1))
    print(f"{len(tried)} words in {sum(one.seconds for one in tried):.0f} s; not run: {', '.join(left) or 'none'}")
    sys.exit(1 if left or any(one.fault for one in tried) else 0)


if __name__ == "__main__":
    main()
