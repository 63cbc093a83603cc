"""Refutes kernels in the tuning database that made an artifact's outputs wrong, so that no later compile takes them.

A record's kernel was compared with a reference when it was measured. A record that was made by hand, came from another
machine or has lost what it was true for may hold a wrong kernel all the same; the validation of the whole model sees
it. Each kernel of the artifact is then compared with its unscheduled form (`pipeline.bisect`). For one that differs, a
measurement with the status `wrong_result` is recorded, which counts wherever its record does.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace

import numpy as np

from relaxtune.pipeline.artifact.compile import compile_module
from relaxtune.pipeline.artifact.export import write_artifact
from relaxtune.pipeline.artifact.kernel_choice import KernelChoice
from relaxtune.pipeline.artifact.module import Module
from relaxtune.pipeline.bisect import FaultyKernel, check_kernels
from relaxtune.pipeline.choose.record_lookup import RecordLookup
from relaxtune.pipeline.errors import PipelineError
from relaxtune.pipeline.prepare import PreparedModel
from relaxtune.pipeline.temporary import temporary_folder
from relaxtune.pipeline.tuning.record import describe_workload
from relaxtune.tuning_db.errors import TuningDatabaseError
from relaxtune.tuning_db.layers import open_databases
from relaxtune.tuning_db.records import Mode, Route, Status, signature_key, utc_now
from relaxtune.tuning_db.store import TuningDatabase
from relaxtune.tuning_db.urls import DatabasePlace

logger = logging.getLogger(__name__)


def refute_kernels(
    prepared: PreparedModel,
    choices: Sequence[KernelChoice],
    inputs: Mapping[str, np.ndarray],
    database: TuningDatabase,
    places: Sequence[DatabasePlace],
) -> tuple[FaultyKernel, ...]:
    """Record which kernels of a model that failed validation are wrong; return those whose record is refuted now.

    Where it is not possible, a warning says why: the validation has failed all the same.

    The outputs of `inputs` were wrong. A database that was opened to be read is opened again from `places`, to be
    written.
    """
    # Without its record a fallback is taken all the same.
    suspects = {one.function: one for one in choices if one.has_record and one.route is not Route.FALLBACK}
    if not suspects:
        return ()
    try:
        # Kernels of a CUDA graph cannot be looked at one by one.
        compiled = compile_module(prepared.lowered, choices, prepared.target, cuda_graph=False)
        with temporary_folder() as folder:
            write_artifact(compiled, folder / "artifact")
            compared = check_kernels(Module.load(folder / "artifact"), prepared.model, inputs)
        faulty = [one for one in compared if one.function in suspects]
        if faulty:
            read_only = database.mode is Mode.READ_ONLY
            with open_databases(places, create=False) if read_only else nullcontext(database) as written:
                for one in faulty:
                    _refute(prepared, suspects[one.function], one.reason, written)
    except (PipelineError, TuningDatabaseError) as e:
        logger.warning("no kernel is refuted: %s", e)
        return ()
    if not faulty:
        logger.warning(
            "none of the %d kernels from records differs from its unscheduled form; "
            "`relaxtune validate DIR --bisect` finds the fault", len(suspects),
        )  # fmt: skip
    return tuple(faulty)


def _refute(prepared: PreparedModel, choice: KernelChoice, reason: str, database: TuningDatabase) -> None:
    task = next(task for task in prepared.tasks if task.name == choice.task)
    made = (choice.route, choice.decision)
    lookup = RecordLookup(database, prepared.target, prepared.environment)
    refuted = next(record for record in lookup.judge(task).standing if (record.route, record.decision) == made)
    wrong = replace(
        refuted,
        workload_hash=task.workload_hash,
        signature_key=signature_key(task.signature),
        environment=prepared.environment,
        status=Status.WRONG_RESULT,
        latencies_us=(),
        error=f"{prepared.model.name} failed validation, and this kernel differs from its unscheduled form: {reason}",
        job_id=None,
        # The newest measurement counts, whatever the clock said when the record was made.
        created_at=max(utc_now(), refuted.created_at),
    )
    (number,) = database.record_all(workloads=[describe_workload(task)], records=[wrong])
    logger.error(
        "record %s (kernel %s, route %s) is refuted by record %d of %s: %s. Run the command again: it is not taken now",
        choice.record_id, choice.function, choice.route, number, database.url, reason,
    )  # fmt: skip
