"""The matrix of exports: family x exporter x precision x static or symbolic axes, each imported, compiled, validated.

    python -m tests.export.matrix [--families bert ... | --every] [--precisions fp16 ...] [--no-sweeps] [--jobs 2]
                                  [--fresh] [--exports DIR [--export-only | --made]]

Needs the `export` extra. The exports are made by `make_exports`, compiled for this CPU without tuning and compared with
ONNX Runtime with the default tolerances; `inspect` has to say of each what compiling it then does. A run that was
broken off goes on where it was, and only cells that did not pass are done again; `--fresh` begins anew. `--every` takes
all architectures of transformers, not only those with a recipe. One environment may make the files (`--export-only`)
and another, without torch, compile them (`--made`). Writes `benchmarks/results/export-matrix.json` with every cell,
and beside it a Markdown table. Exits 1 where one was wrong, crashed or did not compile though `inspect` took it.
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from tvm.target.codegen import llvm_get_system_cpu

from tests.export.matrix_cases import Cell, list_cells
from tests.export.matrix_table import render
from tests.export.names import family_of

RESULTS = Path("benchmarks/results/export-matrix.json")
PRECISIONS = ("fp16", "bf16", "w8a16", "w4a16")
FAMILY_TIMEOUT_S = 3600
# An exporter's failure, a graph that ONNX Runtime refuses, and what `inspect` explains are no faults.
_FAULTS = ("not compiled", "wrong result", "crashed")
_MODEL_PACKAGES = ("torch", "transformers")
_PACKAGES = ("apache-tvm", "onnx", "onnxruntime", "onnxscript", *_MODEL_PACKAGES)

Rows = dict[str, dict[str, object]]


@dataclass(frozen=True)
class Plan:
    """What every family is put through: precisions beside its own, sweeps over opsets, where exports are kept."""

    precisions: tuple[str, ...]
    sweeps: bool
    exports: Path | None
    export_only: bool = False
    made: bool = False

    def cells(self, family: str) -> dict[str, Cell]:
        """Return the cells of a family by key."""
        cells = list_cells((family,), self.precisions, sweeps=self.sweeps)
        there = set(made_exports(self.exports)) if self.exports and self.made else None
        return {cell.key: cell for cell in cells if there is None or cell.export.name in there}


def run_family(family: str, plan: Plan, done: Iterable[str]) -> Rows:
    """Return the outcomes of a family's cells that are not done; a crash ends its cell, not the others."""
    rows: Rows = {}
    wanted = plan.cells(family)
    skip = list(done)
    if plan.made:
        skip += [
            cell.key for cell in list_cells((family,), plan.precisions, sweeps=plan.sweeps) if cell.key not in wanted
        ]
    with tempfile.TemporaryDirectory(prefix="relaxtune-matrix-") as folder:
        lines = Path(folder) / "cells.jsonl"
        while set(wanted) - set(skip):
            lines.unlink(missing_ok=True)
            status, said = _run_worker(family, plan, skip, lines)
            begun, finished = _read(lines)
            rows.update(finished)
            skip += list(finished)
            lost = [key for key in begun if key not in finished]
            if plan.export_only or (not lost and status == 0):
                break
            if not lost:
                raise SystemExit(f"the worker of {family} ended with status {status} before its first cell:\n{said}")
            rows[lost[0]] = _crashed(wanted[lost[0]], f"its process ended with status {status}")
            skip.append(lost[0])
    return rows


def _run_worker(family: str, plan: Plan, skip: list[str], lines: Path) -> tuple[int | str, str]:
    command = [sys.executable, "-m", "tests.export.matrix_worker", family, str(lines)]
    command += ["--precisions", *plan.precisions, "--skip", *skip]
    command += [] if plan.sweeps else ["--no-sweeps"]
    command += ["--exports", str(plan.exports)] if plan.exports else []
    command += ["--export-only"] if plan.export_only else []
    try:
        ended = subprocess.run(command, capture_output=True, text=True, timeout=FAMILY_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        return f"killed after {FAMILY_TIMEOUT_S} s", ""
    return ended.returncode, ended.stderr[-2000:]


def _read(lines: Path) -> tuple[list[str], Rows]:
    begun: list[str] = []
    finished: Rows = {}
    for line in lines.read_text().splitlines() if lines.exists() else ():
        data = json.loads(line)
        if "begun" in data:
            begun.append(data["begun"])
        else:
            finished[data["key"]] = data
    return begun, finished


def _crashed(cell: Cell, reason: str) -> dict[str, object]:
    made = cell.export
    return {
        "key": cell.key, "family": made.family, "exporter": made.exporter, "opset": made.opset, "dtype": made.dtype,
        "axes": cell.axes, "precision": cell.precision, "state": "crashed", "reason": reason,
    }  # fmt: skip


def head_commit() -> str:
    """Return the commit of this checkout."""
    return subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False).stdout.strip()


