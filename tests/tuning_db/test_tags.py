"""Tags: their moves in order, who wins of two, and where a rollback leads."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest

from relaxtune.tuning_db.artifacts import Artifact
from relaxtune.tuning_db.errors import NotFoundError
from relaxtune.tuning_db.tags import MoveKind, TagMove, TagMovedError, list_moves, record_move, stood_at

AT = datetime(2026, 11, 22, 12, tzinfo=UTC)


def keep(database, samples, name: str) -> str:
    artifact = Artifact(name, "0" * 64, samples.target(), '{"kernels":[]}', created_at=AT)
    database.record_artifact(artifact)
    return artifact.key


def move(number: int, key: str | None, kind: MoveKind = MoveKind.TAG, tag: str = "prod") -> TagMove:
    return TagMove(tag, number, kind, key, "ann@host", "a reason", '{"passed":true}', AT)


def test_moves_are_kept_in_order_for_each_tag(database, samples):
    a, b = keep(database, samples, "a"), keep(database, samples, "b")
    moves = [move(1, a), move(2, b, MoveKind.PROMOTE), move(1, a, tag="canary")]
    for one in moves:
        record_move(database, one)
    assert list_moves(database, "prod") == moves[:2]
    assert list_moves(database) == [moves[2], *moves[:2]]


def test_of_two_moves_with_one_number_the_first_wins(database, samples):
    a, b = keep(database, samples, "a"), keep(database, samples, "b")
    record_move(database, move(1, a))
    with pytest.raises(
        TagMovedError, match=r"Tag prod was moved by another process meanwhile: it is at move 1, expected 0"
    ):
        record_move(database, move(1, b))
    with pytest.raises(TagMovedError, match="expected 2"):
        record_move(database, move(3, b))
    assert [one.artifact_key for one in list_moves(database)] == [a]


def test_a_tag_needs_an_artifact_that_is_known(database):
    with pytest.raises(NotFoundError, match=r"No artifact k+ in the database"):
        record_move(database, move(1, "k" * 64))


def test_rollbacks_lead_back_step_by_step_and_a_new_tag_goes_on_from_there():
    way = [move(1, "a"), move(2, "b"), move(3, "c")]
    assert stood_at(way) == ["a", "b", "c"]
    way.append(move(4, "b", MoveKind.ROLLBACK))
    way.append(move(5, "a", MoveKind.ROLLBACK))
    assert stood_at(way) == ["a"]
    way.append(move(6, "d", MoveKind.PROMOTE))
    assert stood_at(way) == ["a", "d"]
    way.append(move(7, None, MoveKind.REMOVE))
    assert stood_at(way) == []
