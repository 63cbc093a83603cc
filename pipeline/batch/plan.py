"""The plan of a batch: what its TOML file may say, and the messages for what it may not.

This file checks names, types and ranges. `cells` checks what they mean: models, shapes, targets.
"""

from __future__ import annotations

import difflib
import re
import tomllib
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic_core import ErrorDetails

from relaxtune.pipeline.errors import UsageError
from relaxtune.pipeline.precision.policy import POLICY_NAMES
from relaxtune.pipeline.tuning.options import Effort
from relaxtune.tuning_db.urls import DatabaseUrl, hide_secrets

Place = tuple[str | int, ...]

_HEADER = re.compile(r"\s*(\[\[?)\s*([^\[\]]+?)\s*\]\]?\s*(#.*)?$")
_KEY = re.compile(r"\s*([A-Za-z0-9_\-.\"' ]+?)\s*=")
_INLINE_KEY = re.compile(r"[{,]\s*([A-Za-z0-9_-]+)\s*=")
_STRINGS = re.compile(r"\"(?:[^\"\\]|\\.)*\"|'[^']*'")


class TomlLines:
    """Finds the line of a key, such as `("cells", 0, "models")`; the second `[[cells]]` table is `("cells", 1)`.

    `tomllib` has read the text.
    """

    def __init__(self, text: str) -> None:
        """Read the headers and keys; strings of several lines are taken for one line each."""
        self._lines = text.splitlines()
        self._starts: dict[Place, int] = {}
        table: Place = ()
        tables: Counter[Place] = Counter()
        depth = 0
        for number, line in enumerate(self._lines, start=1):
            bare = _STRINGS.sub(lambda found: "_" * len(found[0]), line).partition("#")[0]
            header, key = _HEADER.match(line), _KEY.match(line)
            if depth == 0 and header is not None:
                table = _parts(header[2])
                if header[1] == "[[":
                    tables[table] += 1
                elif len(table) > 1 and table[:1] in tables:
                    table = (table[0], tables[table[:1]] - 1, *table[1:])
                if header[1] == "[[":
                    table = (*table, tables[table] - 1)
                self._starts.setdefault(table, number)
            elif depth == 0 and key is not None:
                place = (*table, *_parts(key[1]))
                self._starts.setdefault(place, number)
                for inner in _INLINE_KEY.findall(bare):
                    self._starts.setdefault((*place, inner), number)
            depth += sum(map(bare.count, "[{")) - sum(map(bare.count, "]}")) if header is None or depth else 0

    def find(self, place: Sequence[str | int], value: object = None) -> int:
        """Return the line of a key, of the table around it where it is not there, and 1 where there is neither.

        `value` is a text of a list: its own line is returned where the list has several.
        """
        known = tuple(place)
        while known and known not in self._starts:
            known = known[:-1]
        start = self._starts.get(known, 1)
        if isinstance(value, str):
            later = [line for line in self._starts.values() if line > start]
            span = range(start, min(later, default=len(self._lines) + 1))
            return next((line for line in span if value in self._lines[line - 1]), start)
        return start


def _parts(key: str) -> Place:
    return tuple(part.strip().strip("\"'") for part in key.split("."))


#: The precision that keeps the dtypes of the graph.
OWN_PRECISION = "graph"
PRECISIONS = (OWN_PRECISION, *POLICY_NAMES)

Texts = Annotated[list[Annotated[str, Field(min_length=1)]], Field(min_length=1)]


class PlanError(UsageError):
    """A plan cannot be carried out as written; the message has a line for each fault, with the file's line."""


