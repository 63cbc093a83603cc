"""`relaxtune artifact`: tag, list, show, promote, rollback and gc as a user types them."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from relaxtune.pipeline.artifact.directory import load_manifest, record_validation
from relaxtune.pipeline.cli.app import main

VALIDATION = {"passed": True, "samples": 3, "reference": "ort", "tolerance": {"rtol": 1e-4, "atol": 1e-4}}


def test_tags_move_over_artifacts_and_back(artifact_copy, artifact, tmp_path, capsys) -> None:
    new = artifact_copy()
    (new / "manifest.json").write_text(replace(load_manifest(new), model="newer").to_json(), encoding="utf-8")
    place = ["--store", tmp_path / "store", "--db", tmp_path / "tuning.db"]

    def call(*words: object, code: int = 0) -> list[dict] | dict:
        with pytest.raises(SystemExit) as ended:
            main([str(word) for word in ["artifact", *words, *place, "--format", "json"]])
        written = capsys.readouterr()
        assert int(ended.value.code or 0) == code, written.err
        return json.loads(written.out) if not code else {"error": written.err, "out": written.out}

    (move,) = call("tag", "prod", "--to", artifact, "--why", "the first")
    refused = call("promote", new, "prod", "--max-slowdown", "900%", "--seconds", 0.3, code=5)
    assert "validation" in refused["error"]
    assert json.loads(refused["out"])["passed"] is False
    record_validation(new, VALIDATION)
    (promoted,) = call("promote", new, "prod", "--max-slowdown", "900%", "--seconds", 0.3, "--why", "better")
    assert promoted["kind"] == "promote"
    listed = call("list")
    assert {(one["model"], tuple(one["tags"]), tuple(one["before"])) for one in listed} == {
        ("newer", ("prod",), ()), ("bert-tiny", (), ("prod",)),
    }  # fmt: skip
    (back,) = call("rollback", "prod")
    assert back["artifact_key"] == move["artifact_key"]
    shown = call("show", "prod")
    assert shown["artifact"]["model"] == "bert-tiny"
    assert [one["why"] for one in shown["history"]] == ["the first", "better", ""]
    assert call("gc", "--older-than", 0)["removed"] == [promoted["artifact_key"]]
    assert "needs --to ARTIFACT, or --remove" in call("tag", "prod", code=2)["error"]

    with pytest.raises(SystemExit):
        main([str(word) for word in ["artifact", "show", "prod", *place]])
    table = capsys.readouterr().out
    assert "history of prod" in table
    with pytest.raises(SystemExit) as ended:
        main(
            [
                "gate",
                str(new),
                "--baseline",
                "prod",
                "--store",
                str(tmp_path / "store"),
                "--max-slowdown",
                "900%",
                "--seconds",
                "0.3",
            ]
        )
    assert not ended.value.code