def environment(commit: str) -> Mapping[str, str]:
    """Return the versions, the commit and the processor that the outcomes are true for."""
    return {
        "machine": f"{platform.machine()}, {llvm_get_system_cpu()}",
        "commit": commit,
        "python": platform.python_version(),
        **{name: _version(name) for name in _PACKAGES},
    }


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "elsewhere"


def made_exports(folder: Path) -> list[str]:
    """Return the names of the exports in a folder, and of those that could not be made."""
    return sorted({path.stem for kind in ("onnx", "why") for path in folder.glob(f"*.{kind}")})


def load_rows(path: Path) -> Rows:
    """Return the rows of an earlier run, empty where there is none."""
    return {row["key"]: row for row in json.loads(path.read_text())["cells"]} if path.exists() else {}


def save_rows(path: Path, rows: Rows, commit: str) -> None:
    """Write the rows as JSON and as a Markdown table beside it."""
    cells = [rows[key] for key in sorted(rows)]
    path.parent.mkdir(parents=True, exist_ok=True)
    body = ",\n".join(json.dumps(cell) for cell in cells)
    head = json.dumps({"command": "python -m tests.export.matrix", "environment": environment(commit)}, indent=1)
    path.write_text(f'{head[:-2]},\n "cells": [\n{body}\n]}}\n')
    path.with_suffix(".md").write_text(render(cells, environment(commit)))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--families", nargs="+", help="by default all that have a recipe")
    parser.add_argument("--every", action="store_true", help="every architecture of transformers")
    parser.add_argument("--precisions", nargs="*", default=list(PRECISIONS), help="beside each graph's own")
    parser.add_argument("--no-sweeps", action="store_true", help="leave out other opsets and half-precision graphs")
    parser.add_argument("--jobs", type=int, default=1, help="families at a time, a process each")
    parser.add_argument("--fresh", action="store_true", help="begin anew instead of going on")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--exports", type=Path, help="keep the .onnx files here, and take those that are there")
    parser.add_argument("--export-only", action="store_true", help="make the files, and compile none")
    parser.add_argument("--commit", help="of the code, where it is no git checkout")
    parser.add_argument("--made", action="store_true", help="compile the files that are there, and make none")
    args = parser.parse_args()
    commit = args.commit or head_commit()
    if (args.export_only or args.made) and not args.exports:
        parser.error("--export-only and --made need --exports DIR")
    families = args.families or _families(args.exports if args.made else None, every=args.every)
    rows = {} if args.fresh else load_rows(args.out)
    plan = Plan(tuple(args.precisions), not args.no_sweeps, args.exports, args.export_only, args.made)
    if args.exports:
        args.exports.mkdir(parents=True, exist_ok=True)
    passed = {key for key, row in rows.items() if row["state"] == "validated"}
    started = time.perf_counter()
    with ThreadPoolExecutor(args.jobs) as pool:
        futures = {
            family: pool.submit(run_family, family, plan, _of_family(passed, rows, family)) for family in families
        }
        names = {future: family for family, future in futures.items()}
        for future in as_completed(names):
            family, found = names[future], future.result()
            rows.update(found)
            save_rows(args.out, rows, commit)
            good = sum(row["state"] == "validated" for row in found.values())
            print(f"{family}: {good} of {len(found)} validated, {time.perf_counter() - started:.0f} s", file=sys.stderr)
    good = sum(row["state"] == "validated" for row in rows.values())
    print(f"{good} of {len(rows)} cells validated; {args.out} and {args.out.with_suffix('.md')}")
    sys.exit(any(row["state"] in _FAULTS for row in rows.values()))


def _families(made: Path | None, *, every: bool) -> list[str]:
    if made is not None:
        return list(dict.fromkeys(family_of(name) for name in made_exports(made)))
    from tests.export.make_exports import FAMILIES, RECIPES

    return list(FAMILIES if every else RECIPES)


def _of_family(keys: Iterable[str], rows: Rows, family: str) -> list[str]:
    return [key for key in keys if rows[key]["family"] == family]


if __name__ == "__main__":
    main()
