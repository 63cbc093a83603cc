"""A part of a plan of 300 cells: what a database's own history predicts that it takes, and what it took.

    python -m benchmarks.batch.bench_prediction HISTORY [--cells 31] [--candidates 900] [--target cuda] [--out FILE]

HISTORY is a database with jobs of this target (`benchmarks.batch.bench_batch --keep`), which is copied. The cells are
drawn from the plan of `benchmarks.batch.count_batch_tasks`, always the same. `--candidates` is the part's budget;
without it, it is what the effort `quick` gives. Finishing is the sum over cells, many of them finished side by side.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import tempfile
import time
from pathlib import Path

from benchmarks.batch.count_batch_tasks import plan_text
from benchmarks.gpu_arms.results import machine
from relaxtune.pipeline.batch.cells import Cell, list_cells
from relaxtune.pipeline.batch.driver import run_batch
from relaxtune.pipeline.batch.plan import Plan, parse_plan
from relaxtune.pipeline.batch.prediction import preview


def main() -> None:
    """Predict, carry the part out, and print both."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("history", type=Path)
    parser.add_argument("--cells", type=int, default=31)
    parser.add_argument("--candidates", type=int)
    parser.add_argument("--target", default="cuda")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        plan = part_of(Path(folder), arguments.target, arguments.cells, arguments.candidates)
        shutil.copy(arguments.history, str(plan.database))
        began = time.monotonic()
        shown = preview(plan)
        planning_s = time.monotonic() - began
        (group,) = shown.groups
        document: dict[str, object] = {
            "machine": machine(),
            "cells": len(shown.cells),
            "tasks": len(group.group.tasks),
            "tasks_before_merging": sum(len(one.tasks) for one in group.group.cells),
            "planning_s": planning_s,
            "history": vars(group.history),
            "predicted": {
                "candidates": group.candidates,
                "tuning_s": group.tuning_s,
                "finishing_s": group.finishing_s,
            },
        }
        print(json.dumps(document), flush=True)
        began = time.monotonic()
        result = run_batch(plan)
        document["taken"] = {
            "accepted": result.accepted,
            "candidates": sum(one.candidates for one in result.tuning),
            "tuning_s": sum(one.seconds for one in result.tuning),
            "finishing_s": sum(one.facts.seconds or 0.0 for one in result.cells),
            "seconds": time.monotonic() - began,
        }
        document["not_accepted"] = [
            (one.cell.name, one.state.value, one.facts.error) for one in result.cells if one.facts.error
        ]
    print(json.dumps({name: document[name] for name in ("predicted", "taken", "not_accepted")}))
    if arguments.out:
        arguments.out.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


def part_of(folder: Path, target: str, count: int, candidates: int | None) -> Plan:
    """Return a plan of so many cells of the large one, drawn from all of it."""
    cells = list(list_cells(parse_plan(Path("many.toml"), plan_text(target))))
    random.Random(0).shuffle(cells)
    budget = "" if candidates is None else f"[budget]\ncandidates = {candidates}\n"
    text = f'database = "relaxtune.db"\neffort = "quick"\nsamples = 1\n{budget}[defaults]\ntargets = ["{target}"]\n'
    return parse_plan(folder / "part.toml", text + "".join(_table(cell) for cell in cells[:count]))


def _table(cell: Cell) -> str:
    return (
        f"[[cells]]\nmodels = [{json.dumps(cell.source)}]\nshapes = [{json.dumps(cell.shape)}]\n"
        f"precisions = [{json.dumps(cell.precision)}]\n"
    )


if __name__ == "__main__":
    main()
