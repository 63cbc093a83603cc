"""Kills runs of `relaxtune tune` at random moments, and checks after each that nothing was lost, doubled or invented.

    python -m tests.guardrails.kills --rounds 200 --database sqlite --out kills.json

Each round tunes a small model into the same database and disturbs the run: its main process or its whole group is
killed (SIGKILL), one of its workers is, its temporary folder is on a full disk, or its database goes away (a PostgreSQL
server is restarted, a SQLite file is locked by another writer). After the round the database must open and be whole,
hold no failed record and no record twice, and the artifact must be whole or absent. A run that lost only workers or its
server must end as if nothing had happened. Every tenth round is left alone, and must leave no temporary folder behind.

Children are forked from one process that has imported everything, so that a round takes seconds. Mounting a full disk
takes root; without, such rounds limit the size of files instead.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import os
import random
import resource
import shutil
import signal
import sqlite3
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper
from sqlalchemy import text

from relaxtune.pipeline import temporary
from relaxtune.pipeline.artifact.module import Module
from relaxtune.pipeline.cli.app import main as relaxtune
from relaxtune.pipeline.jobs.compile_and_tune import tune_model  # noqa: F401  # imported before the first fork
from relaxtune.tuning_db.records import Mode, Status
from relaxtune.tuning_db.store import TuningDatabase
from tests.tuning_db.postgres_server import Server, restartable_server

TRIALS = 6
# More than a whole run takes on a busy machine.
ENDS_WITHIN_S = 180.0
WORKERS_END_WITHIN_S = 15.0
DISTURBANCES = ("main", "group", "worker", "full disk", "database")
CALM = "none"


@dataclass(frozen=True)
class Round:
    """What was done to one run, and what was found after it; `faults` is empty where all is well."""

    number: int
    disturbance: str
    moment_s: float
    seconds: float
    exit_code: int
    records: int
    faults: tuple[str, ...]


@dataclass(frozen=True)
class Place:
    """The folders of all rounds."""

    root: Path

    @property
    def model(self) -> Path:
        return self.root / "model.onnx"

    @property
    def out(self) -> Path:
        return self.root / "out" / "artifact"

    @property
    def temporary(self) -> Path:
        return self.root / "tmp"


def save_model(path: Path) -> None:
    """Write a model of two kernels that take the search a moment."""
    weight = numpy_helper.from_array(np.ones((32, 32), np.float32), "w")
    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, [8, 32]) for name in "xy")
    nodes = [helper.make_node("MatMul", ["x", "w"], ["p"]), helper.make_node("Softmax", ["p"], ["y"])]
    graph = helper.make_graph(nodes, "g", [x], [y], [weight])
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9), path)


def fork(work: Callable[[], None], log: Path | None = None) -> int:
    """Return the process that does some work in a group of its own, its output in a file."""
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        os.setsid()
        if log is not None:
            descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(descriptor, 1)
            os.dup2(descriptor, 2)
            faulthandler.register(signal.SIGUSR1, file=descriptor)
        work()
        code = 0
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        # What a run does on its way out of the interpreter belongs to it.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def wait(child: int, within_s: float = ENDS_WITHIN_S) -> int | None:
    """Return the exit code of a child, negative for a signal; None when it has not ended in time."""
    end = time.monotonic() + within_s
    while time.monotonic() < end:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.02)
    return None


def processes_of(place: Place) -> list[int]:
    """Return the processes of runs: the only ones that know the rounds' temporary folder."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        with suppress(OSError, ValueError):
            known = f"TMPDIR={place.temporary}".encode() in (path / "environ").read_bytes().split(b"\0")
            running = (path / "stat").read_text().rsplit(")", 1)[1].split()[0] not in "ZX"
            if known and running and int(path.name) != os.getpid():
                found.append(int(path.name))
    return found


