"""Kernel templates: a kernel written once, made for a PrimFunc from a few numbers.

A template looks at an unscheduled PrimFunc (what FuseTIR gives) and either says why it is not for it, or lists the
parameters worth measuring and makes the scheduled PrimFunc for any of them. The parameters are all that a database
record needs: the same PrimFunc, target and parameters give the same kernel on any machine.
"""

from __future__ import annotations

import json
import sys
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, ClassVar, Generic, Self, TypeAlias, TypeVar

from tvm.tirx import PrimFunc

from relaxtune.schedules.errors import Refusal, ScheduleError
from relaxtune.schedules.targets import CudaLimits, Feature, ResolvedTarget
from relaxtune.schedules.targets.capabilities import lowest_with

ParameterValue = int | bool | str
#: From so many rows on, a kernel for a symbolic number of rows takes more rows than it is planned for, too.
OPEN_ROWS = 1024
# In the metadata of a field.
_ADDED, _ALLOWED = "added", "allowed"
#: Of a field that takes any number from 1, or from 0 on.
POSITIVE, NOT_NEGATIVE = range(1, sys.maxsize), range(sys.maxsize)
# The field of parameters that asks for dependent launch.
_DEPENDENT = "dependent"


class TemplateError(ScheduleError):
    """A decision that is not one of this version's templates."""


@dataclass(frozen=True)
class Parameters:
    """The numbers that a kernel of one template is made from.

    A template derives from it a frozen dataclass whose fields are integers, booleans and strings. A field that is
    `added` to it later leaves decisions as they were: one that has the field's default is written, and read, without.
    `loads_boxes` says that its kernels load boxes of rows of one size, rows that do not exist among them.
    """

    template: ClassVar[str]
    loads_boxes: ClassVar[bool] = False

    def to_json(self) -> str:
        """Return the parameters as canonical JSON text: the decision of a tuning record."""
        document: dict[str, ParameterValue] = {"template": self.template}
        for one in fields(self):
            value = getattr(self, one.name)
            if not one.metadata.get(_ADDED) or value != one.default:
                document[one.name] = value
        return canonical_json(document)

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Return the parameters that `to_json` wrote.

        Raises `TemplateError`: the text is not JSON, is of another template, or has other fields or types than this
        version's.
        """
        document = cls._document(text)
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

    def refuse_values(self) -> Refusal | None:
        """Return which field has a number that no kernel of this template has, None where all have others."""
        for one in fields(self):
            value, allowed = getattr(self, one.name), one.metadata.get(_ALLOWED)
            if allowed is not None and value not in allowed:
                return Refusal(f"{one.name} is {value}, expected {_listed(allowed)}")
        return None

    @classmethod
    def _document(cls, text: str) -> dict[str, Any]:
        """Return what a decision of this template says but for the template's name."""
        document = _parse(text)
        if document.pop("template", None) != cls.template:
            raise TemplateError(f"decision {text!r} is not of template {cls.template!r}; measure the task again.")
        return document


def added(default: ParameterValue) -> Any:
    """Return a field of `Parameters` that decisions written before it lack; they mean its default."""
    return field(default=default, metadata={_ADDED: True})


def among(default: int, allowed: Sequence[int]) -> Any:
    """Return a field of `Parameters` that takes some numbers alone (`Parameters.refuse_values`)."""
    return field(default=default, metadata={_ALLOWED: allowed})


def _listed(allowed: Sequence[int]) -> str:
    if isinstance(allowed, range) and allowed.stop == sys.maxsize:
        return f"{allowed.start} or more"
    if isinstance(allowed, range) and allowed.step > 1:
        return f"a multiple of {allowed.step} up to {allowed[-1]}"
    if isinstance(allowed, range) and len(allowed) > 2:
        return f"{allowed[0]} to {allowed[-1]}"
    return f"{', '.join(map(str, allowed[:-1]))} or {allowed[-1]}"


Found = TypeVar("Found")
Own = TypeVar("Own", bound=Parameters)


@dataclass(frozen=True)
class Case(Generic[Found]):
    """A function that a template is given: what the template recognised in it, and the target."""

    func: PrimFunc
    found: Found
    target: ResolvedTarget

    @property
    def limits(self) -> CudaLimits:
        """The limits of the target, which has to be CUDA."""
        return cuda_limits(self.target)


