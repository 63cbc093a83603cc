"""How far two builds of a model drift apart: their outputs on the same inputs, and the kernels they are made of.

Outputs may have been saved on another machine (`relaxtune run DIR --inputs x.npz --outputs y.npz`), so neither build
has to run here. Drift is no fault: it fails only with a limit: equal bits or a tolerance.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import zip_longest

import numpy as np

from relaxtune.models.spec import shape_text
from relaxtune.pipeline.artifact.entries import KernelEntry
from relaxtune.pipeline.artifact.manifest import Manifest
from relaxtune.pipeline.errors import PipelineError, ValidationFailedError
from relaxtune.pipeline.printed_tables import TableView
from relaxtune.pipeline.validate.array_comparison import compare_arrays, differing_bits
from relaxtune.pipeline.validate.tolerances import Tolerance

# Of a kernel, what can differ between two builds, and what of it is the same code from another measurement.
_KERNEL_FIELDS = ("route", "record_id", "decision_sha256", "kernel_hash", "onnx_nodes", "calls")
_RECORD_FIELDS = frozenset({"record_id", "decision_sha256"})

# Kernels that the table of a comparison names.
_ROWS_SHOWN = 20


@dataclass(frozen=True)
class OutputDifference:
    """One output of two builds, over all samples."""

    name: str
    dtypes: tuple[str, str]  # Of the first and the second build.
    shape: tuple[int, ...]
    identical: float  # Share of the elements with the same bits.
    # Differences of the elements that are finite in both, relative to the first build's.
    max_abs: float
    mean_abs: float
    max_rel: float
    # The largest difference in representable numbers of the dtype; None for integers and where the dtypes differ.
    max_ulps: int | None
    # As in a validation; None where they do not apply.
    cosine: float | None
    argmax_agreement: float | None
    # Whether it keeps the limit, and if not why.
    passed: bool
    reason: str


@dataclass(frozen=True)
class Difference:
    """A difference of two builds: `subject` (a kernel, a pass, a version), its `field`, both values."""

    subject: str
    field: str
    a: str
    b: str


@dataclass(frozen=True)
class Comparison:
    """Two builds side by side."""

    #: The two sides, artifact directories or files of saved outputs.
    a: str
    b: str
    outputs: tuple[OutputDifference, ...]  #: In the order of the first build.
    #: Differences of the manifests, in kernels and in all else (model, target, precision, passes, versions). Empty when
    #: one of the two is a file of outputs.
    kernels: tuple[Difference, ...] = ()
    builds: tuple[Difference, ...] = ()
    limit: str = ""  #: `bits`, a tolerance in words, or nothing, with which every difference passes.

    @property
    def passed(self) -> bool:
        """Whether every output keeps the limit."""
        return all(output.passed for output in self.outputs)

    def to_json(self) -> dict[str, object]:
        """Return the comparison as plain JSON data."""
        return {**asdict(self), "passed": self.passed}

    def raise_if_failed(self) -> None:
        """Raise `ValidationFailedError` with the outputs that break the limit, if any does."""
        if not self.passed:
            failed = "; ".join(
                f"output {output.name!r}: {output.reason}" for output in self.outputs if not output.passed
            )
            raise ValidationFailedError(f"{self.a} and {self.b} differ by more than {self.limit}: {failed}")


def compare_outputs(
    a: Sequence[Mapping[str, np.ndarray]],
    b: Sequence[Mapping[str, np.ndarray]],
    *,
    exact: bool = False,
    tolerance: Tolerance | None = None,
) -> tuple[OutputDifference, ...]:
    """Return how the outputs of two builds differ.

    The samples of both are the same, in the same order. With `exact` any difference fails; `tolerance` is that of a
    validation with the first build as the reference, None for anything.
    Raises `PipelineError`: the builds do not have the same outputs of the same shapes, so that nothing can be said.
    """
    if len(a) != len(b) or not a:
        raise PipelineError(f"nothing to compare: {len(a)} and {len(b)} samples; both need the same, at least one")
    if set(a[0]) != set(b[0]):
        raise PipelineError(
            f"the builds have other outputs: {', '.join(sorted(a[0])) or 'none'} beside "
            f"{', '.join(sorted(b[0])) or 'none'}; compare builds of one model"
        )
    return tuple(
        _compare_output(name, [one[name] for one in a], [one[name] for one in b], exact, tolerance) for name in a[0]
    )


def compare_manifests(a: Manifest, b: Manifest) -> tuple[tuple[Difference, ...], tuple[Difference, ...]]:
    """Return where two artifacts differ: in their kernels, and in all else that shapes them."""
    kernels: list[Difference] = []
    named = {kernel.function: kernel for kernel in b.kernels}
    for kernel in a.kernels:
        other = named.pop(kernel.function, None)
        kernels += [Difference(kernel.function, "kernel", _nodes(kernel), "not there")] if other is None else [
            Difference(kernel.function, field, _text(getattr(kernel, field)), _text(getattr(other, field)))
            for field in _KERNEL_FIELDS
            if getattr(kernel, field) != getattr(other, field)
        ]  # fmt: skip
    kernels += [Difference(name, "kernel", "not there", _nodes(kernel)) for name, kernel in named.items()]
    pairs = [
        ("model", "sha256", a.model_sha256, b.model_sha256),
        ("target", "kind", a.target.kind, b.target.kind),
        ("target", "arch", a.target.arch, b.target.arch),
        ("target", "config", a.target.config, b.target.config),
        ("target", "cuda_graph", a.target.cuda_graph, b.target.cuda_graph),
        ("precision", "name", a.precision, b.precision),
        *(("version", name, a.versions.get(name), b.versions.get(name)) for name in {**a.versions, **b.versions}),
        *_pass_pairs(a, b),
    ]
    builds = [Difference(subject, field, _text(x), _text(y)) for subject, field, x, y in pairs if x != y]
    return tuple(kernels), tuple(builds)


def render(comparison: Comparison) -> list[TableView]:
    """Return the comparison as tables for a terminal."""
    limited = bool(comparison.limit)

    def result(output: OutputDifference) -> str:
        if not limited:
            return "same bits" if output.identical == 1.0 else "differs"
        return "ok" if output.passed else output.reason

    measures: dict[str, Callable[[OutputDifference], object]] = {
        "same bits": lambda one: f"{one.identical:.2%}",
        "max abs": lambda one: f"{one.max_abs:.3g}",
        "mean abs": lambda one: f"{one.mean_abs:.3g}",
        "max rel": lambda one: f"{one.max_rel:.3g}",
        "ulps": lambda one: "-" if one.max_ulps is None else one.max_ulps,
        "cosine": lambda one: _optional(one.cosine),
        "arg-max": lambda one: _optional(one.argmax_agreement),
    }
    columns = {
        "output": lambda one: one.name,
        "dtype": lambda one: " -> ".join(dict.fromkeys(one.dtypes)),
        **measures,
        "result": result,
    }
    verdict = "" if not limited else ": passed" if comparison.passed else ": FAILED"
    title = f"drift from {comparison.a} to {comparison.b}{verdict}"
    tables = [TableView.of(title, comparison.outputs, columns, right=measures.keys())]
    # Equal code of another record is no other kernel; the JSON has it.
    other_code = {one.subject for one in comparison.kernels if one.field not in _RECORD_FIELDS}
    kernels = [one for one in comparison.kernels if one.subject in other_code]
    for title, found in (("kernels that differ", kernels), ("builds", comparison.builds)):
        if found:
            tables.append(_differences(title, found))
    return tables


def _differences(title: str, found: Sequence[Difference]) -> TableView:
    """Return one row for each kernel or part of a build, the first of many; the JSON has all with their values."""
    subjects: dict[str, list[str]] = {}
    for one in found:
        # A hash says nothing to a reader but that it is another.
        hashed = "hash" in one.field or "sha256" in one.field
        subjects.setdefault(one.subject, []).append(one.field if hashed else f"{one.field}: {one.a} -> {one.b}")
    rows = [(subject, "; ".join(fields)) for subject, fields in subjects.items()]
    if len(rows) > _ROWS_SHOWN:
        rows = [*rows[:_ROWS_SHOWN], ("", f"and {len(rows) - _ROWS_SHOWN} more; --format json lists all")]
    return TableView(title, ("what", "differs in"), tuple(rows))


def ulps_apart(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Return how many representable numbers lie between the elements of two float arrays of one dtype, as int64.

    Bit patterns of floats are in the order of their values once those of negative ones are turned around; both zeros
    are one number.
    """
    kind = np.dtype(f"i{a.dtype.itemsize}")
    places = []
    for array in (a, b):
        bits = np.ascontiguousarray(array).view(kind).astype(np.int64)
        places.append(np.where(bits < 0, np.int64(np.iinfo(kind).min) - bits, bits))
    # Modulo 2**64: float64 numbers of opposite sign may be further apart than int64 holds, which no drift is.
    apart: np.ndarray = np.abs(places[0] - places[1])
    return apart


