"""The registry: each artifact once, tags that move with their history, promotions by the gate, collecting."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from relaxtune.pipeline.artifact.directory import load_manifest, record_validation
from relaxtune.pipeline.errors import ArtifactError, GateRefusedError, UsageError
from relaxtune.pipeline.gate import gate as gate_module
from relaxtune.pipeline.gate.gate import GateLimits
from relaxtune.pipeline.gate.latency import LatencyLimit
from relaxtune.pipeline.registry.registry import Registry, find_artifact
from relaxtune.pipeline.registry.store import ArtifactStore
from relaxtune.tuning_db.store import TuningDatabase
from relaxtune.tuning_db.tags import MoveKind, TagMove, TagMovedError, list_moves, record_move

VALIDATION = {"passed": True, "samples": 3, "reference": "ort", "tolerance": {"rtol": 1e-4, "atol": 1e-4}}
LIMITS = GateLimits(LatencyLimit(9.0, seconds=0.3))


@pytest.fixture(params=["folder", "memory"])
def place(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return where a store can be: a folder, or a URL of fsspec."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return str(tmp_path / "store") if request.param == "folder" else f"memory://{tmp_path}"


@pytest.fixture
def registry(place: str, tmp_path: Path) -> Iterator[Registry]:
    with TuningDatabase.open(tmp_path / "tuning.db") as database:
        yield Registry(place, database)


@pytest.fixture
def build(artifact_copy, tmp_path: Path) -> Callable[..., Path]:
    """Return a maker of validated artifacts that are told apart by name."""

    def make(name: str, *, validated: bool = True) -> Path:
        place = artifact_copy().rename(tmp_path / name)
        manifest = replace(load_manifest(place), model=name)
        (place / "manifest.json").write_text(manifest.to_json(), encoding="utf-8")
        if validated:
            record_validation(place, VALIDATION)
        return place

    return make


def standing(registry: Registry, tag: str = "prod") -> str:
    """Return the model that a tag's link leads to, which must be where the database says it stands."""
    key = registry.store.links()[tag]
    assert key == registry.tags()[tag]
    return registry.store.manifest_of(key).model


def test_an_artifact_is_kept_once_and_found_by_path_tag_and_key(registry, build) -> None:
    a = build("a")
    first = registry.tag(a, "prod", "first")
    again = registry.tag(a, "canary")
    (stored,) = registry.artifacts()
    assert stored.key == first.artifact_key == again.artifact_key
    assert (stored.model, stored.validated, set(stored.tags)) == ("a", True, {"prod", "canary"})
    for name in (str(a), "prod", stored.key, stored.key[:8]):
        assert load_manifest(find_artifact(name, registry.store)).model == "a"
    assert registry.find("prod") == registry.find(stored.key[:6]) == stored
    with pytest.raises(
        ArtifactError, match=r"nothing is no artifact's directory, tag or key; .* has the tags canary, prod"
    ):
        find_artifact("nothing", registry.store)


def test_a_later_validation_of_the_same_artifact_is_taken_over(registry, build) -> None:
    a = build("a", validated=False)
    registry.tag(a, "prod")
    assert registry.find("prod").validated is None
    record_validation(a, VALIDATION)
    registry.tag(a, "prod")
    assert registry.find("prod").validated is True
    assert len(registry.artifacts()) == 1


def test_rollback_goes_back_step_by_step_and_the_history_keeps_all(registry, build) -> None:
    for name in "abc":
        registry.tag(build(name), "prod", f"because of {name}")
    assert standing(registry) == "c"
    registry.rollback("prod", "c is slow")
    assert standing(registry) == "b"
    registry.rollback("prod")
    assert standing(registry) == "a"
    with pytest.raises(UsageError, match="tag prod stood at one artifact only: there is no way back"):
        registry.rollback("prod")
    history = registry.history("prod")
    assert [move.kind.value for move in history] == ["tag", "tag", "tag", "rollback", "rollback"]
    assert history[3].why == "c is slow"
    assert "@" in history[3].by


