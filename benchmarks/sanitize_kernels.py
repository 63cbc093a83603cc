"""Kernels of every template under compute-sanitizer: the templates' GPU tests, each file with each tool.

    python -m benchmarks.sanitize_kernels [--tools memcheck racecheck synccheck] [--cases REGEX] [--out FILE.json]

The tests run kernels at odd shapes (ones, primes, nothing that a tile divides) on 20 fresh random inputs, into outputs
full of NaN, and compare them with NumPy. All runs go side by side on one GPU, and share the CPU's cores; what has ended
is in the file already. Needs compute-sanitizer (CUDA's toolkit) and pytest. Exits with 1 when a tool found anything, a
test failed, or none ran.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from benchmarks.gpu_arms.results import machine

ROOT = Path(__file__).parent.parent
RESULTS = Path(__file__).parent / "results" / "gpu-sanitizer.json"
TOOLS = ("memcheck", "racecheck", "synccheck")
_SUMMARY = re.compile(r"(?:ERROR|RACECHECK) SUMMARY: .*")
_FOUND = re.compile(r"SUMMARY: (\d+) (?:errors?|hazards? displayed)")
# Of the libraries that NumPy multiplies with: processes with a thread for each core hinder each other.
_THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")


@dataclass(frozen=True)
class Outcome:
    """Of one test file under one tool.

    Attributes
    ----------
    passed, failed
        Tests; skipped ones count as neither.
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


def gpu_tests() -> list[Path]:
    """Return the GPU tests of the templates."""
    return sorted((ROOT / "tests" / "schedules" / "templates").glob("test_*_gpu.py"))


def sanitize(tests: Path, tool: str, cases: str, directory: Path, *, threads: int, timeout_s: float) -> Outcome:
    """Run a test file under a tool; its output and reports go to a folder.

    Parameters
    ----------
    cases : str
        What pytest's -k takes; all tests where empty.
    threads : int
        For NumPy's matmuls.
    timeout_s : float
        Seconds after which the run is ended; it is not clean then.
    """
    stem = directory / f"{tests.stem}-{tool}"
    report, junit = stem.with_suffix(".txt"), stem.with_suffix(".xml")
    command = ["compute-sanitizer", "--tool", tool, "--target-processes", "application-only", "--print-limit", "5"]
    # The driver's answers to questions about what it can do count as errors otherwise.
    command += ["--report-api-errors", "no"] if tool == "memcheck" else []
    command += ["--log-file", str(report), sys.executable, "-m", "pytest", "-m", "gpu", "-q", "-p", "no:cacheprovider"]
    command += ["-k", cases] if cases else []
    command += [f"--junitxml={junit}", str(tests)]
    environment = {**os.environ, **dict.fromkeys(_THREADS, str(threads))}
    start = time.perf_counter()
    with stem.with_suffix(".log").open("w", encoding="utf-8") as log:
        try:
            subprocess.run(command, cwd=ROOT, env=environment, stdout=log, stderr=log, timeout=timeout_s, check=False)
        except subprocess.TimeoutExpired:
            print(f"{tests.name} under {tool}: stopped after {timeout_s:.0f} s", file=sys.stderr)
    seconds = time.perf_counter() - start
    passed, failed = _counts(junit)
    lines = _SUMMARY.findall(report.read_text(encoding="utf-8", errors="replace")) if report.is_file() else []
    summary = lines[-1] if lines else "no summary"
    found = _FOUND.search(summary)
    return Outcome(passed, failed, int(found.group(1)) if found else None, summary, round(seconds, 1))


def _counts(junit: Path) -> tuple[int, int]:
    """Return how many tests passed and failed; (0, 0) where pytest did not come to an end."""
    if not junit.is_file():
        return 0, 0
    suite = next(ElementTree.parse(junit).getroot().iter("testsuite"))
    total, skipped = int(suite.attrib["tests"]), int(suite.attrib["skipped"])
    failed = int(suite.attrib["failures"]) + int(suite.attrib["errors"])
    return total - skipped - failed, failed


def _version() -> str:
    outcome = subprocess.run(["compute-sanitizer", "--version"], capture_output=True, text=True, check=True)
    return outcome.stdout.strip().splitlines()[-1]


def main() -> None:
    """Run every file under every tool, print a table and write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tools", nargs="+", default=TOOLS, choices=(*TOOLS, "initcheck"))
    parser.add_argument("--cases", default="", help="only tests that pytest's -k takes by this expression")
    parser.add_argument("--logs", type=Path, help="keep the tools' and pytest's reports in this folder")
    parser.add_argument("--timeout", type=float, default=1800, help="seconds that each run may take")
    parser.add_argument("--out", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    if shutil.which("compute-sanitizer") is None:
        sys.exit("compute-sanitizer is not on the path; it is part of CUDA's toolkit (bin/ of its root)")
    jobs = [(tests, tool) for tests in gpu_tests() for tool in arguments.tools]
    threads = max(1, (os.cpu_count() or 1) // len(jobs))
    results: dict[str, dict[str, Any]] = {}
    document = {"machine": machine(), "compute_sanitizer": _version(), "results": results}
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    clean = True
    with tempfile.TemporaryDirectory() as scratch, ThreadPoolExecutor(len(jobs)) as pool:
        directory = arguments.logs or Path(scratch)
        directory.mkdir(parents=True, exist_ok=True)
        run = partial(sanitize, threads=threads, timeout_s=arguments.timeout)
        running = {pool.submit(run, tests, tool, arguments.cases, directory): (tests, tool) for tests, tool in jobs}
        for job in as_completed(running):
            (tests, tool), outcome = running[job], job.result()
            results.setdefault(tests.stem.removeprefix("test_").removesuffix("_gpu"), {})[tool] = asdict(outcome)
            arguments.out.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
            clean = clean and outcome.clean
            counts = f"{outcome.passed:3} passed, {outcome.failed} failed, {outcome.seconds:.0f} s"
            mark = "clean" if outcome.clean else "NOT CLEAN"
            print(f"{tests.stem:32} {tool:10} {counts}, {mark}: {outcome.summary}", flush=True)
    sys.exit(0 if clean else 1)


if __name__ == "__main__":
    main()