class _Table(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class LimitsTable(_Table):
    """Limits of an accepted artifact; see `pipeline.validate.acceptance.Limits`."""

    max_latency_ms: float | None = Field(default=None, gt=0)
    max_slowdown: float | None = Field(default=None, ge=0)
    rtol: float | None = Field(default=None, ge=0)
    atol: float | None = Field(default=None, ge=0)


class BudgetTable(_Table):
    """The budget of tuning, over the whole plan."""

    seconds: float | None = Field(default=None, gt=0)
    candidates: int | None = Field(default=None, gt=0)
    gpu_hours: float | None = Field(default=None, gt=0)

    def seconds_on(self, devices: int) -> float | None:
        """Return the seconds that so many devices may be used side by side; None where only candidates limit them."""
        shared = None if self.gpu_hours is None else 3600 * self.gpu_hours / devices
        return min((one for one in (self.seconds, shared) if one is not None), default=None)


class DefaultsTable(_Table):
    """Defaults of the `[[cells]]` tables."""

    # Each as `--shape` has it: `input_ids=1x128`. `""` keeps the model's own.
    shapes: list[str] | None = Field(default=None, min_length=1)
    buckets: list[str] | None = None  # Each as `--bucket` has it: `sequence=128,256`. All of them are of every cell.
    precisions: Texts | None = None
    targets: Texts | None = None
    # How many times each call of a cell's kernels counts in the choice of what to tune.
    importance: int | None = Field(default=None, ge=1)
    limits: LimitsTable = LimitsTable()
    tags: list[str] | None = None


class CellsTable(DefaultsTable):
    """A matrix: each model in each shape, in each precision, for each target."""

    models: Texts


class PlanTable(_Table):
    """The whole file; paths that are not absolute are relative to it."""

    name: str | None = Field(default=None, min_length=1)
    database: str = Field(default="relaxtune.db", min_length=1, repr=False)
    out: str = Field(default="out", min_length=1)
    effort: Annotated[Effort, Field(strict=False)] = Effort.NORMAL
    samples: int = Field(default=3, ge=1)
    seed: int = 0
    budget: BudgetTable = BudgetTable()
    defaults: DefaultsTable = DefaultsTable()
    cells: list[CellsTable] = Field(min_length=1)


@dataclass(frozen=True)
class Plan:
    """A plan that was read: its file, what it says, where it says it, and its text.

    `place` is a database in place of the one that it names: the text that a batch keeps has no password.
    """

    path: Path
    table: PlanTable
    lines: TomlLines
    text: str = field(default="", repr=False)
    place: DatabaseUrl | None = None

    @property
    def name(self) -> str:
        """The plan's name; its file's name where it has none."""
        return self.table.name or self.path.stem

    @property
    def out(self) -> Path:
        """The folder of the artifacts."""
        return self.path.parent / self.table.out

    @property
    def database(self) -> DatabaseUrl:
        """File or URL of the tuning database."""
        if self.place is not None:
            return self.place
        text = self.table.database
        return DatabaseUrl.of(text if "://" in text else self.path.parent / text)

    def fault(self, place: Sequence[str | int], fault: str, value: object = None) -> str:
        """Return a line of a `PlanError`: where, which key, what."""
        # A place as people write it: `cells[1].limits.rtol`.
        key = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in place).removeprefix(".")
        where = f"{self.path}:{self.lines.find(place, value)}"
        return f"{where}: {key}: {fault}" if place else f"{where}: {fault}"


def read_plan(path: str | Path) -> Plan:
    """Return the plan in a file; nothing is loaded or started.

    Raises `PlanError`: the file cannot be read, is no TOML, or has a key or a value that a plan does not have.
    """
    from relaxtune.models.files import read_regular

    path = Path(path)
    try:
        text = read_regular(path).decode("utf-8-sig")
    except (OSError, UnicodeDecodeError) as e:
        raise PlanError(f"the plan {path} cannot be read ({e}); expected a TOML file, see docs/batch.md") from e
    return parse_plan(path, text)