def test_collecting_keeps_all_that_a_tag_needs(registry, build) -> None:
    for name in "abcd":
        registry.tag(build(name), "prod")
    registry.tag(build("e"), "canary")
    registry.remove_tag("canary")
    assert registry.collect() == ()  # all are younger than a day
    gone = registry.collect(steps=1, older_than_s=0)
    assert {one.model for one in registry.artifacts()} == {"c", "d"}
    assert len(gone) == 3
    assert standing(registry) == "d"
    registry.rollback("prod")
    assert standing(registry) == "c"
    with pytest.raises(ArtifactError, match="has no artifact"):
        registry.rollback("prod")
    assert standing(registry) == "c"


def test_collecting_keeps_what_a_link_of_another_database_needs(registry, build, place, tmp_path) -> None:
    with TuningDatabase.open(tmp_path / "other.db") as other:
        Registry(place, other).tag(build("a"), "theirs")
    assert registry.collect(steps=0, older_than_s=0) == ()


@pytest.mark.quick_cases("folder")
def test_promotion_is_by_the_gate(registry, build) -> None:
    with pytest.raises(GateRefusedError, match="may not be prod: it was not compared with ONNX Runtime"):
        registry.promote(build("unknown", validated=False), "prod", limits=LIMITS)
    assert registry.tags() == {}
    assert registry.promote(build("a"), "prod", limits=LIMITS).gate is None
    bad = build("b", validated=False)
    with pytest.raises(GateRefusedError, match="validation"):
        registry.promote(bad, "prod", limits=LIMITS)
    assert standing(registry) == "a"
    record_validation(bad, VALIDATION)
    done = registry.promote(bad, "prod", "quicker", LIMITS)
    assert done.gate is not None
    assert done.gate.passed
    assert standing(registry) == "b"
    assert '"passed": true' in str(registry.history("prod")[-1].gate)
    worse = build("c", validated=False)
    forced = registry.promote(worse, "prod", "no time", LIMITS, force=True)
    assert standing(registry) == "c"
    assert '"passed": false' in str(forced.move.gate)


def test_a_tag_that_moved_while_the_gate_ran_is_not_moved_again(registry, build, monkeypatch) -> None:
    registry.tag(build("a"), "prod")
    other, new = build("b"), build("c")

    def gate(*_arguments: object, **_options: object) -> object:
        registry.tag(other, "prod")
        return gate_report

    gate_report = type("Report", (), {"raise_if_refused": lambda _: None, "summary": lambda _: {}})()
    monkeypatch.setattr(gate_module, "run_gate", gate)
    with pytest.raises(TagMovedError, match="Tag prod was moved by another process meanwhile"):
        registry.promote(new, "prod")
    assert standing(registry) == "b"


def test_a_link_that_a_killed_process_left_behind_follows_the_database(registry, build) -> None:
    registry.tag(build("a"), "prod")
    key = registry.tag(build("b"), "canary").artifact_key
    record_move(registry._database, TagMove("prod", 2, MoveKind.TAG, key, "killed@here", ""))
    assert registry.store.manifest_of(registry.store.links()["prod"]).model == "a"
    registry.tag("canary", "spare")
    assert standing(registry) == "b"


def test_a_damaged_artifact_is_refused_and_leaves_nothing(registry, build) -> None:
    a = build("a")
    (a / "params.safetensors").write_bytes(b"broken")
    with pytest.raises(ArtifactError, match="was changed after it was written"):
        registry.tag(a, "prod")
    assert registry.artifacts() == ()
    assert list_moves(registry._database) == []


@pytest.mark.parametrize("tag", ["", "Prod", "../prod", "-x", "a" * 65, "a b"])
def test_what_cannot_be_a_tag_is_refused(registry, build, tag) -> None:
    with pytest.raises(UsageError, match="cannot be a tag; expected up to 64 small letters"):
        registry.tag("anything", tag)


def test_a_store_that_cannot_be_made_is_an_error_with_the_option(artifact, tmp_path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ArtifactError, match=r"cannot be used: .*; name another with --store"):
        ArtifactStore(tmp_path / "file" / "store").put(artifact)
