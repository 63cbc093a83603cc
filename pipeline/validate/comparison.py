"""How far two builds of a model drift apart: their outputs on the same inputs, and the kernels they are made of.

Outputs may have been saved on another machine (`relaxtune run DIR --inputs x.npz --outputs y.npz`), so neither build
has to run here. Drift is no fault: it fails only where equal bits or a tolerance were asked for.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import zip_longest

import numpy as np
from rich.table import Table
from rich.text import Text

from relaxtune.pipeline.artifact.entries import KernelEntry
from relaxtune.pipeline.artifact.manifest import Manifest
from relaxtune.pipeline.errors import PipelineError, ValidationFailedError
from relaxtune.pipeline.validate.array_comparison import compare_arrays, differing_bits
from relaxtune.pipeline.validate.tolerances import Tolerance

# Of a kernel, what can differ between two builds, and what of it is the same code from another measurement.
_KERNEL_FIELDS = ("route", "record_id", "decision_sha256", "kernel_hash", "onnx_nodes", "calls")
_RECORD_FIELDS = frozenset({"record_id", "decision_sha256"})

# Kernels that the table of a comparison names.
_ROWS_SHOWN = 20


@dataclass(frozen=True)
class OutputDrift:
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
    # Whether it meets what was asked for, and if not why.
    passed: bool
    reason: str


@dataclass(frozen=True)
class Difference:
    """What two builds have in different forms: `subject` (a kernel, a pass, a version), its `field`, both values."""

    subject: str
    field: str
    a: str
    b: str


@dataclass(frozen=True)
class Comparison:
    """Two builds side by side.

    Attributes
    ----------
    a, b
        What was compared: artifact directories or files of saved outputs.
    outputs
        In the order of the first build.
    kernels, builds
        Where the manifests differ: in kernels, and in all else (model, target, precision, passes, versions). Empty when
        one of the two is a file of outputs.
    asked
        `bits`, a tolerance in words, or nothing: then every difference passes.
    """

    a: str
    b: str
    outputs: tuple[OutputDrift, ...]
    kernels: tuple[Difference, ...] = ()
    builds: tuple[Difference, ...] = ()
    asked: str = ""

    @property
    def passed(self) -> bool:
        """Whether every output meets what was asked for."""
        return all(output.passed for output in self.outputs)

    def to_json(self) -> dict[str, object]:
        """Return the comparison as plain JSON data."""
        return {**asdict(self), "passed": self.passed}

    def raise_if_failed(self) -> None:
        """Raise for a comparison that does not meet what was asked for.

        Raises
        ------
        ValidationFailedError
            Names the outputs and how they differ.
        """
        if not self.passed:
            failed = "; ".join(
                f"output {output.name!r}: {output.reason}" for output in self.outputs if not output.passed
            )
            raise ValidationFailedError(f"{self.a} and {self.b} differ by more than {self.asked}: {failed}")


def compare_outputs(
    a: Sequence[Mapping[str, np.ndarray]],
    b: Sequence[Mapping[str, np.ndarray]],
    *,
    exact: bool = False,
    tolerance: Tolerance | None = None,
) -> tuple[OutputDrift, ...]:
    """Return how the outputs of two builds differ.

    Parameters
    ----------
    a, b : sequences of mappings
        Output name -> array, for the same samples in the same order.
    exact : bool
        Whether any difference fails.
    tolerance : Tolerance or None
        What may differ, as in a validation with the first build as the reference; None for anything.

    Raises
    ------
    PipelineError
        The builds do not have the same outputs of the same shapes, so that nothing can be said.
    """
    if len(a) != len(b) or not a:
        raise PipelineError(f"nothing to compare: {len(a)} samples beside {len(b)}; both need the same, at least one")
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


def render(comparison: Comparison) -> list[Table]:
    """Return the comparison as tables for a terminal."""
    verdict = "" if not comparison.asked else ": passed" if comparison.passed else ": FAILED"
    drift = Table(title=f"drift from {comparison.a} to {comparison.b}{verdict}")
    measures = ("same bits", "max abs", "mean abs", "max rel", "ulps", "cosine", "arg-max")
    for column in ("output", "dtype", *measures, "result"):
        drift.add_column(column, justify="right" if column in measures else "left")
    for output in comparison.outputs:
        ulps = "-" if output.max_ulps is None else str(output.max_ulps)
        numbers = (output.max_abs, output.mean_abs, output.max_rel)
        drift.add_row(
            Text(output.name), " -> ".join(dict.fromkeys(output.dtypes)), f"{output.identical:.2%}",
            *(f"{number:.3g}" for number in numbers), ulps, _optional(output.cosine),
            _optional(output.argmax_agreement), _result(output, comparison.asked),
        )  # fmt: skip
    tables = [drift]
    # Equal code of another record is no other kernel; the JSON has it.
    other_code = {one.subject for one in comparison.kernels if one.field not in _RECORD_FIELDS}
    kernels = [one for one in comparison.kernels if one.subject in other_code]
    for title, found in (("kernels that differ", kernels), ("builds", comparison.builds)):
        if found:
            tables.append(_differences(title, found))
    return tables


def _result(output: OutputDrift, asked: str) -> str:
    """Return the verdict where something was asked for, else only whether there is a difference."""
    if not asked:
        return "same bits" if output.identical == 1.0 else "differs"
    return "ok" if output.passed else output.reason


def _differences(title: str, found: Sequence[Difference]) -> Table:
    """Return one row for each kernel or part of a build, the first of many; the JSON has all with their values."""
    subjects: dict[str, list[Difference]] = {}
    for one in found:
        subjects.setdefault(one.subject, []).append(one)
    table = Table(title=title)
    for column in ("what", "differs in"):
        table.add_column(column, overflow="fold")
    for subject, differences in list(subjects.items())[:_ROWS_SHOWN]:
        # A hash says nothing to a reader but that it is another.
        told = (one.field if "hash" in one.field or "sha256" in one.field else f"{one.field}: {one.a} -> {one.b}"
                for one in differences)  # fmt: skip
        table.add_row(Text(subject), Text("; ".join(told)))
    if len(subjects) > _ROWS_SHOWN:
        table.add_row("", f"and {len(subjects) - _ROWS_SHOWN} more; --format json lists all")
    return table


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
) -> OutputDrift:
    for first, second in zip(a, b, strict=True):
        if first.shape != second.shape:
            raise PipelineError(
                f"output {name!r} has shape {_shape(first)} in the first build and {_shape(second)} in the second; run "
                "both on the same inputs"
            )
    left, right = np.concatenate([x.ravel() for x in a]), np.concatenate([x.ravel() for x in b])
    # A tolerance of 1 and 1 only serves the measures, which do not depend on it.
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
    return OutputDrift(
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


def _shape(array: np.ndarray) -> str:
    return "x".join(map(str, array.shape)) or "a scalar"
