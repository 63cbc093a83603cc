"""A task keeps its module as bytes: a driver of a thousand cells holds thousands of tasks."""

from __future__ import annotations

import pickle

import tvm_ffi

from relaxtune.models import load_model
from relaxtune.pipeline.importer import import_model
from relaxtune.pipeline.passes import LoweringOptions, lower
from relaxtune.pipeline.tasks.extract import extract_tasks
from relaxtune.schedules.targets import resolve_target
from tests.pipeline.tuning.tuning_cases import matmul_mod, matmul_task

# Bytes of a task: 3 to 8 KB for the kernels of a transformer, 10 to 37 where it held the module itself.
SENT_MAX = 10_000


def test_a_task_gives_its_module_anew() -> None:
    task = matmul_task(16, 16, 16, "task")
    expected = matmul_mod(16, 16, 16)["main"]
    assert tvm_ffi.structural_equal(task.mod["main"].body, expected.body, map_free_vars=True)
    assert tvm_ffi.structural_equal(task.mod, pickle.loads(pickle.dumps(task)).mod)
    assert not task.mod.same_as(task.mod)


def test_tasks_of_a_transformer_are_small() -> None:
    target = resolve_target("cuda:sm_90a")
    tasks = extract_tasks([lower(import_model(load_model("bert-tiny")), target.target, LoweringOptions())])
    sizes = {task.name: len(pickle.dumps(task)) for task in tasks}
    assert max(sizes.values()) < SENT_MAX, sizes
    # Nothing of a module stays with a task that was asked for it.
    assert all(task.mod["main"] is not None for task in tasks)
    assert {task.name: len(pickle.dumps(task)) for task in tasks} == sizes
