"""`Registry`: a store of artifacts and the tags that the database moves over them.

`promote` runs the gate against what the tag stands at; `rollback` goes back one step. Each move is one transaction of
the database, then one rename in the store: a process that loads by the link has the old artifact or the new one, whole.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

from relaxtune.pipeline.artifact.directory import load_manifest
from relaxtune.pipeline.artifact.manifest import MANIFEST_FILE
from relaxtune.pipeline.environment import user_here
from relaxtune.pipeline.errors import ArtifactError, GateRefusedError, UsageError
from relaxtune.pipeline.registry.remote import RemoteStore
from relaxtune.pipeline.registry.store import ArtifactStore
from relaxtune.tuning_db.records import utc_now
from relaxtune.tuning_db.store import TuningDatabase
from relaxtune.tuning_db.tags import MoveKind, TagMove, list_moves, record_move, stood_at

if TYPE_CHECKING:
    from relaxtune.pipeline.gate.gate import GateLimits, GateReport
    from relaxtune.pipeline.validate.builds import Arrays

_TAG = re.compile(r"[a-z0-9][a-z0-9._-]{0,63}")
# Steps that a tag can be rolled back after a collection, and seconds that an artifact is kept that no tag needs.
KEPT_STEPS = 5
KEPT_SECONDS = 24 * 3600.0

Store = ArtifactStore | RemoteStore


@dataclass(frozen=True)
class StoredArtifact:
    """An artifact of the store."""

    key: str
    place: str  # Where the store has it.
    model: str
    target: str
    precision: str | None
    bytes: int
    validated: bool | None  # Whether it agreed with ONNX Runtime; None where it was never compared.
    tags: tuple[str, ...]  # Tags that stand at it.
    before: tuple[str, ...]  # Tags that can be rolled back to it.
    added_at: datetime


@dataclass(frozen=True)
class Promotion:
    """A tag that was moved, and what the gate found; None where the tag stood nowhere before."""

    move: TagMove
    gate: GateReport | None


class Registry:
    """A store with the tags of a database.

    The store is a folder, or a URL of fsspec (`s3://bucket/folder`); the first artifact makes it. The database is open
    to write, and has the history of the tags.
    """

    def __init__(self, store: Path | str, database: TuningDatabase) -> None:
        """Hold both; links that a killed process left behind follow the database again with the next move."""
        self.store = open_store(store)
        self._database = database

    def artifacts(self) -> tuple[StoredArtifact, ...]:
        """Return what is in the store, the newest first."""
        stacks = self._stacks()
        found = [self._stored(key, stacks) for key in self.store.list_keys()]
        return tuple(sorted(found, key=lambda one: one.added_at, reverse=True))

    def tags(self) -> dict[str, str]:
        """Return where the tags stand: tag -> key."""
        return {tag: stack[-1] for tag, stack in self._stacks().items() if stack}

    def history(self, tag: str | None = None) -> tuple[TagMove, ...]:
        """Return the moves of a tag, or of all, the oldest first."""
        return tuple(list_moves(self._database, tag))

    def tag(self, artifact: str | Path, tag: str, why: str = "") -> TagMove:
        """Set a tag to an artifact, by directory, tag or key; a directory is copied into the store. No gate is run.

        Raises `ArtifactError`, `UsageError`, `TuningDatabaseError`: there is no such artifact, the tag cannot be one,
        or another process moved it meanwhile.
        """
        _require_tag(tag)
        key, number = self._put(artifact), len(list_moves(self._database, tag))
        return self._move(TagMove(tag, number + 1, MoveKind.TAG, key, user_here(), why))

    def promote(
        self,
        artifact: str | Path,
        tag: str,
        why: str = "",
        limits: GateLimits | None = None,
        *,
        model: str | Path | None = None,
        inputs: Arrays | Sequence[Arrays] | None = None,
        force: bool = False,
        on_gate: Callable[[GateReport], None] = lambda _: None,
    ) -> Promotion:
        """Set a tag to an artifact if the gate says yes to it in place of the one that the tag stands at.

        A tag that stands nowhere needs an artifact that was validated.

        `limits`, `model`, `inputs`: the limits of the artifact, where the ONNX model is, and the inputs of both.
        `force`: whether a no moves the tag all the same; the history keeps both. `on_gate`: called with the gate's
        report, before a no ends the promotion.
        Raises `GateRefusedError`: the gate says no; nothing is moved; `ArtifactError`, `UsageError`,
        `TuningDatabaseError`: as `tag`, also where another process moved the tag while the gate ran.
        """
        # A gate runs artifacts; no other word of a registry needs TVM.
        from relaxtune.pipeline.gate.checks import Verdict, check_validation
        from relaxtune.pipeline.gate.gate import run_gate

        _require_tag(tag)
        key = self._put(artifact)
        moves = list_moves(self._database, tag)
        stack = stood_at(moves)
        place = self.store.path_of(key)
        report = None
        if stack:
            before = self.store.path_of(stack[-1])
            report = run_gate(place, before, limits, source=model, inputs=inputs, database=self._database)
            on_gate(report)
            if not force:
                report.raise_if_refused()
        else:
            first = check_validation(load_manifest(place))
            if first.verdict is Verdict.NO and not force:
                raise GateRefusedError(f"{artifact} may not be {tag}: {first.reason}")
        found = None if report is None else json.dumps(report.summary())
        move = TagMove(tag, len(moves) + 1, MoveKind.PROMOTE, key, user_here(), why, found)
        return Promotion(self._move(move), report)

    def rollback(self, tag: str, why: str = "") -> TagMove:
        """Set a tag back to the artifact that it stood at before, whose own roll-backs are undone already.

        Raises `UsageError`: it stood at none before; `ArtifactError`: that artifact is no longer in the store.
        """
        moves = list_moves(self._database, tag)
        stack = stood_at(moves)
        if len(stack) < 2:
            raise UsageError(
                f"tag {tag} stood at {'no artifact' if not stack else 'one artifact only'}: there is no way back"
            )
        self.store.require(stack[-2])
        return self._move(TagMove(tag, len(moves) + 1, MoveKind.ROLLBACK, stack[-2], user_here(), why))

    def remove_tag(self, tag: str, why: str = "") -> TagMove:
        """Take a tag away; its artifacts are collected later unless other tags need them.

        Raises `UsageError`: there is no such tag.
        """
        moves = list_moves(self._database, tag)
        if not stood_at(moves):
            raise UsageError(
                f"there is no tag {tag}; expected one of {', '.join(self.tags()) or 'none, for none is set'}"
            )
        return self._move(TagMove(tag, len(moves) + 1, MoveKind.REMOVE, None, user_here(), why))

    def collect(self, *, steps: int = KEPT_STEPS, older_than_s: float = KEPT_SECONDS) -> tuple[str, ...]:
        """Remove the artifacts that nothing needs, and return their keys.

        Kept are those that a tag stands at or can be rolled back to in so many steps, those that a link leads to, and
        those that have been here for less than `older_than_s`.
        """
        with self.store.lock(alone=True):
            # Read behind the lock: a tag that another process sets now waits.
            needed = {key for stack in self._stacks().values() for key in stack[-1 - steps :]}
            needed |= set(self.store.links().values())
            now = utc_now()
            gone = [
                key
                for key in self.store.list_keys()
                if key not in needed and (now - self.store.added_at(key)).total_seconds() >= older_than_s
            ]
            for key in gone:
                self.store.remove(key)
        return tuple(gone)

    def find(self, name: str) -> StoredArtifact:
        """Return an artifact of the store by tag or key.

        Raises `ArtifactError`: there is none.
        """
        stacks = self._stacks()
        known = stacks.get(name)
        return self._stored(known[-1] if known else find_key(name, self.store), stacks)

    def _put(self, artifact: str | Path) -> str:
        """Return the key of an artifact, which is in the store and in the database then."""
        stack = self._stacks().get(str(artifact))
        place = self.store.path_of(stack[-1]) if stack else find_artifact(str(artifact), self.store)
        kept = self.store.put(place)
        self._database.record_artifact(kept)
        return kept.key

    def _move(self, move: TagMove) -> TagMove:
        with self.store.lock():
            if move.artifact_key is not None:
                self.store.require(move.artifact_key)  # not collected meanwhile
            record_move(self._database, move)
            links = self.store.links()
            for tag, stack in self._stacks().items():
                key = stack[-1] if stack else None
                if links.get(tag) != key:
                    self.store.link(tag, key)
        return move

    def _stacks(self) -> dict[str, list[str]]:
        moves: dict[str, list[TagMove]] = {}
        for move in list_moves(self._database):
            moves.setdefault(move.tag, []).append(move)
        return {tag: stood_at(of_tag) for tag, of_tag in moves.items()}

    def _stored(self, key: str, stacks: dict[str, list[str]]) -> StoredArtifact:
        manifest = self.store.manifest_of(key)
        validation = manifest.validation
        return StoredArtifact(
            key=key,
            place=self.store.place_of(key),
            model=manifest.model,
            target=manifest.target.text,
            precision=manifest.precision,
            bytes=sum(entry.bytes for entry in manifest.files.values()),
            validated=None if validation is None else validation.get("passed") is True,
            tags=tuple(tag for tag, stack in stacks.items() if stack and stack[-1] == key),
            before=tuple(tag for tag, stack in stacks.items() if key in stack[:-1]),
            added_at=self.store.added_at(key),
        )


def _require_tag(tag: str) -> None:
    if not _TAG.fullmatch(tag):
        raise UsageError(
            f"{tag!r} cannot be a tag; expected up to 64 small letters, digits, '.', '_' and '-', such as prod"
        )


def open_store(place: Path | str) -> Store:
    """Return the store in a folder or at a URL.

    Raises `ArtifactError`: fsspec, or what it needs for the URL, is not installed, or does not know it.
    """
    return RemoteStore(place) if isinstance(place, str) and "://" in place else ArtifactStore(Path(place))


def find_artifact(name: str, store: Store) -> Path:
    """Return the directory of an artifact by its path, or by its tag or the start of its key in a store.

    Raises `ArtifactError`: it is none of them, or the start of several keys.
    """
    path = Path(name)
    return path if (path / MANIFEST_FILE).is_file() else store.path_of(find_key(name, store))


def find_key(name: str, store: Store) -> str:
    """Return the key of an artifact of a store by its tag, or by the start of the key.

    Raises `ArtifactError`: it is neither, or the start of several keys.
    """
    links = store.links()
    if name in links:
        return links[name]
    keys = [key for key in store.list_keys() if len(name) >= 4 and key.startswith(name)]
    if len(keys) == 1:
        return keys[0]
    what = f"the start of {len(keys)} artifacts" if keys else "no artifact's directory, tag or key"
    raise ArtifactError(
        f"{name} is {what}; store {store.name} has the tags {', '.join(links) or 'none'}, and "
        f"`relaxtune artifact list --store {store.name}` says what else"
    )
