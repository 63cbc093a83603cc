"""What tuning gains over the untuned artifact, for each model and effort.

    python -m benchmarks.tuning.bench_tuning_gain --models bert-tiny,vit-tiny [--efforts quick,normal] [--seconds 30]
                                           [--target llvm] [--results FILE]
    python -m benchmarks.tuning.bench_tuning_gain --cases all --layers 2 --efforts thorough --target cuda  # needs a GPU
    python -m benchmarks.tuning.bench_tuning_gain --table FILE [FILE ...]              # results as a Markdown table

Each model is tuned into an empty database. Then the untuned model (what compiling without records makes) and the tuned
one are timed whole, alternately, in one run, as `relaxtune tune` does before it decides what ships. `--seconds` bounds
the search of each, in place of the effort's candidates. With `--jobs N`, so many models at a time are imported and
compiled, each in a process of its own, while one is measured.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

from benchmarks.gpu_arms.cases import find_cases
from relaxtune.pipeline.artifact.compile import compile_module
from relaxtune.pipeline.artifact.export import versions
from relaxtune.pipeline.artifact.kernel_choice import KernelChoice
from relaxtune.pipeline.bench.measure import OWN_ARM, UNTUNED_ARM
from relaxtune.pipeline.choose.record_lookup import RecordLookup
from relaxtune.pipeline.choose.shipping import Shipping, decide
from relaxtune.pipeline.cli.app import expected_errors
from relaxtune.pipeline.jobs.tuned_model import TunedModel, tune_prepared, untuned_kernels
from relaxtune.pipeline.prepare import ModelRequest, prepare_model
from relaxtune.pipeline.report.ceilings import known_ceilings
from relaxtune.pipeline.report.kernel import KernelRow, judged
from relaxtune.pipeline.temporary import temporary_folder
from relaxtune.pipeline.tuning.measure.device_lock import DeviceLock
from relaxtune.pipeline.tuning.options import Effort, options_for
from relaxtune.tuning_db.records import Route
from relaxtune.tuning_db.store import TuningDatabase

RESULTS = Path(__file__).parents[1] / "results" / "tuning-gain.json"
Row = Mapping[str, object]


def main() -> None:
    """Tune and time what is asked for; print a line each, and write the rows and the table."""
    asked = _parse()
    if asked.table:
        print(table([row for path in asked.table for row in json.loads(path.read_text())["rows"]]))
        return
    names = [asked.only] if asked.only else list(_requests(asked))
    work = [(name, effort) for name in names for effort in asked.efforts]
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(asked.jobs) as pool:
        lock = Path(folder) / "turn"
        if asked.jobs == 1:
            parts = ([row(*one, asked, asked.turn)] for one in work)
        else:
            ended = [pool.submit(_in_process, *one, lock) for one in work]
            parts = (one.result() for one in as_completed(ended))
        for part in parts:
            rows += part
            _write(asked.results, rows)
    print(table(rows))


def _write(path: Path, rows: Sequence[Row]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    conditions = {
        "command": " ".join(["python -m benchmarks.tuning.bench_tuning_gain", *sys.argv[1:]]),
        "commit": commit.stdout.strip(),
        "machine": {"device": ", ".join(sorted({str(one["device"]) for one in rows if "device" in one}))},
        "cores": os.cpu_count(),
        "versions": versions(),
    }
    path.write_text(json.dumps({**conditions, "rows": rows}, indent=1) + "\n")


def row(name: str, effort: Effort, asked: argparse.Namespace, turn: Path | None) -> Row:
    """Return what tuning a model at an effort gains; a model that fails is told in its row."""
    taking_turns: AbstractContextManager[object] = DeviceLock(turn) if turn is not None else nullcontext()
    began = time.monotonic()
    try:
        prepared = prepare_model(_requests(asked)[name])
        tuning = options_for(effort, None, asked.seconds)
        untuned = compile_module(prepared.lowered, untuned_kernels(prepared), prepared.target)
        with TuningDatabase.open("sqlite://") as database, taking_turns:
            tuned = tune_prepared(prepared, tuning, database, None)
            kernels = _kernels(tuned, untuned.choices, database)
        made = compile_module(tuned.prepared.lowered, tuned.choices, prepared.target, like=untuned)
        with temporary_folder() as folder, taking_turns:
            shipping = decide(prepared, made, untuned, folder)[0]
    except expected_errors() as error:
        found: Row = {"model": name, "effort": effort, "failed": str(error)}
    else:
        found = {
            "model": name,
            "effort": effort,
            "device": prepared.environment.device_name,
            **_figures(tuned, shipping, kernels),
        }
    found = {**found, "seconds": time.monotonic() - began}
    print(json.dumps({key: value for key, value in found.items() if key != "kernels"}), flush=True)
    return found


def _figures(tuned: TunedModel, shipping: Shipping, kernels: Sequence[Row]) -> Row:
    report, found = shipping.report, shipping.contrast
    own, before = report.arm(OWN_ARM), report.arm(UNTUNED_ARM)
    summary = tuned.summary
    return {
        "untuned_ms": before.median_ms,
        "shipped_ms": own.median_ms,
        "gain": None if found is None else {"median": found.gain, "least": found.least_gain, "most": -found.least},
        "ships": "tuned" if shipping.tuned and found is not None else "untuned",
        "candidates": summary.candidates,
        "search_s": summary.seconds,
        "kernels": kernels,
    }


def _kernels(tuned: TunedModel, untuned: Sequence[KernelChoice], database: TuningDatabase) -> list[Row]:
    """Return the kernels of the tuned form: what each takes as it is untuned and tuned, and what holds it back."""
    prepared = tuned.prepared
    lookup = RecordLookup(database, prepared.target, prepared.environment)
    defaults = {choice.task: choice for choice in untuned}
    chosen = {choice.task: choice for choice in tuned.choices}
    rows, untuned_us = [], {}
    for task in prepared.tasks:
        default, choice = defaults.get(task.name), chosen.get(task.name)
        untuned_us[task.name] = next(
            (
                record.latency_us
                for record in lookup.judge(task).standing
                if default is not None
                and record.route is default.route
                and (default.route is Route.FALLBACK or record.decision == default.decision)
            ),
            None,
        )
        inputs = json.loads(task.signature).get("inputs", [])
        rows.append(
            KernelRow(
                task.name,
                task.family,
                (),
                task.weight,
                choice.route.value if choice is not None else "",
                None,
                time_us=choice.latency_us if choice is not None else None,
                flops=task.flops,
                bytes=task.bytes,
                dtype=next((str(dtype) for _, dtype in inputs if "float" in str(dtype)), None),
            )
        )
    kept = ("name", "family", "calls", "route", "time_us", "share", "compute_use", "bandwidth_use", "bottleneck")
    return [
        {"untuned_us": untuned_us[one.name], **{key: one.to_json()[key] for key in kept}}
        for one in judged(rows, known_ceilings(prepared.environment.device_name))
    ]


def table(rows: Sequence[Row]) -> str:
    """Return rows as a Markdown table: a line a model, a column an effort, and the geometric mean of each."""
    efforts = [effort for effort in Effort if any(one["effort"] == effort for one in rows)]
    lines = [f"| model | untuned ms | {' | '.join(efforts)} |", "|---" * (2 + len(efforts)) + "|"]
    for model in dict.fromkeys(str(one["model"]) for one in rows):
        own = {str(one["effort"]): one for one in rows if one["model"] == model}
        timed = [float(str(one["untuned_ms"])) for one in own.values() if "untuned_ms" in one]
        shown = f"{statistics.median(timed):.4g}" if timed else ""
        lines.append(f"| {model} | {shown} | {' | '.join(_cell(own.get(effort)) for effort in efforts)} |")
    means = [_mean([one for one in rows if one["effort"] == effort]) for effort in efforts]
    lines.append(f"| geometric mean of what ships | | {' | '.join(means)} |")
    return "\n".join(lines)


def _cell(found: Row | None) -> str:
    if found is None:
        return ""
    if "failed" in found:
        return "failed"
    gain = found["gain"]
    if not isinstance(gain, Mapping):
        return "0 (same kernels)"
    return f"{gain['median']:+.1%} ({gain['least']:+.1%} to {gain['most']:+.1%}){_ships(found)}"


def _ships(found: Row) -> str:
    return "" if found["ships"] == "tuned" else ", untuned ships"


def _mean(rows: Sequence[Row]) -> str:
    ratios = []
    for one in rows:
        gain = one.get("gain")
        if "failed" not in one:
            ratios.append(1 - float(gain["median"]) if isinstance(gain, Mapping) and one["ships"] == "tuned" else 1.0)
    return f"{1 - statistics.geometric_mean(ratios):+.1%}" if ratios else ""


def _requests(asked: argparse.Namespace) -> dict[str, ModelRequest]:
    """Return what is tuned, by name."""
    found = {}
    for name in (asked.models or "").split(","):
        if name:
            found[name] = ModelRequest(name, {}, asked.target)
    if asked.cases is not None:
        for case in find_cases(None if asked.cases == "all" else asked.cases):
            short = case if asked.layers is None else case.with_layers(asked.layers)
            found[case.name] = ModelRequest(short.source, short.shapes, asked.target)
    return found


def _in_process(name: str, effort: Effort, lock: Path) -> list[Row]:
    command = [sys.executable, "-m", "benchmarks.tuning.bench_tuning_gain", *sys.argv[1:]]
    with tempfile.TemporaryDirectory() as folder:
        own = Path(folder) / "rows.json"
        more = ["--jobs", "1", "--only", name, "--efforts", effort, "--results", str(own), "--turn", str(lock)]
        ended = subprocess.run([*command, *more], stdout=subprocess.PIPE, text=True, check=False)
        if not own.exists():
            return [{"model": name, "effort": effort, "failed": f"exit code {ended.returncode}"}]
        print(ended.stdout.splitlines()[0], flush=True)
        return list(json.loads(own.read_text())["rows"])


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", help="zoo models, separated by commas, at their own shapes")
    parser.add_argument("--cases", help="cases of benchmarks.whole_models.bench_gpu, separated by commas, or all")
    parser.add_argument("--layers", type=int, help="cut the cases to so many layers")
    parser.add_argument("--efforts", default="normal", type=lambda text: [Effort(one) for one in text.split(",")])
    parser.add_argument("--seconds", type=float, help="seconds of search for each; default: the effort's candidates")
    parser.add_argument("--target", default="llvm", help="as `relaxtune tune --target`")
    parser.add_argument("--jobs", type=int, default=1, help="models that are imported and compiled at a time")
    parser.add_argument("--results", type=Path, default=RESULTS, help="where the rows go, as JSON")
    parser.add_argument("--table", type=Path, nargs="+", help="results to print as a table; nothing is run")
    parser.add_argument("--only", help=argparse.SUPPRESS)
    parser.add_argument("--turn", type=Path, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if not asked.table and not _requests(asked):
        parser.error("nothing to tune: name --models or --cases")
    return asked


if __name__ == "__main__":
    main()
