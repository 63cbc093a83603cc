"""A gate's report for a terminal, for a pull request (Markdown) and for CI (JUnit XML)."""

from __future__ import annotations

import re
from xml.etree import ElementTree

from relaxtune.pipeline.gate.checks import Check, Verdict
from relaxtune.pipeline.gate.gate import GateReport
from relaxtune.pipeline.printed_tables import TableView

_COLUMNS = ("check", "baseline", "new", "change", "limit", "verdict", "why")


def render(report: GateReport) -> TableView:
    """Return the report as a table for a terminal."""
    conditions = ", ".join(f"{name} {value}" for name, value in report.conditions.items())
    title = f"{report.new} beside {report.baseline}: {_outcome(report)}"
    return TableView(title, _COLUMNS, tuple(map(_cells, report.checks)), conditions)


def to_markdown(report: GateReport) -> str:
    """Return the report as a Markdown table, with a line above that says what came out."""
    lines = [
        f"### {_escape(report.model)}: {_outcome(report)}",
        "",
        f"`{_escape(report.new)}` beside `{_escape(report.baseline)}`",
        "",
        f"| {' | '.join(_COLUMNS)} |",
        f"|{'---|' * len(_COLUMNS)}",
        *(f"| {' | '.join(map(_escape, _cells(check)))} |" for check in report.checks),
        "",
        ", ".join(f"{name} {_escape(value)}" for name, value in report.conditions.items()),
    ]
    return "\n".join(lines) + "\n"


def to_junit(report: GateReport) -> str:
    """Return the report as JUnit XML: a test case for each check, skipped where nothing was decided."""
    refused = report.refusals
    undecided = [check for check in report.checks if check not in refused and check.verdict is not Verdict.YES]
    suite = ElementTree.Element(
        "testsuite",
        name=f"relaxtune gate {_xml(report.model)}",
        tests=str(len(report.checks)),
        failures=str(len(refused)),
        skipped=str(len(undecided)),
        time=f"{sum(found.seconds for found in report.latencies.values()):.3f}",
    )
    for check in report.checks:
        case = ElementTree.SubElement(suite, "testcase", classname=f"gate.{_xml(report.model)}", name=_xml(check.name))
        text = _xml(f"{check.change} {check.limit}: {check.reason}".strip())
        if check in refused:
            ElementTree.SubElement(case, "failure", message=text).text = text
        elif check in undecided:
            ElementTree.SubElement(case, "skipped", message=text)
        else:
            ElementTree.SubElement(case, "system-out").text = text
    ElementTree.indent(suite)
    return '<?xml version="1.0" encoding="utf-8"?>\n' + ElementTree.tostring(suite, encoding="unicode") + "\n"


def _outcome(report: GateReport) -> str:
    if not report.passed:
        return "NO"
    undecided = any(check.verdict is Verdict.UNDECIDED for check in report.checks)
    return "yes, latency undecided" if undecided else "yes"


def _cells(check: Check) -> tuple[str, ...]:
    verdict = check.verdict.value
    return (
        check.name, check.baseline, check.new, check.change, check.limit,
        verdict.upper() if check.verdict is Verdict.NO else verdict, check.reason,
    )  # fmt: skip


def _escape(text: str) -> str:
    """Return a text as one cell of a Markdown table."""
    return re.sub(r"([\\|`<>*_\[\]])", r"\\\1", " ".join(text.split()))


def _xml(text: str) -> str:
    """Return a text without the characters that XML cannot hold."""
    return re.sub(r"[^\t\n\r\u0020-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]", "?", text)
