"""Pages on artifacts: lists with tags and verdicts of gates, one artifact's report, two beside each other."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

from relaxtune.pipeline.dashboard.markup import Html, Markup, Page, link, minute, row, rows_table
from relaxtune.pipeline.report.diff import diff_reports
from relaxtune.pipeline.report.html import diff_section, number, section
from relaxtune.pipeline.report.report import Report, report_artifact
from relaxtune.tuning_db.contract import TuningDatabase
from relaxtune.tuning_db.errors import NotFoundError
from relaxtune.tuning_db.questions.artifacts import ArtifactSummary, artifacts
from relaxtune.tuning_db.tags import TagMove, list_moves, stood_at

# Other artifacts of the model that a page offers to compare with.
_LISTED = 25
_COLUMNS = ("artifact", "made (UTC)", "target", "validated", "ms")
_LEFT = frozenset({"", "artifact", "made (UTC)", "target", "validated", "tags", "gate", "why"})


def artifact_list(database: TuningDatabase, found: Sequence[ArtifactSummary]) -> Html:
    """Return a table of artifacts, each with the tags that stand at it and the verdict of its last gate."""
    moves = list_moves(database)
    tags, gates = _tags(moves), {move.artifact_key: move for move in moves if move.gate is not None}
    rows = [row(*_summary(one), ", ".join(tags.get(one.key, ())), _verdict(gates.get(one.key))) for one in found]
    return rows_table((*_COLUMNS, "tags", "gate"), rows, _LEFT)


def artifact(database: TuningDatabase, key: str) -> Page:
    """Return what tags and gates say of an artifact, and its report, as long as its folder is where it was written."""
    found = _find(database, key)
    others = [one for one in artifacts(database, model=found.model, limit=_LISTED) if one.key != found.key]
    links = " ".join(
        link(f"/compare?before={one.key}&after={found.key}", minute(one.created_at)).html for one in others
    )
    compared = f"<p>Compare with the artifact of {links}.</p>" if links else ""
    return Page(f"artifact {found.model}", compared + section(_report(database, found)) + _moves(database, key))


def compare(database: TuningDatabase, before: str, after: str) -> Page:
    """Return two artifacts beside each other, kernel by kernel."""
    old, new = (_find(database, key) for key in (before, after))
    rows = [row(side, *_summary(one)) for side, one in (("before", old), ("after", new))]
    diff = diff_reports(_report(database, old), _report(database, new))
    return Page(f"compare {new.model}", diff_section(diff) + rows_table(("", *_COLUMNS), rows, _LEFT))


def _moves(database: TuningDatabase, key: str) -> Html:
    """Return the moves of tags to an artifact, and every check of the gates that were run for them."""
    moves = [move for move in list_moves(database) if move.artifact_key == key]
    if not moves:
        return ""
    rows = [row(one.tag, one.kind.value, minute(one.created_at), one.by, one.why, _verdict(one)) for one in moves]
    columns = ("tag", "move", "when (UTC)", "by", "why", "gate")
    parts = ["<h2>Tags</h2>", rows_table(columns, rows, {*columns})]
    for move in moves:
        gate = _gate(move)
        if gate:
            told = ("name", "verdict", "baseline", "new", "change", "limit", "reason")
            checks = [row(*(str(check.get(name, "")) for name in told)) for check in gate.get("checks", ())]
            parts += [f"<h2>Gate of {minute(move.created_at)}</h2>", rows_table(told, checks, {*told})]
    return "".join(parts)


def _gate(move: TagMove | None) -> Mapping[str, Any]:
    return {} if move is None or move.gate is None else json.loads(move.gate)


def _verdict(move: TagMove | None) -> str:
    gate = _gate(move)
    if not gate:
        return ""
    if gate.get("passed"):
        return "passed"
    refused = [str(check.get("name")) for check in gate.get("checks", ()) if check.get("verdict") == "no"]
    return f"REFUSED ({', '.join(refused) or 'undecided'}), moved by force"


def _summary(one: ArtifactSummary) -> tuple[object, ...]:
    state = None if one.validation is None else one.validation.passed
    own = [arm.latency_us for arm in one.benchmarks if arm.arm.startswith("relaxtune")]
    name: Markup = link(f"/artifacts/{quote(one.key)}", one.model)
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
