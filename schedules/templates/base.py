"""What a kernel template is: a kernel written once, made for a PrimFunc from a few numbers.

A template looks at an unscheduled PrimFunc (what FuseTIR gives) and either says why it is not for it, or lists the
parameters worth measuring and makes the scheduled PrimFunc for any of them. The parameters are all that a database
record needs: the same PrimFunc, target and parameters give the same kernel on any machine.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar, Protocol, Self

from tvm.tirx import PrimFunc

from relaxtune.schedules.errors import Refusal, ScheduleError
from relaxtune.schedules.targets import ResolvedTarget

ParameterValue = int | bool | str
# In the metadata of a field.
_ADDED = "added"


class TemplateError(ScheduleError):
    """A decision that is not one of this version's templates."""


@dataclass(frozen=True)
class Parameters:
    """The numbers that a kernel of one template is made from.

    A template derives from it a frozen dataclass whose fields are integers, booleans and strings. A field that is
    `added` to it later leaves decisions as they were: one that has the field's default is written, and read, without.
    """

    template: ClassVar[str]

    def to_json(self) -> str:
        """Return the parameters as canonical JSON text: the decision of a tuning record."""
        document: dict[str, ParameterValue] = {"template": self.template}
        for one in fields(self):
            value = getattr(self, one.name)
            if not one.metadata.get(_ADDED) or value != one.default:
                document[one.name] = value
        return json.dumps(document, sort_keys=True, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Return the parameters that `to_json` wrote.

        Raises
        ------
        TemplateError
            The text is not JSON, is of another template, or has other fields or types than this version's.
        """
        document = _parse(text)
        if document.pop("template", None) != cls.template:
            raise TemplateError(f"decision {text!r} is not of template {cls.template!r}; measure the task again.")
        expected = {one.name: type(one.default) for one in fields(cls)}
        for one in fields(cls):
            if one.metadata.get(_ADDED):
                document.setdefault(one.name, getattr(cls, one.name))
        got = {name: type(value) for name, value in document.items()}
        if got != expected:
            raise TemplateError(
                f"decision {text!r} of template {cls.template!r}: expected the fields {_names(expected)}, got "
                f"{_names(got)}; it was written by another version: measure the task again."
            )
        return cls(**document)


def added(default: ParameterValue) -> Any:
    """Return a field of `Parameters` that decisions written before it lack; they mean its default."""
    return field(default=default, metadata={_ADDED: True})


class Template(Protocol):
    """A parametric kernel."""

    @property
    def name(self) -> str:
        """Name in decisions and reports."""
        ...

    def candidates(self, func: PrimFunc, target: ResolvedTarget) -> Sequence[Parameters] | Refusal:
        """Return the parameters worth measuring, the most promising first, or why there are none."""
        ...

    def apply(self, func: PrimFunc, target: ResolvedTarget, parameters: Parameters) -> PrimFunc | Refusal:
        """Return the scheduled PrimFunc (same parameters in the same order), or why it cannot be made."""
        ...

    def parse(self, decision: str) -> Parameters:
        """Return the parameters of a decision; TemplateError when it is not one of this template's."""
        ...


def template_of(decision: str) -> str:
    """Return the name of the template that a decision is of.

    Raises
    ------
    TemplateError
        The text is not a template's decision.
    """
    name = _parse(decision).get("template")
    if not isinstance(name, str):
        raise TemplateError(f'decision {decision!r} names no template; expected JSON with "template".')
    return name


def _parse(text: str) -> dict[str, ParameterValue]:
    try:
        document = json.loads(text)
    except json.JSONDecodeError as error:
        raise TemplateError(f"decision {text!r} is not JSON ({error}); measure the task again.") from error
    if not isinstance(document, dict):
        raise TemplateError(f"decision {text!r} is no JSON object; measure the task again.")
    return document


def _names(kinds: Mapping[str, type]) -> str:
    return ", ".join(f"{name} ({kind.__name__})" for name, kind in sorted(kinds.items())) or "none"