def _compare_output(
    name: str, a: Sequence[np.ndarray], b: Sequence[np.ndarray], exact: bool, tolerance: Tolerance | None
) -> OutputDifference:
    for first, second in zip(a, b, strict=True):
        if first.shape != second.shape:
            raise PipelineError(
                f"output {name!r} has shape {shape_text(first.shape)} in the first build and "
                f"{shape_text(second.shape)} in the second; run both on the same inputs"
            )
    left, right = np.concatenate([x.ravel() for x in a]), np.concatenate([x.ravel() for x in b])
    # The measures do not depend on the tolerance.
    accepted = tolerance or Tolerance(1.0, 1.0)
    samples = [compare_arrays(x, y, accepted, number) for number, (x, y) in enumerate(zip(a, b, strict=True))]
    same_dtype = left.dtype == right.dtype
    differing = differing_bits(left, right) if same_dtype else int(np.count_nonzero(left != right))
    reason = ""
    if exact and (differing or not same_dtype):
        reason = f"{differing} of {left.size} elements have other bits" if same_dtype else "another dtype"
    elif tolerance is not None:
        reason = next((f"sample {sample.sample}: {sample.reason}" for sample in samples if not sample.passed), "")
    finite = np.isfinite(left.astype(np.float64)) & np.isfinite(right.astype(np.float64))
    floats = same_dtype and left.dtype.kind not in "biu"
    ulps = ulps_apart(left[finite], right[finite]) if floats else None
    return OutputDifference(
        name=name,
        dtypes=(str(left.dtype), str(right.dtype)),
        shape=a[0].shape,
        identical=1.0 - differing / left.size if left.size else 1.0,
        max_abs=max(sample.max_abs for sample in samples),
        mean_abs=float(np.mean([sample.mean_abs for sample in samples])),
        max_rel=max(sample.max_rel for sample in samples),
        max_ulps=None if ulps is None else int(np.max(ulps, initial=0)),
        cosine=min((sample.cosine for sample in samples if sample.cosine is not None), default=None),
        argmax_agreement=min(
            (sample.argmax_agreement for sample in samples if sample.argmax_agreement is not None), default=None
        ),
        passed=not reason,
        reason=reason,
    )


def _pass_pairs(a: Manifest, b: Manifest) -> list[tuple[str, str, object, object]]:
    """Return (subject, field, first, second) of the passes, place by place while their names are the same."""
    if [one.name for one in a.passes] != [one.name for one in b.passes]:
        names = list(zip_longest((one.name for one in a.passes), (one.name for one in b.passes)))
        first = next(pair for pair in names if pair[0] != pair[1])
        return [("passes", "first that differs", *first)]
    pairs = zip(a.passes, b.passes, strict=True)
    return [(f"pass {one.name}", "enabled", one.enabled, other.enabled) for one, other in pairs]


def _nodes(kernel: KernelEntry) -> str:
    return f"{kernel.route}: {', '.join(kernel.onnx_nodes)}"


def _text(value: object) -> str:
    if isinstance(value, tuple):
        return ", ".join(map(str, value))
    return "-" if value is None else str(value)


def _optional(value: float | None) -> str:
    return "-" if value is None else f"{value:.6f}"