class Kills:
    """The rounds over one database.

    Parameters
    ----------
    place
        Folders of its own.
    url
        The database.
    server
        Its server, None for SQLite.
    seed
        Of what is done to runs, and when.
    """

    def __init__(self, place: Place, url: str, server: Server | None, seed: int) -> None:
        self._place, self._url, self._server = place, url, server
        self._random = random.Random(seed)
        self._run_s = 0.0
        self._told: set[str] = set()
        place.temporary.mkdir(parents=True)
        place.out.parent.mkdir()
        save_model(place.model)

    def rounds(self, count: int) -> Iterator[Round]:
        """Yield rounds as they end: first one that is left alone, whose time is the range of the others' moments."""
        yield self._round(0, CALM)
        self._run_s *= 1.1
        for number in range(1, count + 1):
            yield self._round(number, self._random.choice(DISTURBANCES))
            if number % 10 == 0:
                self._age_what_is_left()
                yield self._round(number, CALM)

    def _round(self, number: int, disturbance: str) -> Round:
        began = time.monotonic()
        moment_s = self._random.uniform(0.0, self._run_s)
        log = self._place.root / "log.txt"
        with ExitStack() as stack:
            full = stack.enter_context(self._full_disk()) if disturbance == "full disk" else None
            child = fork(lambda: self._tune(number, limited=full is False), log)
            code = self._disturb(disturbance, child, moment_s)
            faults = [] if code is not None else [f"it has not ended after {ENDS_WITHIN_S:g} s"]
            if code is None:
                # It writes to the log where each of its threads stands.
                os.kill(child, signal.SIGUSR1)
                time.sleep(1.0)
                os.killpg(child, signal.SIGKILL)
                wait(child)
            faults += self._left_processes()
        self._run_s = self._run_s or time.monotonic() - began
        told = log.read_text(errors="replace")
        if code is None:
            faults.append(told[-3000:])
        if "Traceback" in told:
            faults.append(f"traceback: {told[told.index('Traceback') :][:3000]}")
        goes_on = disturbance in {CALM, "worker", "database"}
        if goes_on and code != 0:
            faults.append(f"exit code {code}: {told[-1500:]}")
        records, wrong = self._check_database()
        faults += [*wrong, *self._check_artifact(required=goes_on)]
        if disturbance == CALM:
            faults += self._check_folders()
        # A record that is wrong stays in the database: it is the fault of one round.
        faults = [fault for fault in faults if fault not in self._told]
        self._told.update(faults)
        return Round(number, disturbance, moment_s, time.monotonic() - began, code or 0, records, tuple(faults))

    def _tune(self, number: int, *, limited: bool) -> None:
        os.environ["TMPDIR"] = str(self._place.temporary)
        tempfile.tempdir = None
        temporary._swept.clear()
        if limited:
            size = random.Random(number).randrange(2_000, 200_000)
            resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))
        words = ["tune", self._place.model, "--target", "llvm", "--db", self._url, "--trials", TRIALS, "--seed", number,
                 "--mode", "force", "--samples", 1, "--workers", 2, "--build-timeout", 120, "--run-timeout", 120,
                 "--out", self._place.out]  # fmt: skip
        relaxtune([str(word) for word in [*words, *(["--no-bench"] if number % 2 else [])]])

    def _disturb(self, disturbance: str, child: int, moment_s: float) -> int | None:
        """Do to a run what is to be done to it; return its exit code."""
        if disturbance in {CALM, "full disk"}:
            return wait(child)
        code = wait(child, moment_s)
        if code is not None:
            return code
        if disturbance == "main":
            os.kill(child, signal.SIGKILL)
        elif disturbance == "group":
            os.killpg(child, signal.SIGKILL)
        elif disturbance == "worker":
            workers = [process for process in processes_of(self._place) if process != child]
            if workers:
                with suppress(ProcessLookupError):
                    os.kill(self._random.choice(workers), signal.SIGKILL)
        elif self._server is not None:
            self._server.stop()
            time.sleep(self._random.uniform(0.0, 2.0))
            self._server.start()
        else:
            self._lock_file(self._random.uniform(0.0, 3.0))
        return wait(child)

    def _lock_file(self, seconds: float) -> None:
        with sqlite3.connect(self._url, isolation_level=None, timeout=30) as other:
            other.execute("BEGIN IMMEDIATE")
            time.sleep(seconds)
            other.execute("ROLLBACK")
        other.close()

    @contextmanager
    def _full_disk(self) -> Iterator[bool]:
        """Put the temporary folder on a disk of a few kilobytes; False where this process may not."""
        size = self._random.choice([16, 64, 128, 256, 512, 1024])
        mount = ["mount", "-t", "tmpfs", "-o", f"size={size}k", "tmpfs", str(self._place.temporary)]
        mounted = os.geteuid() == 0 and subprocess.run(mount, capture_output=True, check=False).returncode == 0
        try:
            yield mounted
        finally:
            if mounted:
                subprocess.run(["umount", "-l", str(self._place.temporary)], check=True)

    def _left_processes(self) -> list[str]:
        end = time.monotonic() + WORKERS_END_WITHIN_S
        while (left := processes_of(self._place)) and time.monotonic() < end:
            time.sleep(0.05)
        for process in left:
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        return [f"{len(left)} processes live {WORKERS_END_WITHIN_S:g} s after the run"] if left else []

    def _check_database(self) -> tuple[int, list[str]]:
        """Return how many records there are, and what is wrong with them."""
        faults = []
        if self._server is None and not Path(self._url).exists():
            return 0, []
        with TuningDatabase.open(self._url, mode=Mode.READ_ONLY, create=False) as database:
            records = database.list_records()
            failed = [one for one in records if one.status is not Status.OK]
            if self._server is None:
                whole = database.read(lambda session: session.execute(text("PRAGMA integrity_check")).scalar_one())
                faults += [] if whole == "ok" else [f"integrity_check: {whole}"]
            for job in database.list_jobs():
                database.list_job_tasks(job.id)
        faults += [f"record {one.id} is {one.status}: {one.error}" for one in failed]
        measured = Counter((r.workload_hash, r.route, r.decision, r.latencies_us) for r in records)
        faults += [f"{count} times the same measurement: {one}" for one, count in measured.items() if count > 1]
        return len(records), faults

    def _check_artifact(self, *, required: bool) -> list[str]:
        out = self._place.out
        if not out.exists():
            return ["no artifact"] if required else []
        log = self._place.root / "load.txt"
        # In a process of its own: this one forks, so it keeps free of the runtime's threads.
        code = wait(fork(lambda: self._load(out), log))
        return [] if code == 0 else [f"the artifact does not load: {log.read_text()[-1500:]}"]

    def _load(self, out: Path) -> None:
        module = Module.load(out)
        module.run({"x": np.ones((8, 32), np.float32)})

    def _age_what_is_left(self) -> None:
        """Make what killed runs left as old as it must be to be swept."""
        for path in [*self._place.temporary.iterdir(), *self._place.out.parent.iterdir()]:
            os.utime(path, (time.time() - 3600, time.time() - 3600), follow_symlinks=False)

    def _check_folders(self) -> list[str]:
        ours = [path.name for path in self._place.temporary.iterdir()]
        beside = [path.name for path in self._place.out.parent.iterdir() if path != self._place.out]
        return [f"left behind: {', '.join(sorted([*ours, *beside]))}"] if ours or beside else []


