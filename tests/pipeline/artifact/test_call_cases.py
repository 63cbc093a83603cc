"""The table of calls, as the Python runtime keeps it; `test_cpp_runtime` has the C++ runtime keep the same."""

from __future__ import annotations

import re

import pytest

from relaxtune.pipeline.artifact.calls.bucket_routing import RouteStatistics
from relaxtune.pipeline.artifact.module import Module
from relaxtune.pipeline.errors import PipelineError
from tests.pipeline.artifact.call_cases import ARTIFACTS, CASES, CallCase, without_quotes


@pytest.fixture(scope="module")
def modules(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Module]:
    return {name: Module.load(build(tmp_path_factory.mktemp(name))) for name, build in ARTIFACTS.items()}


def _counts(found: RouteStatistics) -> dict[str, int]:
    exact, padded = (sum(getattr(one, route) for one in found.buckets) for route in ("exact", "padded"))
    return {"exact": exact, "padded": padded, "symbolic": found.slow_path}


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.artifact}-{case.route or 'refused'}")
def test_python_keeps_the_table(modules: dict[str, Module], case: CallCase) -> None:
    module = modules[case.artifact]
    before = _counts(module.statistics)
    if not case.route:
        with pytest.raises(PipelineError) as refused:
            module.run(case.inputs)
        assert re.search(without_quotes(case.said), without_quotes(str(refused.value)))
        return
    module.run(case.inputs)
    after = _counts(module.statistics)
    taken = [route for route, count in after.items() if count > before[route]]
    # An artifact without buckets counts nothing.
    assert taken == ([case.route] if module.manifest.buckets is not None else [])
