"""A plan of 300 cells of the zoo's families: how many tasks they share, and GPU-hours by a database's own history.

    python -m benchmarks.batch.count_batch_tasks [--target cuda:sm_90a] [--cells 300] [--workers 8] [--db DB]
        [--seconds 120]
        [--out FILE]

Models have two layers: more layers add calls, no tasks. Nothing is measured. With `--db`, the prediction is that of
`relaxtune batch plan`: candidates by the effort `quick`, less the part of each cell's tasks that cells before it have,
at what a candidate and a cell took in the jobs of that database.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import random
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from itertools import product
from pathlib import Path

from relaxtune.pipeline.batch.cells import Cell, list_cells
from relaxtune.pipeline.batch.plan import Plan, parse_plan
from relaxtune.pipeline.batch.prediction import read_history
from relaxtune.pipeline.batch.tasks import CellTasks, group_cells, prepare_cell, trials_of
from relaxtune.tuning_db.records import Mode
from relaxtune.tuning_db.store import TuningDatabase

_TEXT_MODELS = ["bert-base-2-layers", "bert-large-2-layers", "gpt2-small-2-layers", "t5-small-2-layers", "bert-tiny"]
_TEXT_MODELS += ["llama-tiny"]
_BATCHES, _LENGTHS = (1, 2, 4, 8, 16, 32), (64, 128, 256, 512)


def main() -> None:
    """Print the counts."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--target", default="cuda:sm_90a")
    parser.add_argument("--cells", type=int, default=300)
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--db")
    parser.add_argument("--seconds", type=float, default=120.0, help="Cells not lowered by then are left out.")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    plan = parse_plan(Path("many.toml"), plan_text(arguments.target))
    cells = list(list_cells(plan))[: arguments.cells]
    # In no order of families, so that those left out are of all of them.
    random.Random(0).shuffle(cells)
    began = time.monotonic()
    pool = ProcessPoolExecutor(arguments.workers, multiprocessing.get_context("spawn"))
    futures = [pool.submit(hashes_of, cell) for cell in cells]
    found, faults = [], []
    for cell, future in zip(cells, futures, strict=True):
        left = arguments.seconds - (time.monotonic() - began)
        try:
            found.append((cell, future.result(timeout=max(0.0, left))))
        except TimeoutError:
            future.cancel()
        except ValueError as e:
            faults.append(f"{cell.name}: {e}")
    document = {**count(plan, found), "faults": faults, "lowering_s": time.monotonic() - began}
    if arguments.db:
        document |= predict(arguments.db, cells[0], int(document["candidates"]), len(found))  # type: ignore[call-overload]
    print(json.dumps({key: value for key, value in document.items() if key != "growth"}))
    if arguments.out:
        arguments.out.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    sys.stdout.flush()
    # Cells that are still being lowered are not waited for.
    for process in pool._processes.values():
        process.kill()
    pool.shutdown(cancel_futures=True)


def plan_text(target: str) -> str:
    """Return the plan."""
    shapes = [f"input_ids={batch}x{length}" for batch, length in product(_BATCHES, _LENGTHS)]
    images = [f"pixel_values={batch}x3x224x224" for batch in _BATCHES]
    heard = [f"decoder_input_ids={batch}x{length}" for batch in _BATCHES[:3] for length in _LENGTHS[:2]]
    return (
        f'effort = "quick"\n[defaults]\ntargets = ["{target}"]\nprecisions = ["graph", "fp16"]\n'
        f"[[cells]]\nmodels = {_TEXT_MODELS}\nshapes = {shapes}\n"
        f'[[cells]]\nmodels = ["vit-base-2-layers"]\nshapes = {images}\n'
        f'[[cells]]\nmodels = ["whisper-base-2-layers"]\nshapes = {heard}\n'
    )


def hashes_of(cell: Cell) -> list[str]:
    """Return the workload hashes of a cell's tasks."""
    found = prepare_cell(cell)
    if not isinstance(found, CellTasks):
        raise ValueError(found.note.splitlines()[0][:200])  # noqa: TRY004
    return [task.workload_hash for task in found.tasks]


def count(plan: Plan, found: list[tuple[Cell, list[str]]]) -> dict[str, object]:
    """Return how many tasks there are with and without sharing, and how both grow with the cells."""
    trials = trials_of(plan, len(found))
    seen: set[str] = set()
    alone = candidates = 0
    growth = []
    for number, (cell, hashes) in enumerate(found, start=1):
        part = len(set(hashes) - seen) / max(1, len(hashes))
        candidates += trials(cell, part) or 0
        seen |= set(hashes)
        alone += len(hashes)
        if number % 20 == 0 or number == len(found):
            growth.append((number, alone, len(seen), candidates))
    single = sum(trials_of(plan, 1)(cell, 1.0) or 0 for cell, _ in found)
    return {
        "cells": len(found),
        "tasks_alone": alone,
        "tasks": len(seen),
        "candidates_alone": single,
        "candidates": candidates,
        "growth": growth,
    }


def predict(db: str, cell: Cell, candidates: int, cells: int) -> dict[str, object]:
    """Return what a database's history predicts for so many candidates and cells."""
    one = prepare_cell(cell)
    if not isinstance(one, CellTasks):
        return {"prediction": one.note}
    with TuningDatabase.open(db, mode=Mode.READ_ONLY, create=False) as database:
        history = read_history(database, group_cells([one])[0])
    tuning_s = None if history.candidate_s is None else candidates * history.candidate_s
    finishing_s = None if history.cell_s is None else cells * history.cell_s
    return {
        "candidate_s": history.candidate_s,
        "cell_s": history.cell_s,
        "predicted_tuning_hours": None if tuning_s is None else tuning_s / 3600,
        "predicted_finishing_hours": None if finishing_s is None else finishing_s / 3600,
    }


if __name__ == "__main__":
    main()