def run(database: str, rounds: int, seed: int) -> Iterator[Round]:
    """Yield the rounds on a new database of a kind, `sqlite` or `postgresql`."""
    root = Path(tempfile.mkdtemp(prefix="kills-"))
    try:
        with ExitStack() as stack:
            server = stack.enter_context(restartable_server(durable=True)) if database == "postgresql" else None
            url = str(root / "tuning.db") if server is None else server.url
            yield from Kills(Place(root), url, server, seed).rounds(rounds)
    finally:
        shutil.rmtree(root, ignore_errors=True)


def summary(found: Sequence[Round]) -> dict[str, object]:
    """Return the rounds, and how many there were of each kind, as plain JSON data."""
    return {
        "rounds": len(found),
        "disturbed": dict(Counter(one.disturbance for one in found)),
        "seconds": sum(one.seconds for one in found),
        "records": found[-1].records if found else 0,
        "with_faults": [asdict(one) for one in found if one.faults],
        "each": [asdict(one) for one in found],
    }


def main() -> None:
    """Run the rounds that the command line asks for; exit 1 when any found a fault."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--database", choices=["sqlite", "postgresql"], default="sqlite")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="JSON file of all rounds")
    asked = parser.parse_args()
    found: list[Round] = []
    for one in run(asked.database, asked.rounds, asked.seed):
        found.append(one)
        if one.faults:
            print(
                f"{asked.database} round {one.number}, {one.disturbance} at {one.moment_s:.1f} s:",
                *one.faults,
                sep="\n",
            )
        if asked.out is not None:
            asked.out.write_text(json.dumps(summary(found), indent=1))
    told = summary(found)
    print(json.dumps({name: value for name, value in told.items() if name not in {"each", "with_faults"}}))
    sys.exit(1 if told["with_faults"] else 0)


if __name__ == "__main__":
    main()