class KernelTemplate(ABC, Generic[Found, Own]):
    """A parametric kernel: what it recognises in a function, what it proposes for that, how it makes a kernel.

    A template defines `_recognise`, `_propose` and `_make`; for functions with a symbolic number of rows,
    `_recognise_rows` and `_predict` too. `parameters` is the class of its parameters. Where they have a field
    `dependent`, candidates for a target without dependent launch have it unset, and `apply` refuses those that have it
    set.
    """

    parameters: type[Own]

    @property
    def name(self) -> str:
        """Name in decisions and reports."""
        return self.parameters.template

    def candidates(self, func: PrimFunc, target: ResolvedTarget, rows: int | None = None) -> Sequence[Own] | Refusal:
        """Return the parameters worth measuring, the most promising first, or why there are none.

        `rows` are the most rows of a function with a symbolic number of them that the kernel is for; from `OPEN_ROWS`
        on, the rows that it is planned for.
        """
        found = self._find(func, target, rows)
        proposed = found if isinstance(found, Refusal) else self._propose(found)
        if isinstance(proposed, Refusal) or Feature.DEPENDENT_LAUNCH in target.features:
            return proposed
        return [independent(one) for one in proposed]

    def apply(
        self, func: PrimFunc, target: ResolvedTarget, parameters: Parameters, rows: int | None = None
    ) -> PrimFunc | Refusal:
        """Return the scheduled PrimFunc (same parameters in the same order), or why it cannot be made.

        Raises `TemplateError`: the parameters are another template's.
        """
        if not isinstance(parameters, self.parameters):
            raise TemplateError(f"template {self.name} got {parameters!r}; expected {self.parameters.__name__}.")
        found = self._find(func, target, rows)
        if not isinstance(found, Refusal) and is_dependent(parameters):
            found = refuse_target(target, Feature.DEPENDENT_LAUNCH) or found
        return found if isinstance(found, Refusal) else self._make(found, parameters)

    def refuses(self, func: PrimFunc, target: ResolvedTarget) -> Refusal | None:
        """Return why there are no candidates, None where there are."""
        offered = self.candidates(func, target)
        return offered if isinstance(offered, Refusal) else None

    def predict_us(self, func: PrimFunc, target: ResolvedTarget, parameters: Parameters, rows: int) -> float | None:
        """Return a time of the kernel for so many rows, to compare with others of this template; None where unknown."""
        found = self._find(func, target, rows)
        if isinstance(found, Refusal) or not isinstance(parameters, self.parameters):
            return None
        return self._predict(found, parameters, rows)

    def _find(self, func: PrimFunc, target: ResolvedTarget, rows: int | None) -> Case[Found] | Refusal:
        found = self._recognise(func, target) if rows is None else self._recognise_rows(func, target, rows)
        return found if isinstance(found, Refusal) else Case(func, found, target)

    @abstractmethod
    def _recognise(self, func: PrimFunc, target: ResolvedTarget) -> Found | Refusal: ...

    def _recognise_rows(self, func: PrimFunc, target: ResolvedTarget, rows: int) -> Found | Refusal:
        return Refusal(f"template {self.name} makes no kernels for a number of rows")

    @abstractmethod
    def _propose(self, case: Case[Found]) -> Sequence[Own] | Refusal: ...

    @abstractmethod
    def _make(self, case: Case[Found], p: Own) -> PrimFunc | Refusal: ...

    def _predict(self, case: Case[Found], p: Own, rows: int) -> float | None:
        return None

    def parse(self, decision: str) -> Own:
        """Return the parameters of a decision; TemplateError when it is not one of this template's."""
        return self.parameters.from_json(decision)


#: Any template, as the registry lists them.
Template: TypeAlias = "KernelTemplate[Any, Any]"


def cuda_limits(target: ResolvedTarget) -> CudaLimits:
    """Return the limits of a CUDA target.

    Raises `TemplateError`: the target is another.
    """
    if not isinstance(target.limits, CudaLimits):
        raise TemplateError(f"kernel templates need a CUDA target, got {target.kind}.")
    return target.limits


def refuse_registers(registers: int, threads: int, limits: CudaLimits) -> Refusal | None:
    """Return why a block of so many threads with so many registers each does not fit, None where it does."""
    available = min(limits.registers_per_thread, limits.registers_per_block // threads)
    if registers <= available:
        return None
    return Refusal(f"about {registers} registers a thread, a block of {threads} has {available}")


def refuse_shared(shared_bytes: int, limits: CudaLimits) -> Refusal | None:
    """Return why a block with so much shared memory does not fit, None where it does."""
    if shared_bytes <= limits.shared_bytes_optin:
        return None
    return Refusal(f"{shared_bytes} bytes of shared memory, the target has {limits.shared_bytes_optin}")


def refuse_target(target: ResolvedTarget, *features: Feature) -> Refusal | None:
    """Return why a template does not make kernels for a target: it is no GPU, or one without some features."""
    if target.kind == "cuda" and target.features.issuperset(features):
        return None
    needed = f" {lowest_with(*features)} ({' and '.join(one.value for one in features)})" if features else ""
    return Refusal(f"the target is {target.kind} {target.arch}, expected cuda{needed}")


def is_dependent(parameters: Parameters) -> bool:
    """Whether the kernel may start before the one before it has ended."""
    return bool(getattr(parameters, _DEPENDENT, False))


def independent(parameters: Own) -> Own:
    """Return the parameters of the kernel that waits for the one before it."""
    change: dict[str, Any] = {_DEPENDENT: False}
    return replace(parameters, **change) if is_dependent(parameters) else parameters


def template_of(decision: str) -> str:
    """Return the name of the template that a decision is of.

    Raises `TemplateError`: the text is not a template's decision.
    """
    name = _parse(decision).get("template")
    if not isinstance(name, str):
        raise TemplateError(f'decision {decision!r} names no template; expected JSON with "template".')
    return name


def _parse(text: str) -> dict[str, Any]:
    try:
        document = json.loads(text)
    except json.JSONDecodeError as error:
        raise TemplateError(f"decision {text!r} is not JSON ({error}); measure the task again.") from error
    if not isinstance(document, dict):
        raise TemplateError(f"decision {text!r} is no JSON object; measure the task again.")
    return document


def canonical_json(document: Mapping[str, object]) -> str:
    """Return a document as text: the same for equal ones."""
    return json.dumps(document, sort_keys=True, separators=(",", ":"))


def _names(kinds: Mapping[str, type]) -> str:
    return ", ".join(f"{name} ({kind.__name__})" for name, kind in sorted(kinds.items())) or "none"
