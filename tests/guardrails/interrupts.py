"""Sends Ctrl-C or SIGTERM to commands at random moments from their start to their end, and checks how each ends.

    python -m tests.guardrails.interrupts --rounds 200 --out interrupts.json

A command ends within 30 s of the signal: with exit code 130 and no artifact, or with 0 and a whole one. 130 with a
whole artifact is counted apart: the signal came when the artifact was in place and the command had not said so yet. It
writes no traceback, and leaves no process and no file. One that native code did not give back is ended at once and may
leave files, which the next run sweeps. Every fourth round sends a second signal half a second later.

A signal that comes before Python runs the first line of the command ends it as any program: nothing has begun. The
rounds wait for that line. Commands start warm (see `tests.warm_python`); `--cold` starts them afresh.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from relaxtune.pipeline.artifact.module import Module
from relaxtune.tuning_db.records import Mode
from relaxtune.tuning_db.store import TuningDatabase
from tests import warm_python
from tests.guardrails.kills import ENDS_WITHIN_S, WORKERS_END_WITHIN_S, Place, fork, save_model, wait

ENDS_AFTER_SIGNAL_S = 30.0
SECOND_AFTER_S = 0.5
# It writes where each of its threads stands when it does not end.
_PROGRAM = """
import faulthandler, signal
faulthandler.register(signal.SIGUSR1)
from relaxtune.pipeline.cli import main
main()
"""
WHOLE_BUT_INTERRUPTED = "130 with a whole artifact"
_ENDED_AT_ONCE = "the process ends at once"
_PR_SET_CHILD_SUBREAPER = 36
_PLAN = """\
name = "interrupts"
database = "batch.db"
out = "out/batch"
samples = 1
[budget]
candidates = 6
[defaults]
targets = ["llvm"]
[[cells]]
models = ["model.onnx"]
"""


@dataclass(frozen=True)
class Round:
    """One command, what it was sent when, and how it ended; `faults` is empty where all is well."""

    number: int
    word: str
    sent: tuple[str, ...]
    moment_s: float
    ended_after_s: float
    outcome: str
    faults: tuple[str, ...]


class Interrupts:
    """The rounds of all words.

    Parameters
    ----------
    root
        A folder of its own.
    seed
        Of what is sent, and when.
    cold
        Whether commands start afresh.
    """

    def __init__(self, root: Path, seed: int, *, cold: bool) -> None:
        self._place = place = Place(root)
        self._random = random.Random(seed)
        self._popen: type[subprocess.Popen] = subprocess.Popen if cold else warm_python.Popen
        place.temporary.mkdir(parents=True)
        place.out.parent.mkdir()
        save_model(place.model)
        (root / "plan.toml").write_text(_PLAN)
        self._artifact = root / "made" / "artifact"
        self._artifact.parent.mkdir()
        self._words = self._commands()

    def _commands(self) -> dict[str, list[str]]:
        place, root = self._place, self._place.root
        model, out, made = str(place.model), ["--out", str(place.out)], str(self._artifact)
        few = ["--samples", "1", "--target", "llvm"]
        effort = ["--trials", "6", "--mode", "force", "--workers", "2", "--db", str(root / "tuning.db")]
        return {
            "compile": ["compile", model, *few, *out],
            "tune": ["tune", model, *few, *effort, *out],
            "validate": ["validate", made, "--model", model],
            "inspect": ["inspect", model, "--target", "llvm"],
            "bench": ["bench", made, "--model", model],
            "report": ["report", made],
            "batch": ["batch", "run", str(root / "plan.toml")],
            "db": ["db", "history", "--db", str(root / "tuning.db")],
        }

    def rounds(self, count: int, words: Sequence[str]) -> Iterator[Round]:
        """Yield rounds as they end: first one of each word that is left alone, whose time is the range of moments."""
        made = ["compile", str(self._place.model), "--samples", "1", "--target", "llvm", "--out", str(self._artifact)]
        with TuningDatabase.open(self._place.root / "tuning.db"):
            self._end(self._start(made), None)
        takes_s = {}
        for word in words:
            calm = self._round(0, word, (), 0.0)
            takes_s[word] = calm.ended_after_s
            yield calm
        for number in range(1, count + 1):
            word = words[number % len(words)]
            kinds = [self._random.choice([signal.SIGINT, signal.SIGTERM]) for _ in range(2 if number % 4 == 0 else 1)]
            found = self._round(number, word, kinds, self._random.uniform(0.0, takes_s[word]))
            if not found.sent:
                # It was over before: the machine is less busy than it was.
                takes_s[word] = found.ended_after_s
            yield found

    def _start(self, words: Sequence[str]) -> subprocess.Popen:
        environment = {**os.environ, "TMPDIR": str(self._place.temporary)}
        with (self._place.root / "log.txt").open("w") as log:
            process = self._popen(
                [sys.executable, "-c", _PROGRAM, *words], stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                env=environment, start_new_session=True,
            )  # fmt: skip
        # What a command leaves becomes a child of this process.
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        return process

    def _end(self, process: subprocess.Popen, within_s: float | None) -> int | None:
        """Return an exit code; None where the process did not end and was killed."""
        try:
            return process.wait(ENDS_WITHIN_S if within_s is None else within_s)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGUSR1)
            time.sleep(1.0)
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            return None

    def _round(self, number: int, word: str, kinds: Sequence[signal.Signals], moment_s: float) -> Round:
        self._clear()
        process = self._start(self._words[word])
        while process.poll() is None and not _heeds(process.pid, signal.SIGTERM):
            time.sleep(0.002)
        began = time.monotonic()
        with suppress(subprocess.TimeoutExpired):
            process.wait(moment_s)
        sent = []
        for kind in kinds:
            if process.poll() is None:
                process.send_signal(kind)
                sent.append(kind.name)
                with suppress(subprocess.TimeoutExpired):
                    process.wait(SECOND_AFTER_S)
        code = self._end(process, ENDS_AFTER_SIGNAL_S if sent else None)
        seconds = time.monotonic() - began
        told = (self._place.root / "log.txt").read_text(errors="replace")
        outcome = str(code)
        faults = [] if code is not None else [f"it has not ended: {told[-4000:]}"]
        if code is not None and code not in ({0, 130} if sent else {0}):
            faults.append(f"exit code {code}: {told[-1500:]}")
        if "Traceback" in told or "Exception ignored" in told:
            faults.append(f"traceback: {told[:3000]}")
        faults += self._left_processes()
        out = self._place.out
        if out.exists():
            faults += self._check_artifact(out)
            outcome = WHOLE_BUT_INTERRUPTED if code == 130 else outcome
        elif code == 0 and word in {"compile", "tune"}:
            faults.append("no artifact")
        if _ENDED_AT_ONCE in told:
            outcome += ", ended at once"
        else:
            faults += self._left_files()
        if word == "tune":
            with TuningDatabase.open(self._place.root / "tuning.db", mode=Mode.READ_ONLY, create=False) as database:
                database.list_records()
        return Round(number, word, tuple(sent), moment_s, seconds, outcome, tuple(faults))

    def _clear(self) -> None:
        """Let no round see what another left."""
        for folder in (self._place.temporary, self._place.out.parent):
            shutil.rmtree(folder)
            folder.mkdir()

    def _left_processes(self) -> list[str]:
        end = time.monotonic() + WORKERS_END_WITHIN_S
        while (left := _children()) and time.monotonic() < end:
            time.sleep(0.05)
        for process in left:
            os.kill(process, signal.SIGKILL)
        return [f"{len(left)} processes live {WORKERS_END_WITHIN_S:g} s after the command"] if left else []

    def _check_artifact(self, out: Path) -> list[str]:
        log = self._place.root / "load.txt"
        code = wait(fork(lambda: _load(out), log))
        return [] if code == 0 else [f"the artifact does not load: {log.read_text()[-1500:]}"]

    def _left_files(self) -> list[str]:
        known = {self._place.out.name, "batch"}
        left = [str(path.relative_to(self._place.temporary)) for path in self._place.temporary.rglob("*")]
        left += [path.name for path in self._place.out.parent.iterdir() if path.name not in known]
        return [f"left behind: {', '.join(sorted(left))}"] if left else []


def _load(out: Path) -> None:
    Module.load(out).run({"x": np.ones((8, 32), np.float32)})


def _heeds(pid: int, number: signal.Signals) -> bool:
    """Return whether a process has a handler of a signal."""
    with suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("SigCgt:"):
                return bool(int(line.split()[1], 16) >> (number - 1) & 1)
    return False


def _children() -> list[int]:
    """Return the processes that are this one's, the server of warm ones aside; what has ended is reaped."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            state, parent = (path / "stat").read_text().rsplit(")", 1)[1].split()[:2]
            if int(parent) != os.getpid() or int(path.name) in warm_python.server_pids():
                continue
            if state == "Z":
                os.waitpid(int(path.name), 0)
            else:
                found.append(int(path.name))
    return found


