"""Pages on artifacts: lists with tags, one artifact's report, two side by side, and gates between two."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

from markupsafe import Markup

from relaxtune.pipeline.dashboard.markup import Page, Section, sections
from relaxtune.pipeline.pages.render import link, minute, number, table
from relaxtune.pipeline.report.diff import diff_reports
from relaxtune.pipeline.report.page import diff_section, section
from relaxtune.pipeline.report.report import Report, report_artifact
from relaxtune.tuning_db.errors import NotFoundError
from relaxtune.tuning_db.gates import GateRun, list_gates, newest_gates
from relaxtune.tuning_db.questions.artifacts import ArtifactSummary, artifacts
from relaxtune.tuning_db.store import TuningDatabase
from relaxtune.tuning_db.tags import TagMove, list_moves, stood_at

# Other artifacts of the model that a page offers to compare with.
_LISTED = 25
_COLUMNS = ("artifact", "made (UTC)", "target", "validated", "ms")
_LEFT = frozenset({"", "artifact", "made (UTC)", "target", "validated", "tags", "gate"})
_GATES_LISTED = 100
# The verdict stands in front: on a narrow window the last columns are out of sight.
_GATE_COLUMNS = ("run (UTC)", "verdict", "artifact", "latency", "baseline", "by")
_CHECK = ("name", "verdict", "baseline", "new", "change", "limit", "reason")
# Of a key: as many tell artifacts apart.
_KEY_DIGITS = 12
# The name of a check of latency begins so; a bucket's name follows.
_LATENCY = "latency"


def artifact_list(database: TuningDatabase, found: Sequence[ArtifactSummary]) -> Markup:
    """Return a table of artifacts, each with the tags that stand at it and the verdict of its last gate."""
    moves = list_moves(database)
    tags, newest = _tags(moves), newest_gates(database, [one.key for one in found])
    rows = []
    for one in found:
        run = newest.get(one.key)
        last = "" if run is None else link(f"/gates/{quote(run.id)}", verdict(run))
        rows.append((*_summary(one), ", ".join(tags.get(one.key, ())), last))
    return table((*_COLUMNS, "tags", "gate"), rows, _LEFT)


def artifact(database: TuningDatabase, key: str) -> Page:
    """Return what tags and gates say of an artifact, and its report, as long as its folder is where it was written."""
    found = _find(database, key)
    others = [one for one in artifacts(database, model=found.model, limit=_LISTED) if one.key != found.key]
    links = [link(f"/compare?before={one.key}&after={found.key}", minute(one.created_at)) for one in others]
    compared = Markup("<p>Compare with the artifact of {}.</p>").format(Markup(" ").join(links)) if links else Markup()
    return Page(f"artifact {found.model}", compared + section(_report(database, found)) + _moves(database, key))


def compare(database: TuningDatabase, before: str, after: str) -> Page:
    """Return two artifacts side by side, kernel by kernel."""
    old, new = (_find(database, key) for key in (before, after))
    rows = [(side, *_summary(one)) for side, one in (("before", old), ("after", new))]
    diff = diff_reports(_report(database, old), _report(database, new))
    return Page(f"compare {new.model}", diff_section(diff) + table(("", *_COLUMNS), rows, _LEFT))


def _moves(database: TuningDatabase, key: str) -> Markup:
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
    standing: defaultdict[str, list[str]] = defaultdict(list)
    for tag in dict.fromkeys(move.tag for move in moves):
        stack = stood_at([move for move in moves if move.tag == tag])
        if stack:
            standing[stack[-1]].append(tag)
    return standing


def _find(database: TuningDatabase, key: str) -> ArtifactSummary:
    found = artifacts(database, key=key)
    if not found:
        raise NotFoundError(f"no artifact {key} in this database")
    return found[0]


def _report(database: TuningDatabase, one: ArtifactSummary) -> Report:
    return report_artifact(Path(one.location), database=database)


def gates(database: TuningDatabase) -> Page:
    """Return the newest gates, passed and refused, with the change of latency that each saw."""
    found = list_gates(database, limit=_GATES_LISTED)
    none = Markup("<p>None yet: `relaxtune gate --db` and `relaxtune artifact promote` keep theirs.</p>")
    return Page("gates", sections("Gates", [Section("", gate_list(found) if found else none)]))


def gate(database: TuningDatabase, gate_id: str) -> Page:
    """Return one gate: its checks, and what the latencies are true for."""
    found = list_gates(database, gate_id=gate_id)
    if not found:
        raise NotFoundError(f"no gate {gate_id} in this database")
    one = found[0]
    checks = [[check.get(name, "") for name in _CHECK] for check in _checks(one)]
    measured = dict(json.loads(one.report).get("conditions") or {})
    conditions = ", ".join(f"{name} {value}" for name, value in measured.items())
    compared = f"/compare?before={one.baseline_key}&after={one.artifact_key}"
    subtitle = Markup("{} in place of {}, by {}, {} UTC.").format(
        _artifact(one.artifact_key), _artifact(one.baseline_key), one.by, minute(one.created_at)
    )
    parts = [
        Section("", table(_CHECK, checks), conditions),
        Section("", link(compared, "Both, kernel by kernel") if one.baseline_key else Markup()),
    ]
    return Page(f"gate {one.model}", sections(f"{one.model}: {verdict(one)}", parts, subtitle=subtitle))


def gate_list(found: Sequence[GateRun]) -> Markup:
    """Return a table of gates."""
    rows = [
        (
            link(f"/gates/{quote(one.id)}", minute(one.created_at)),
            verdict(one),
            link(f"/artifacts/{quote(one.artifact_key)}", one.model),
            "; ".join(
                str(check.get("change", ""))
                for check in _checks(one)
                if str(check.get("name", "")).startswith(_LATENCY)
            ),
            _artifact(one.baseline_key),
            one.by,
        )
        for one in found
    ]
    return table(_GATE_COLUMNS, rows)


def verdict(one: GateRun) -> str:
    """Return what a gate said; of a refusal, the checks that say no."""
    if one.passed:
        return "passed"
    refused = [str(check.get("name")) for check in _checks(one) if check.get("verdict") == "no"]
    return f"REFUSED ({', '.join(refused) or 'undecided'})"


def _artifact(key: str | None) -> Markup:
    return (
        Markup("an artifact that was not kept") if key is None else link(f"/artifacts/{quote(key)}", key[:_KEY_DIGITS])
    )


def _checks(one: GateRun) -> Sequence[Mapping[str, Any]]:
    return [check for check in json.loads(one.report).get("checks", ()) if isinstance(check, dict)]
