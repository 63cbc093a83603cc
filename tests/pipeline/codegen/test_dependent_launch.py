from __future__ import annotations

from relaxtune.pipeline.artifact.compile import apply_choices
from relaxtune.pipeline.choose.selection import select_kernels
from relaxtune.pipeline.codegen.cuda_graph import without_dependent_launch
from relaxtune.pipeline.environment import detect_environment
from relaxtune.pipeline.importer import import_model
from relaxtune.pipeline.passes import LoweringOptions, lower
from relaxtune.pipeline.tasks.extract import extract_tasks
from relaxtune.schedules.targets import resolve_target
from tests.pipeline.passes.pass_cases import small_model

HOPPER = resolve_target("cuda:sm_90a")
_ATTR, _TAG = "tirx.kernel_launch_params", "tirx.use_programtic_dependent_launch"


def test_without_dependent_launch_keeps_all_but_the_launch_attribute() -> None:
    lowered = lower(import_model(small_model("llama-tiny-decode", precision="fp16")), HOPPER.target, LoweringOptions())
    choices = select_kernels(
        lowered,
        extract_tasks([lowered]),
        database=None,
        target=HOPPER,
        environment=detect_environment(HOPPER),
    )
    made = apply_choices(lowered.mod, choices)
    plain = without_dependent_launch(made)
    dependent = [name for name in lowered.kernels if _TAG in list((made[name].attrs or {}).get(_ATTR, []))]
    assert any(name.startswith("attention") for name in dependent)
    for name in lowered.kernels:
        assert _TAG not in list((plain[name].attrs or {}).get(_ATTR, []))
        assert plain[name].body.same_as(made[name].body)
        assert len(plain[name].params) == len(made[name].params)
