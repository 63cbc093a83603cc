"""Pages on gates: whether an artifact could take the place of another, and each check of it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import quote

from markupsafe import Markup

from relaxtune.pipeline.dashboard.markup import Page, Section, sections
from relaxtune.pipeline.pages.render import link, minute, table
from relaxtune.tuning_db.errors import NotFoundError
from relaxtune.tuning_db.gates import GateRun, list_gates
from relaxtune.tuning_db.store import TuningDatabase

_LISTED = 100
# The verdict stands in front: on a narrow window the last columns are out of sight.
_COLUMNS = ("run (UTC)", "verdict", "artifact", "latency", "baseline", "by")
_CHECK = ("name", "verdict", "baseline", "new", "change", "limit", "reason")
# Of a key: as many tell artifacts apart.
_KEY_DIGITS = 12
# What begins the name of a check of latency; a bucket's stands behind it.
_LATENCY = "latency"


def gates(database: TuningDatabase) -> Page:
    """Return the newest gates, passed and refused, with the change of latency that each saw."""
    found = list_gates(database, limit=_LISTED)
    none = Markup("<p>None yet: `relaxtune gate --db` and `relaxtune artifact promote` keep theirs.</p>")
    return Page("gates", sections("Gates", [Section("", gate_list(found) if found else none)]))


def gate(database: TuningDatabase, gate_id: str) -> Page:
    """Return one gate: its checks, and what the latencies are true for."""
    found = list_gates(database, gate_id=gate_id)
    if not found:
        raise NotFoundError(f"no gate {gate_id} in this database")
    one, report = found[0], _report(found[0])
    checks = [[check.get(name, "") for name in _CHECK] for check in _checks(report)]
    conditions = ", ".join(f"{name} {value}" for name, value in dict(report.get("conditions") or {}).items())
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
                for check in _checks(_report(one))
                if str(check.get("name", "")).startswith(_LATENCY)
            ),
            _artifact(one.baseline_key),
            one.by,
        )
        for one in found
    ]
    return table(_COLUMNS, rows)


def gate_link(one: GateRun | None) -> Markup | str:
    """Return the verdict of a gate, which leads to its page; nothing where there is none."""
    return "" if one is None else link(f"/gates/{quote(one.id)}", verdict(one))


def verdict(one: GateRun) -> str:
    """Return what a gate said; of a refusal, the checks that say no."""
    if one.passed:
        return "passed"
    refused = [str(check.get("name")) for check in _checks(_report(one)) if check.get("verdict") == "no"]
    return f"REFUSED ({', '.join(refused) or 'undecided'})"


def _artifact(key: str | None) -> Markup:
    return (
        Markup("an artifact that was not kept") if key is None else link(f"/artifacts/{quote(key)}", key[:_KEY_DIGITS])
    )


def _report(one: GateRun) -> Mapping[str, Any]:
    report = json.loads(one.report)
    return report if isinstance(report, dict) else {}


def _checks(report: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    return [check for check in report.get("checks", ()) if isinstance(check, dict)]
