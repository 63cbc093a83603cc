"""A recipe is small on its way to a builder, and makes the same kernel there."""

from __future__ import annotations

import pickle
from dataclasses import replace

import pytest
import tvm_ffi

from relaxtune.pipeline.tuning.measure.recipe import scheduled
from relaxtune.pipeline.tuning.task_start import template_candidates
from relaxtune.schedules.targets import resolve_target
from relaxtune.schedules.templates.base import TemplateError
from tests.pipeline.tuning.tuning_cases import add_one_mod, task_of


def test_a_recipe_makes_the_same_kernel_after_pickling() -> None:
    target = resolve_target("cuda:sm_90a")
    first, second = (one.module for one in template_candidates(task_of("add", add_one_mod(size=4096)), target)[:2])
    # The function's bytes are shared by all candidates of a task.
    assert first.mod is second.mod
    sent = pickle.loads(pickle.dumps(first))
    assert tvm_ffi.structural_equal(scheduled(sent)["main"], first.make()["main"])
    assert not tvm_ffi.structural_equal(scheduled(second)["main"], first.make()["main"])


def test_a_module_is_built_as_it_is() -> None:
    mod = add_one_mod()
    assert scheduled(mod).same_as(mod)


def test_a_recipe_of_another_version_is_refused_where_it_is_made() -> None:
    target = resolve_target("cuda:sm_90a")
    (one, *_) = template_candidates(task_of("add", add_one_mod(size=4096)), target)
    with pytest.raises(TemplateError, match="'made_up' is not known here"):
        scheduled(replace(one.module, decision='{"template": "made_up"}'))
