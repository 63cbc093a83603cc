"""Make the artifacts that `benchmarks.bench_gpu` times: every case tuned into one database, each within its seconds.

    python -m benchmarks.tune_gpu_cases [--cases bert-base,...] [--seconds 60] [--db out/gpu/tuning.db]
                                        [--artifacts out/gpu] [--target cuda]
    python -m benchmarks.tune_gpu_cases --compile-only --target cuda:sm_90a      # from records alone, no GPU needed

A case that fails is told and the others go on. Measured kernels are kept in the database, so that a second run takes
up where the first stopped.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from benchmarks.bench_gpu import DEFAULT_ARTIFACTS
from benchmarks.gpu_arms.artifact_facts import describe
from benchmarks.gpu_arms.cases import Case, find_cases
from pipeline.cli.app import expected_errors
from pipeline.cli.output import stdout_console
from pipeline.jobs import CompileResult, TuneRequest, compile_model, tune_model
from pipeline.prepare import ModelRequest
from pipeline.tuning.options import TuningOptions


def main() -> None:
    """Tune or compile every case and print what became of it; exits 1 when one failed."""
    arguments = _parse()
    console = stdout_console()
    failed = 0
    for case in find_cases(arguments.cases):
        started = time.monotonic()
        try:
            compiled = make_artifact(case, arguments)
        except KeyboardInterrupt:
            raise
        except expected_errors() as error:
            failed += 1
            console.print(f"{case.name}: failed: {error}", style="bold red", markup=False, soft_wrap=True)
            continue
        validation = compiled.validation
        verdict = "not validated" if validation is None else "validated" if validation.passed else "WRONG RESULT"
        failed += validation is not None and not validation.passed
        facts = describe(compiled.manifest)
        console.print(
            f"{case.name}: {verdict}, {facts['launches']} launches {facts['launches_by_route']}, "
            f"{facts['kernels_without_record']} kernels without a record, {time.monotonic() - started:.0f} s",
            markup=False,
            soft_wrap=True,
        )
    sys.exit(1 if failed else 0)


def make_artifact(case: Case, arguments: argparse.Namespace) -> CompileResult:
    """Return the artifact of one case, tuned unless only compiling is asked for."""
    request = ModelRequest(case.source, shapes=case.shapes, target=arguments.target)
    directory = arguments.artifacts / case.name
    database = arguments.db or arguments.artifacts / "tuning.db"
    if arguments.compile_only:
        return compile_model(request, directory, database=database, samples=arguments.samples)
    tuning = TuningOptions(trials=None, time_budget_s=arguments.seconds, seed=arguments.seed)
    directory.parent.mkdir(parents=True, exist_ok=True)
    return tune_model(request, TuneRequest(database, tuning, False, arguments.samples), directory).compiled


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", help="names of cases or models, separated by commas; default: all")
    parser.add_argument("--artifacts", type=Path, default=DEFAULT_ARTIFACTS, help="folder of the artifacts")
    parser.add_argument("--db", help="tuning database, by file or URL; default: tuning.db beside the artifacts")
    parser.add_argument("--seconds", type=float, default=60.0, help="seconds of tuning for each case")
    parser.add_argument("--target", default="cuda", help="as `relaxtune tune --target`")
    parser.add_argument("--samples", type=int, default=1, help="random inputs to validate each artifact with, or 0")
    parser.add_argument("--seed", type=int, default=0, help="seed of the search")
    parser.add_argument("--compile-only", action="store_true", help="from the database's records, nothing measured")
    arguments = parser.parse_args()
    try:
        find_cases(arguments.cases)
    except ValueError as error:
        parser.error(str(error))
    return arguments


if __name__ == "__main__":
    main()
