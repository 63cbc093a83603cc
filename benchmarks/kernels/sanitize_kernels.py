"""Kernels of every template under compute-sanitizer: the GPU tests of `tests/schedules`, with each tool.

    python -m benchmarks.kernels.sanitize_kernels [--tools memcheck racecheck synccheck] [--cases REGEX]
        [--out FILE.json]

The tests run kernels at odd shapes (ones, primes, nothing that a tile divides) on fresh random inputs (20 for those of
templates, one for candidates that a search draws), into outputs full of NaN, and compare them with NumPy. A run has a
few tests of one file; as many runs as the CPU has cores go side by side on one GPU, and what has ended is in the file
already. Needs compute-sanitizer (CUDA's toolkit) and pytest.
Exits with 1 when a tool found anything, a test failed, or some did not run.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from itertools import groupby
from pathlib import Path
from xml.etree import ElementTree

import psutil

from benchmarks.gpu_arms.results import machine

ROOT = Path(__file__).parents[2]
RESULTS = Path(__file__).parents[1] / "results" / "gpu-sanitizer.json"
# The slowest first, so that none of its runs is left for the end.
TOOLS = ("racecheck", "memcheck", "synccheck")
# Tests of a run: enough that imports are a small part of it, few enough that all cores have work until the end.
_RUN_SIZE = 5
_SUMMARY = re.compile(r"(?:ERROR|RACECHECK) SUMMARY: .*")
_FOUND = re.compile(r"SUMMARY: (\d+) (?:errors?|hazards? displayed)")
# Of the libraries that NumPy multiplies with: the processes have a core each.
_THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")


@dataclass(frozen=True)
class Outcome:
    """Of some tests under one tool.

    Attributes
    ----------
    passed, failed
        Tests; those of a run that did not come to an end have failed, skipped ones count as neither.
    found
        Errors or hazards that the tool reports; None where it did not come to an end.
    summary
        The tool's own last line.
    seconds
        Wall time.
    """

    passed: int
    failed: int
    found: int | None
    summary: str
    seconds: float

    @property
    def clean(self) -> bool:
        """Whether tests ran, all passed, and the tool found nothing."""
        return self.passed > 0 and self.failed == 0 and self.found == 0

    def __add__(self, other: Outcome) -> Outcome:
        """Return the outcome of both runs; its summary is of the worse one."""
        found = None if self.found is None or other.found is None else self.found + other.found
        worse = self if (self.found is None or (other.found is not None and self.found > other.found)) else other
        seconds = round(self.seconds + other.seconds, 1)
        return Outcome(self.passed + other.passed, self.failed + other.failed, found, worse.summary, seconds)


def gpu_tests(cases: str) -> list[str]:
    """Return pytest's names of the kernels' GPU tests; kernels of vendors' libraries are not ours to sanitise.

    Parameters
    ----------
    cases : str
        What pytest's -k takes; all tests where empty.
    """
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-m", "gpu", "-p", "no:cacheprovider"]
    command += ["-k", cases] if cases else []
    command += ["tests/schedules", "--ignore=tests/schedules/libraries"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    return [line for line in listed.stdout.splitlines() if line.startswith("tests/") and "::" in line]


def runs_of(tests: Sequence[str], size: int = _RUN_SIZE) -> list[tuple[str, ...]]:
    """Return the tests in runs of so many, each of one file; neighbours, which may be alike, are in different ones."""
    runs = []
    for _, of_file in groupby(tests, key=_file):
        names = list(of_file)
        count = -(-len(names) // size)
        runs += [tuple(names[start::count]) for start in range(count)]
    return runs


def sanitize(tests: Sequence[str], tool: str, stem: Path, *, timeout_s: float) -> Outcome:
    """Run tests under a tool.

    Parameters
    ----------
    tests : Sequence[str]
        By pytest's names.
    stem : Path
        The run's output and reports go beside it, with endings of their own.
    timeout_s : float
        Seconds after which the run is ended; it is not clean then.
    """
    report, junit = stem.with_suffix(".txt"), stem.with_suffix(".xml")
    command = ["compute-sanitizer", "--tool", tool, "--target-processes", "application-only", "--print-limit", "5"]
    # A process that comes to its first CUDA call later than this, 10 s if nothing is said, waits there for ever.
    command += ["--launch-timeout", str(math.ceil(timeout_s))]
    # The driver's answers to questions about what it can do count as errors otherwise.
    command += ["--report-api-errors", "no"] if tool == "memcheck" else []
    command += ["--log-file", str(report), sys.executable, "-m", "pytest", "-m", "gpu", "-q", "-p", "no:cacheprovider"]
    command += [f"--junitxml={junit}", *tests]
    environment = {**os.environ, **dict.fromkeys(_THREADS, "1")}
    start = time.perf_counter()
    with stem.with_suffix(".log").open("w", encoding="utf-8") as log:
        process = psutil.Popen(command, cwd=ROOT, env=environment, stdout=log, stderr=log)
        try:
            process.wait(timeout_s)
        except psutil.TimeoutExpired:
            # With the tests' process, which the tool alone would leave behind.
            for one in (*process.children(recursive=True), process):
                with contextlib.suppress(psutil.NoSuchProcess):
                    one.kill()
            process.wait()
            print(f"{stem.name}: stopped after {timeout_s:.0f} s", file=sys.stderr)
    seconds = time.perf_counter() - start
    passed, failed = _counts(junit) if junit.is_file() else (0, len(tests))
    lines = _SUMMARY.findall(report.read_text(encoding="utf-8", errors="replace")) if report.is_file() else []
    summary = lines[-1] if lines else "no summary"
    found = _FOUND.search(summary)
    return Outcome(passed, failed, int(found.group(1)) if found else None, summary, round(seconds, 1))


def _counts(junit: Path) -> tuple[int, int]:
    """Return how many tests passed and failed."""
    suite = next(ElementTree.parse(junit).getroot().iter("testsuite"))
    total, skipped = int(suite.attrib["tests"]), int(suite.attrib["skipped"])
    failed = int(suite.attrib["failures"]) + int(suite.attrib["errors"])
    return total - skipped - failed, failed


def _file(test: str) -> str:
    return test.partition("::")[0]


def _version() -> str:
    outcome = subprocess.run(["compute-sanitizer", "--version"], capture_output=True, text=True, check=True)
    return outcome.stdout.strip().splitlines()[-1]


def main() -> None:
    """Run every file under every tool, print a table and write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tools", nargs="+", default=TOOLS, choices=(*TOOLS, "initcheck"))
    parser.add_argument("--cases", default="", help="only tests that pytest's -k takes by this expression")
    parser.add_argument("--logs", type=Path, help="keep the tools' and pytest's reports in this folder")
    parser.add_argument("--timeout", type=float, default=600, help="seconds that a run of some tests may take")
    parser.add_argument("--out", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    if shutil.which("compute-sanitizer") is None:
        sys.exit("compute-sanitizer is not on the path; it is part of CUDA's toolkit (bin/ of its root)")
    tests = gpu_tests(arguments.cases)
    if not tests:
        sys.exit(f"no GPU test of tests/schedules is named by {arguments.cases!r}; look at `pytest --collect-only`")
    results: dict[str, dict[str, Outcome]] = {}
    document = {"machine": machine(), "compute_sanitizer": _version(), "results": results}
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch, ThreadPoolExecutor(os.cpu_count()) as pool:
        directory = arguments.logs or Path(scratch)
        directory.mkdir(parents=True, exist_ok=True)
        running = {}
        for tool in arguments.tools:
            for number, run in enumerate(runs_of(tests)):
                stem = directory / f"{Path(_file(run[0])).stem}-{number}-{tool}"
                running[pool.submit(sanitize, run, tool, stem, timeout_s=arguments.timeout)] = (run, tool)
        for job in as_completed(running):
            (run, tool), outcome = running[job], job.result()
            of_file = results.setdefault(Path(_file(run[0])).stem.removeprefix("test_").removesuffix("_gpu"), {})
            of_file[tool] = of_file[tool] + outcome if tool in of_file else outcome
            arguments.out.write_text(json.dumps(document, indent=1, default=asdict) + "\n", encoding="utf-8")
            if not outcome.clean:
                print(f"NOT CLEAN under {tool}: {outcome.summary}: {', '.join(run)}", file=sys.stderr, flush=True)
    for name, of_file in sorted(results.items()):
        for tool, outcome in of_file.items():
            counts = f"{outcome.passed:3} passed, {outcome.failed} failed, {outcome.seconds:.0f} s of all runs"
            print(f"{name:28} {tool:10} {counts}, {'clean' if outcome.clean else 'NOT CLEAN'}: {outcome.summary}")
    sys.exit(0 if all(outcome.clean for of_file in results.values() for outcome in of_file.values()) else 1)


if __name__ == "__main__":
    main()