def run(rounds: int, seed: int, words: Sequence[str], *, cold: bool) -> Iterator[Round]:
    """Yield the rounds."""
    root = Path(tempfile.mkdtemp(prefix="interrupts-"))
    try:
        yield from Interrupts(root, seed, cold=cold).rounds(rounds, words)
    finally:
        shutil.rmtree(root, ignore_errors=True)


def summary(found: Sequence[Round]) -> dict[str, object]:
    """Return the rounds, and how many there were of each kind, as plain JSON data."""
    sent = [one for one in found if one.sent]
    return {
        "rounds": len(found),
        "interrupted": dict(Counter(one.word for one in sent)),
        "signals": dict(Counter("+".join(one.sent) for one in sent)),
        "outcomes": dict(Counter(f"{one.word}: {one.outcome}" for one in sent)),
        "seconds": round(sum(one.ended_after_s for one in found)),
        "slowest_s": round(max(one.ended_after_s - one.moment_s for one in sent), 1) if sent else None,
        "with_faults": [asdict(one) for one in found if one.faults],
    }


def main() -> None:
    """Run the rounds that the command line asks for; exit 1 when any found a fault."""
    words = ["tune", "compile", "validate", "inspect", "bench", "report", "batch", "db"]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--words", nargs="+", choices=words, default=words)
    parser.add_argument("--cold", action="store_true")
    parser.add_argument("--out", type=Path, help="JSON file of what was found")
    asked = parser.parse_args()
    found: list[Round] = []
    for one in run(asked.rounds, asked.seed, asked.words, cold=asked.cold):
        found.append(one)
        if one.faults:
            print(
                f"round {one.number}, {one.word}, {one.sent} at {one.moment_s:.2f} s:",
                *one.faults,
                sep="\n",
                flush=True,
            )
        if asked.out is not None:
            asked.out.write_text(json.dumps(summary(found), indent=1))
    told = summary(found)
    print(json.dumps({name: value for name, value in told.items() if name != "with_faults"}))
    sys.exit(1 if told["with_faults"] else 0)


if __name__ == "__main__":
    main()