def parse_plan(path: Path, text: str) -> Plan:
    """Return the plan of a file's text, as `read_plan` does; its relative paths are relative to the file."""
    try:
        data = tomllib.loads(text)
    except tomllib.TOMLDecodeError as e:
        found = re.search(r"at line (\d+)", str(e))
        line = int(found[1]) if found else len(text.splitlines()) or 1
        raise PlanError(f"{path}:{line}: this is no TOML: {e}. Text is in quotes, lists in brackets") from e
    except RecursionError as e:
        raise PlanError(f"{path}: lists or tables are nested too deeply; a plan has them two or three deep") from e
    lines = TomlLines(text)
    try:
        return Plan(path, PlanTable.model_validate(data), lines, text)
    except ValidationError as e:
        plan = Plan(path, PlanTable.model_construct(), lines)
        raise plan_error(plan.fault(one["loc"], _describe(one), one.get("input")) for one in e.errors()) from e


def plan_error(faults: Iterable[str]) -> PlanError:
    """Return the error that tells all faults, a line each."""
    return PlanError("\n".join(faults))


def nearest(text: str, known: Iterable[str]) -> str:
    """Return "; did you mean ...?" where one of the known names is near, else ""."""
    close = difflib.get_close_matches(text.lower(), list(known), n=1, cutoff=0.5)
    return f"; did you mean {close[0]}?" if close else ""


def _describe(error: ErrorDetails) -> str:
    place, given = error["loc"], hide_secrets(repr(error["input"]))
    if error["type"] == "extra_forbidden":
        known = _keys_at(place)
        return f"no such key; expected one of {', '.join(known)}{nearest(str(place[-1]), known)}"
    if error["type"] == "missing":
        what = "a [[cells]] table" if place == ("cells",) else "this key"
        return f"{what} is missing; expected {_EXPECTED[str(place[-1])]}"
    if error["type"] == "enum":
        efforts = [effort.value for effort in Effort]
        return f"got {given}, expected one of {', '.join(efforts)}{nearest(given, efforts)}"
    hint = _EXPECTED.get(str(next((part for part in reversed(place) if isinstance(part, str)), "")))
    return f"got {given}, expected {hint or error['msg'].removeprefix('Input should be ')}"


_EXPECTED = {
    "models": 'a list of models, such as models = ["bert-tiny", "exports/*.onnx"]',
    "cells": "at least one [[cells]] table with models",
    "shapes": 'a list of shapes, such as shapes = ["input_ids=1x128", "input_ids=8x128"]',
    "buckets": 'a list of buckets, such as buckets = ["sequence=128,256"]',
    "precisions": f"a list of precisions out of {', '.join(PRECISIONS)}",
    "targets": 'a list of targets, such as targets = ["llvm"]',
    "tags": 'a list of words, such as tags = ["nightly"]',
    "importance": "how many times its kernels count, a whole number of at least 1",
    "candidates": "how many candidates are measured at most, a whole number greater than 0",
    "gpu_hours": "how many hours the devices may tune, added up, a number greater than 0",
    "seconds": "how many seconds are tuned at most, a number greater than 0",
    "samples": "how many random inputs to validate with, a whole number, such as samples = 3",
    "max_latency_ms": "milliseconds, a number greater than 0",
    "max_slowdown": "by which share of the last accepted artifact's latency it may be slower, such as 0.02",
    "rtol": "a relative tolerance, such as rtol = 0.02",
    "atol": "an absolute tolerance, such as atol = 0.001",
    "database": 'the text of a file or a URL, such as database = "relaxtune.db"',
    "out": 'the text of a folder, such as out = "out/night"',
    "name": 'a text, such as name = "night"',
}


def _keys_at(place: Sequence[str | int]) -> list[str]:
    around = place[-2] if len(place) > 1 else None
    if isinstance(around, int):
        around = place[-3]
    tables: dict[str | int | None, type[_Table]] = {
        None: PlanTable,
        "budget": BudgetTable,
        "defaults": DefaultsTable,
        "limits": LimitsTable,
        "cells": CellsTable,
    }
    return sorted(tables.get(around, PlanTable).model_fields)
