"""Pages on artifacts: lists with tags, one artifact's report, two beside each other."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from urllib.parse import quote

from markupsafe import Markup

from relaxtune.pipeline.dashboard.gate_pages import gate_link, gate_list
from relaxtune.pipeline.dashboard.markup import Page, Section, sections
from relaxtune.pipeline.pages.render import link, minute, number, table
from relaxtune.pipeline.report.diff import diff_reports
from relaxtune.pipeline.report.page import diff_section, section
from relaxtune.pipeline.report.report import Report, report_artifact
from relaxtune.tuning_db.errors import NotFoundError
from relaxtune.tuning_db.gates import list_gates, newest_gates
from relaxtune.tuning_db.questions.artifacts import ArtifactSummary, artifacts
from relaxtune.tuning_db.store import TuningDatabase
from relaxtune.tuning_db.tags import TagMove, list_moves, stood_at

# Other artifacts of the model that a page offers to compare with.
_LISTED = 25
_COLUMNS = ("artifact", "made (UTC)", "target", "validated", "ms")
_LEFT = frozenset({"", "artifact", "made (UTC)", "target", "validated", "tags", "gate"})


def artifact_list(database: TuningDatabase, found: Sequence[ArtifactSummary]) -> Markup:
    """Return a table of artifacts, each with the tags that stand at it and the verdict of its last gate."""
    moves = list_moves(database)
    tags, gates = _tags(moves), newest_gates(database, [one.key for one in found])
    rows = [(*_summary(one), ", ".join(tags.get(one.key, ())), gate_link(gates.get(one.key))) for one in found]
    return table((*_COLUMNS, "tags", "gate"), rows, _LEFT)


def artifact(database: TuningDatabase, key: str) -> Page:
    """Return what tags and gates say of an artifact, and its report, as long as its folder is where it was written."""
    found = _find(database, key)
    others = [one for one in artifacts(database, model=found.model, limit=_LISTED) if one.key != found.key]
    links = [link(f"/compare?before={one.key}&after={found.key}", minute(one.created_at)) for one in others]
    compared = Markup("<p>Compare with the artifact of {}.</p>").format(Markup(" ").join(links)) if links else Markup()
    return Page(f"artifact {found.model}", compared + section(_report(database, found)) + _moves(database, key))


def compare(database: TuningDatabase, before: str, after: str) -> Page:
    """Return two artifacts beside each other, kernel by kernel."""
    old, new = (_find(database, key) for key in (before, after))
    rows = [(side, *_summary(one)) for side, one in (("before", old), ("after", new))]
    diff = diff_reports(_report(database, old), _report(database, new))
    return Page(f"compare {new.model}", diff_section(diff) + table(("", *_COLUMNS), rows, _LEFT))


def _moves(database: TuningDatabase, key: str) -> Markup:
    """Return the gates of an artifact, newest first, and the moves of tags to it."""
    gates = list_gates(database, artifact_key=key, limit=_LISTED)
    moves = [move for move in list_moves(database) if move.artifact_key == key]
    rows = [(one.tag, one.kind.value, minute(one.created_at), one.by, one.why, _gate(one)) for one in moves]
    parts = [
        *([Section("Gates", gate_list(gates))] if gates else []),
        *([Section("Tags", table(("tag", "move", "when (UTC)", "by", "why", "gate"), rows))] if rows else []),
    ]
    return sections("Gates and tags", parts) if parts else Markup()


def _gate(move: TagMove) -> str:
    if move.gate is None:
        return "none was run"
    return "passed" if json.loads(move.gate).get("passed") is True else "refused, moved by force"


def _summary(one: ArtifactSummary) -> tuple[object, ...]:
    state = None if one.validation is None else one.validation.passed
    own = [arm.latency_us for arm in one.benchmarks if arm.arm.startswith("relaxtune")]
    name = link(f"/artifacts/{quote(one.key)}", one.model)
    return (
        name,
        minute(one.created_at),
        f"{one.target_kind} {one.arch}",
        {None: "never", True: "passed", False: "FAILED"}[state],
        number(own[0] / 1e3 if own else None),
    )


def _tags(moves: Sequence[TagMove]) -> Mapping[str, list[str]]:
    of_tag: dict[str, list[TagMove]] = {}
    for move in moves:
        of_tag.setdefault(move.tag, []).append(move)
    standing: dict[str, list[str]] = {}
    for tag, its_moves in of_tag.items():
        stack = stood_at(its_moves)
        if stack:
            standing.setdefault(stack[-1], []).append(tag)
    return standing


def _find(database: TuningDatabase, key: str) -> ArtifactSummary:
    found = artifacts(database, key=key)
    if not found:
        raise NotFoundError(f"no artifact {key} in this database")
    return found[0]


def _report(database: TuningDatabase, one: ArtifactSummary) -> Report:
    return report_artifact(Path(one.location), database=database)
