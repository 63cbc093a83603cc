"""Tuning a model of a few layers in place of one of many: the layers of a transformer are the same kernels.

A model of L layers has the kernels of the whole one, with the same workload hashes, so that records made for it are
the whole one's. How often each runs follows from two short models: a task that runs a times in L layers and b times in
L + 1 runs a + (N - L) (b - a) times in N. That is what tasks are weighed by, so that the embedding and the head of a
short model get no more of the time than they would in the whole one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from benchmarks.gpu_arms.cases import Case
from relaxtune.pipeline.prepare import ModelRequest, PreparedModel, prepare_model
from relaxtune.pipeline.tasks.task import TuningTask


def prepare_short(case: Case, layers: int, target: str) -> PreparedModel | None:
    """Return a case's model with so many layers and the weights of the whole model's tasks.

    None where that is no shorter: two models, one with a layer more, would take longer than the whole one.
    """
    whole = case.preset.config.layers
    if layers + 1 >= whole:
        return None
    short, longer = (_prepare(case.with_layers(count), target) for count in (layers, layers + 1))
    return replace(short, tasks=scale_weights(short.tasks, longer.tasks, whole - layers))


def scale_weights(short: Sequence[TuningTask], longer: Sequence[TuningTask], missing: int) -> tuple[TuningTask, ...]:
    """Return the tasks of a model that has `missing` layers more than `short`, the heaviest first.

    Parameters
    ----------
    short, longer : sequence of TuningTask
        Of two models; `longer` has one layer more.
    """
    runs = {task.workload_hash: task.weight for task in short}
    more = {task.workload_hash: task.weight for task in longer}
    tasks = {task.workload_hash: task for task in (*longer, *short)}
    weighed = []
    for key, task in tasks.items():
        few = runs.get(key, 0)
        weight = few + missing * (more.get(key, 0) - few)
        if weight > 0:
            weighed.append(replace(task, weight=weight))
    return tuple(sorted(weighed, key=lambda task: (-task.weight * task.flops, -task.weight * task.bytes, task.name)))


def _prepare(case: Case, target: str) -> PreparedModel:
    return prepare_model(ModelRequest(case.source, shapes=case.shapes, target=target))
