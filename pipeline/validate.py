"""Compare a compiled module with ONNX Runtime on the model as it was given.

Both are run once on the same random inputs (`observe`); what was seen is then compared (`compare`), as often as one
likes and with any tolerance, without running again.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import numpy as np
from rich.table import Table

from models import OnnxModel, TensorSpec
from models.inputs import random_inputs
from pipeline.drift import DataSource, DriftOptions, DriftReport, inputs_source, measure_drift, measure_perplexity
from pipeline.errors import ValidationFailedError
from pipeline.instrument import poisoned_kernels
from pipeline.reference import Reference, compute_dtype, longest_reduction
from pipeline.runtime import Module
from pipeline.tolerances import Tolerance, model_tolerance, output_scale

logger = logging.getLogger(__name__)

DEFAULT_SAMPLES = 3
DEFAULT_REPEATS = 2

# Upper edges of the error histogram, in units of what an element is allowed; the last bin has no upper edge.
HISTOGRAM_EDGES = (0.0, 1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 0.1, 0.3, 1.0, 3.0, 10.0)


@dataclass(frozen=True)
class SampleComparison:
    """One output of one sample.

    Attributes
    ----------
    sample
        Its number.
    passed, reason
        Whether it is within tolerance; if not, why, in words.
    max_abs, mean_abs, max_rel, mean_rel
        Errors over the elements that are finite in both.
    cosine
        Between the two outputs as vectors; None when one of them is all zero.
    required_atol
        The smallest `atol` that would have passed with the `rtol` used.
    required_rtol
        The smallest `rtol` that would have passed with the `atol` used.
    required_factor
        The smallest factor of both tolerances that would have passed: above 1 the sample fails. None where elements are
        NaN or infinite in one of the two only, or must be equal and are not: no factor would do.
    histogram
        How many elements have an error of at most each of `HISTOGRAM_EDGES` times what they are allowed, each counted
        once, in the first bin it fits; a last bin has those above all edges and those that are not finite.
    argmax_agreement
        Share of rows whose largest element is in the same place; None for outputs that are not floats or have no rows.
    """

    sample: int
    passed: bool
    reason: str
    max_abs: float = 0.0
    mean_abs: float = 0.0
    max_rel: float = 0.0
    mean_rel: float = 0.0
    cosine: float | None = None
    required_atol: float = 0.0
    required_rtol: float = 0.0
    argmax_agreement: float | None = None
    required_factor: float | None = None
    histogram: tuple[int, ...] = ()


@dataclass(frozen=True)
class OutputReport:
    """One output over all samples."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    samples: tuple[SampleComparison, ...]

    @property
    def passed(self) -> bool:
        """Whether every sample passed."""
        return all(sample.passed for sample in self.samples)

    @property
    def reason(self) -> str:
        """Why the first failed sample failed, empty when all passed."""
        return next((f"sample {s.sample}: {s.reason}" for s in self.samples if not s.passed), "")

    def worst(self, measure: str) -> float | None:
        """Return the largest value of a measure over the samples; the smallest for cosine and arg-max agreement."""
        values = [value for sample in self.samples if (value := getattr(sample, measure)) is not None]
        if not values:
            return None
        return float(min(values) if measure in {"cosine", "argmax_agreement"} else max(values))

    @property
    def histogram(self) -> tuple[int, ...]:
        """The samples' histograms added up, see `SampleComparison`; empty when no sample has one."""
        return tuple(sum(counts) for counts in zip(*(s.histogram for s in self.samples if s.histogram), strict=True))


@dataclass(frozen=True)
class RepeatReport:
    """Whether a module gives the same bits again.

    Attributes
    ----------
    runs
        How often each sample was run, the first time included; other samples ran in between.
    differing
        Outputs that were not the same bit for bit, with how many elements differed.
    poisoned
        Whether one of the runs had every kernel's output filled with NaN before, so that memory nobody wrote shows;
        not done where kernels cannot be watched (CUDA graphs).
    promised
        Whether the artifact's manifest promises equal bits (`pipeline.determinism`); None where it says nothing.
    """

    runs: int
    differing: Mapping[str, int]
    poisoned: bool
    promised: bool | None

    @property
    def identical(self) -> bool:
        """Whether every output was the same bit for bit every time."""
        return not self.differing

    @property
    def passed(self) -> bool:
        """Whether the module keeps what it promises."""
        return self.identical or self.promised is False


@dataclass(frozen=True)
class ValidationReport:
    """The result of a validation; `tolerance` is for float outputs, all others must be equal.

    `drift` is the distance from the float32 original, which decides nothing; `repeats` is None when every sample was
    run once.
    """

    model: str
    reference: str
    tolerance: Tolerance
    samples: int
    seed: int
    outputs: tuple[OutputReport, ...]
    drift: DriftReport | None = None
    repeats: RepeatReport | None = None

    @property
    def passed(self) -> bool:
        """Whether every output passed in every sample, and runs were repeatable as promised."""
        return all(output.passed for output in self.outputs) and (self.repeats is None or self.repeats.passed)

    @property
    def failed_sample(self) -> int | None:
        """The number of the first sample in which an output failed, None when all passed."""
        return min((s.sample for output in self.outputs for s in output.samples if not s.passed), default=None)

    def to_json(self) -> dict[str, object]:
        """Return the report as plain JSON data, with the worst of each measure beside the samples."""
        measures = (
            "max_abs", "mean_abs", "max_rel", "cosine", "required_atol", "required_rtol", "required_factor",
            "argmax_agreement",
        )  # fmt: skip
        outputs = []
        for output in self.outputs:
            worst = {measure: output.worst(measure) for measure in measures}
            counts = {"edges": list(HISTOGRAM_EDGES), "counts": list(output.histogram)}
            own = {"passed": output.passed, "reason": output.reason, "worst": worst, "histogram": counts}
            outputs.append({**asdict(output), **own})
        repeats = None
        if self.repeats is not None:
            repeats = {**asdict(self.repeats), "identical": self.repeats.identical, "passed": self.repeats.passed}
        return {**asdict(self), "passed": self.passed, "outputs": outputs, "repeats": repeats}

    def raise_if_failed(self) -> None:
        """Raise for a failed validation.

        Raises
        ------
        ValidationFailedError
            Names the outputs that failed and why.
        """
        failed = "; ".join(f"output {output.name!r}: {output.reason}" for output in self.outputs if not output.passed)
        if self.repeats is not None and not self.repeats.passed:
            names = ", ".join(f"{name!r} in {count} elements" for name, count in self.repeats.differing.items())
            again = (
                f"{self.model} gave other bits when it was run again on the same inputs: {names}. A kernel reads "
                "memory that nobody wrote, or sums in an order that changes; `relaxtune validate --bisect` looks for it"
            )
            raise ValidationFailedError(
                again if not failed else f"{again}. It also disagrees with ONNX Runtime: {failed}"
            )
        if failed:
            raise ValidationFailedError(
                f"{self.model} disagrees with ONNX Runtime (rtol {self.tolerance.rtol:g}, atol "
                f"{self.tolerance.atol:g}): {failed}"
            )


@dataclass(frozen=True)
class Observation:
    """What the reference and the module gave for one sample."""

    expected: Mapping[str, np.ndarray]
    got: Mapping[str, np.ndarray]
    inputs: Mapping[str, np.ndarray] = field(default_factory=dict)


def validate(
    module: Module | Path | str,
    model: OnnxModel,
    *,
    rtol: float | None = None,
    atol: float | None = None,
    samples: int = DEFAULT_SAMPLES,
    seed: int = 0,
    dims: Mapping[str, int] | None = None,
    drift: DriftOptions | None = None,
    inputs: Sequence[Mapping[str, np.ndarray]] | None = None,
    repeats: int = DEFAULT_REPEATS,
) -> ValidationReport:
    """Return how a module's outputs compare with ONNX Runtime's on the original model.

    Parameters
    ----------
    module : Module, Path or str
        A loaded module, or an artifact directory.
    model : OnnxModel
        The model as it was given, before any rewriting.
    rtol, atol : float or None
        By default from `pipeline.tolerances`, by the model's dtype and the module's precision.
    samples, seed : int
        How many random inputs, and from which seed.
    dims : mapping or None
        Sizes of symbolic axes; those not given are chosen small.
    drift : DriftOptions or None
        What the drift report is to hold beside its defaults.
    inputs : sequence of mappings or None
        Samples of the caller's own, in place of `samples`, `seed` and `dims`.
    repeats : int
        How often each sample is run; from 2 on, all runs must give the same bits unless the manifest says that they may
        not. One of the further runs has the outputs of kernels filled with NaN first.

    Raises
    ------
    ValidationFailedError
        The module and the model have no output in common. (A comparison that fails is a report, not an exception.)
    """
    loaded = module if isinstance(module, Module) else Module.load(module)
    default = default_tolerance(loaded, model)
    tolerance = Tolerance(default.rtol if rtol is None else rtol, default.atol if atol is None else atol)
    reference = Reference(model, policy=loaded.manifest.policy)
    if inputs is None:
        observations = observe(loaded, model, reference, samples=samples, seed=seed, dims=dims)
    else:
        observations = [Observation(reference.run(sample), loaded.run(sample), sample) for sample in inputs]
    report = compare(
        observations, loaded.outputs, tolerance, model=model.name, reference=reference.description, seed=seed
    )
    distance = _drift_of(loaded, model, reference, observations, seed, dims or {}, drift or DriftOptions())
    again = repeat_runs(loaded, observations, repeats) if repeats > 1 else None
    return replace(report, drift=distance, repeats=again)


def default_tolerance(module: Module, model: OnnxModel) -> Tolerance:
    """Return what a module's outputs may differ from the model's: by dtypes, precision and the longest sum."""
    return model_tolerance(compute_dtype(model), module.manifest.precision, longest_reduction(model))


def repeat_runs(module: Module, observations: Sequence[Observation], runs: int) -> RepeatReport:
    """Return whether a module gives again what it gave, bit for bit; the samples take turns.

    Parameters
    ----------
    module : Module
        Loaded.
    observations : sequence of Observation
        What it gave the first time.
    runs : int
        How often it is run on each sample, the first time included.
    """
    differing: dict[str, int] = {}
    poisoned = not module.manifest.target.cuda_graph
    for run in range(1, runs):
        for seen in observations:
            with poisoned_kernels(module) if poisoned and run == 1 else nullcontext():
                again = module.run(seen.inputs)
            for name, array in again.items():
                count = differing_bits(seen.got[name], array)
                if count:
                    differing[name] = max(count, differing.get(name, 0))
    promised = module.manifest.deterministic
    return RepeatReport(runs, differing, poisoned, None if promised is None else promised.bitwise)


def differing_bits(a: np.ndarray, b: np.ndarray) -> int:
    """Return how many elements of two arrays of one dtype and shape differ in any bit; NaN equals the same NaN."""
    if not a.size:
        return 0
    left, right = (np.ascontiguousarray(x).reshape(-1).view(np.uint8).reshape(x.size, -1) for x in (a, b))
    return int(np.count_nonzero((left != right).any(axis=1)))


def sample_inputs(
    model: OnnxModel, *, samples: int, seed: int, dims: Mapping[str, int] | None = None
) -> list[dict[str, np.ndarray]]:
    """Return the random inputs that a model is validated with."""
    sizes = default_dims(model) | dict(dims or {})
    return [random_inputs(model, seed=seed, sample=sample, dims=sizes) for sample in range(samples)]


def observe(
    module: Module,
    model: OnnxModel,
    reference: Reference,
    *,
    samples: int,
    seed: int,
    dims: Mapping[str, int] | None = None,
) -> list[Observation]:
    """Return what both give for each sample; needs `validate`'s arguments, runs each once a sample."""
    inputs = sample_inputs(model, samples=samples, seed=seed, dims=dims)
    return [Observation(reference.run(sample), module.run(sample), sample) for sample in inputs]


def _drift_of(
    module: Module,
    model: OnnxModel,
    reference: Reference,
    observations: Sequence[Observation],
    seed: int,
    dims: Mapping[str, int],
    options: DriftOptions,
) -> DriftReport:
    """Return the distance from the model as given; its outputs are computed where the reference has other weights."""
    sizes = default_dims(model) | dict(dims)
    inputs = [seen.inputs for seen in observations]
    original = Reference(model) if reference.quantised else reference
    expected = [seen.expected for seen in observations] if original is reference else [*map(original.run, inputs)]
    outputs = measure_drift(model, expected, [seen.got for seen in observations], options.logits)
    data: list[DataSource] = [inputs_source(inputs, seed)]
    perplexity = None
    if options.tokens is not None:
        perplexity = measure_perplexity(model, original.run, module.run, options, sizes)
        data.append(perplexity.data)
    return DriftReport(module.manifest.precision, original.description, tuple(data), outputs, perplexity)


def default_dims(model: OnnxModel) -> dict[str, int]:
    """Return a small size for every symbolic axis of the inputs: 2 for a batch, 16 for any other."""
    names = {axis for spec in model.inputs for axis in spec.shape if isinstance(axis, str) and axis.isidentifier()}
    return {name: 2 if "batch" in name.lower() else 16 for name in sorted(names)}


def compare(
    observations: Sequence[Observation],
    specs: Sequence[TensorSpec],
    tolerance: Tolerance,
    *,
    model: str,
    reference: str,
    seed: int,
) -> ValidationReport:
    """Return the comparison of what was observed.

    Raises
    ------
    ValidationFailedError
        No output is common to both, or nothing was observed.
    """
    if not observations:
        raise ValidationFailedError(f"nothing was compared for {model}: samples must be at least 1")
    expected_names = set(observations[0].expected)
    got_names = [spec.name for spec in specs]
    if not expected_names & set(got_names):
        raise ValidationFailedError(
            f"{model} and its module have no output in common: the model has {', '.join(sorted(expected_names))}, the "
            f"module has {', '.join(got_names) or 'none'}. Is it the artifact of this model?"
        )
    outputs = [_compare_output(spec, observations, tolerance) for spec in specs]
    for name in sorted(expected_names - set(got_names)):
        lost = SampleComparison(0, False, "the module does not have this output")
        array = observations[0].expected[name]
        outputs.append(OutputReport(name, str(array.dtype), array.shape, (lost,)))
    return ValidationReport(model, reference, tolerance, len(observations), seed, tuple(outputs))


def compare_arrays(expected: np.ndarray, got: np.ndarray, tolerance: Tolerance, sample: int = 0) -> SampleComparison:
    """Return how one array compares with its reference, of the same shape."""
    if expected.dtype.kind in "biu":
        return _compare_exact(expected, got, sample)
    wanted, found = expected.astype(np.float64).ravel(), got.astype(np.float64).ravel()
    finite = np.isfinite(wanted)
    broken = int(np.count_nonzero(finite & ~np.isfinite(found)))
    # Where the reference is not finite, the module must give the same: NaN for NaN, the same infinity.
    lost = int(np.count_nonzero(~finite & ~((wanted == found) | (np.isnan(wanted) & np.isnan(found)))))
    both = finite & np.isfinite(found)
    error = np.abs(wanted[both] - found[both])
    size = np.abs(wanted[both])
    scale = output_scale(expected)
    relative = error / np.maximum(size, np.finfo(np.float32).tiny)
    # An element of error 0 needs no tolerance, even where the reference is 0.
    relative[error == 0] = 0.0
    required_atol = float(np.max(error - tolerance.rtol * size, initial=0.0)) / scale
    allowed = tolerance.atol * scale + tolerance.rtol * size
    excess = error - tolerance.atol * scale
    required_rtol = float(np.max(np.where(excess > 0, excess / np.maximum(size, 1e-30), 0.0), initial=0.0))
    reason = _failure(broken, lost, required_atol, required_rtol, tolerance, error)
    return SampleComparison(
        sample=sample,
        passed=not reason,
        reason=reason,
        max_abs=float(np.max(error, initial=0.0)),
        mean_abs=float(np.mean(error)) if error.size else 0.0,
        max_rel=float(np.max(relative, initial=0.0)),
        mean_rel=float(np.mean(relative)) if error.size else 0.0,
        cosine=_cosine(wanted[both], found[both]),
        required_atol=required_atol,
        required_rtol=required_rtol,
        argmax_agreement=_argmax_agreement(expected, got),
        required_factor=None if broken or lost else _largest_share(error, allowed),
        histogram=_histogram(error, allowed, broken + lost),
    )


def render(report: ValidationReport) -> Table:
    """Return the report as a table for a terminal."""
    verdict = "passed" if report.passed else "FAILED"
    table = Table(
        title=f"validation of {report.model}: {verdict}",
        caption=(
            f"{report.samples} samples, seed {report.seed}; rtol {report.tolerance.rtol:g}, atol "
            f"{report.tolerance.atol:g} x max(1, RMS); reference: {report.reference}{_repeats_text(report.repeats)}"
        ),
    )
    columns = {
        "max abs": "max_abs", "mean abs": "mean_abs", "max rel": "max_rel", "cosine": "cosine",
        "atol needed": "required_atol", "of tolerance": "required_factor", "arg-max": "argmax_agreement",
    }  # fmt: skip
    for column in ("output", "dtype", *columns, "errors / tolerance", "result"):
        table.add_column(column, justify="right" if column in columns else "left")
    for output in report.outputs:
        cells = (_number(output.worst(measure)) for measure in columns.values())
        verdict = "ok" if output.passed else output.reason
        table.add_row(output.name, output.dtype, *cells, _bars(output.histogram), verdict)
    return table


def _compare_output(spec: TensorSpec, observations: Sequence[Observation], tolerance: Tolerance) -> OutputReport:
    compared = []
    for sample, seen in enumerate(observations):
        got = seen.got[spec.name]
        expected = seen.expected.get(spec.name)
        if expected is None:
            compared.append(SampleComparison(sample, False, "the model does not have this output"))
        elif expected.shape != got.shape:
            reason = f"expected shape {_shape(expected.shape)}, got {_shape(got.shape)}"
            compared.append(SampleComparison(sample, False, reason))
        elif str(got.dtype) != spec.dtype:
            compared.append(SampleComparison(sample, False, f"expected dtype {spec.dtype}, got {got.dtype}"))
        elif _kind(expected) != _kind(got):
            compared.append(SampleComparison(sample, False, f"expected dtype {expected.dtype}, got {got.dtype}"))
        else:
            compared.append(compare_arrays(expected, got, tolerance, sample))
    return OutputReport(spec.name, spec.dtype, observations[0].got[spec.name].shape, tuple(compared))


def _compare_exact(expected: np.ndarray, got: np.ndarray, sample: int) -> SampleComparison:
    error = np.abs(expected.astype(np.float64) - got.astype(np.float64))
    wrong = int(np.count_nonzero(expected != got))
    reason = f"{wrong} of {expected.size} elements differ; {expected.dtype} must be equal" if wrong else ""
    largest = float(np.max(error, initial=0.0))
    return SampleComparison(
        sample,
        not wrong,
        reason,
        largest,
        float(np.mean(error)) if error.size else 0.0,
        required_atol=largest,
        required_factor=None if wrong else 0.0,
        histogram=(expected.size - wrong, *[0] * (len(HISTOGRAM_EDGES) - 1), wrong),
    )


def _failure(
    broken: int, lost: int, required_atol: float, required_rtol: float, tolerance: Tolerance, error: np.ndarray
) -> str:
    if broken:
        return f"{broken} elements are NaN or infinite where the reference is finite"
    if lost:
        return f"{lost} elements differ where the reference is NaN or infinite"
    # The factor forgives the rounding of this very computation.
    if required_atol > tolerance.atol * (1 + 1e-9):
        return (
            f"largest error {np.max(error):.3g}; it would pass with atol {required_atol:.3g} "
            f"(is {tolerance.atol:g}) or with rtol {required_rtol:.3g} (is {tolerance.rtol:g})"
        )
    return ""


def _largest_share(error: np.ndarray, allowed: np.ndarray) -> float | None:
    """Return the largest error in units of what its element is allowed; None where nothing is and something differs."""
    wrong = error > 0
    if not wrong.any():
        return 0.0
    if (allowed[wrong] == 0).any():
        return None
    return float(np.max(error[wrong] / allowed[wrong]))


def _histogram(error: np.ndarray, allowed: np.ndarray, not_finite: int) -> tuple[int, ...]:
    """Return the bins of `SampleComparison.histogram`."""
    with np.errstate(divide="ignore", invalid="ignore"):
        shares = np.where(error == 0, 0.0, error / allowed)
    counts = np.bincount(np.searchsorted(HISTOGRAM_EDGES, shares), minlength=len(HISTOGRAM_EDGES) + 1)
    counts[-1] += not_finite
    return tuple(int(count) for count in counts)


def _bars(histogram: Sequence[int]) -> str:
    """Return a histogram as one character a bin, its height the logarithm of the count; `|` stands at the tolerance."""
    if not histogram:
        return "-"
    top = math.log1p(max(histogram))
    heights = [math.ceil(math.log1p(count) / top * 7) if count else 0 for count in histogram]
    text = "".join("\u00b7\u2581\u2582\u2583\u2584\u2585\u2586\u2587"[height] for height in heights)
    within = HISTOGRAM_EDGES.index(1.0) + 1
    return f"{text[:within]}|{text[within:]}"


def _repeats_text(repeats: RepeatReport | None) -> str:
    if repeats is None:
        return ""
    same = "the same bits" if repeats.identical else "OTHER BITS in " + ", ".join(repeats.differing)
    return f"; {repeats.runs} runs of each: {same}"


def _cosine(a: np.ndarray, b: np.ndarray) -> float | None:
    length = math.sqrt(float(a @ a)) * math.sqrt(float(b @ b))
    return float(a @ b) / length if length > 0 else None


def _argmax_agreement(expected: np.ndarray, got: np.ndarray) -> float | None:
    if expected.ndim < 1 or expected.shape[-1] < 2 or expected.size == 0:
        return None
    return float(np.mean(np.argmax(expected, axis=-1) == np.argmax(got, axis=-1)))


def _kind(array: np.ndarray) -> str:
    return "exact" if array.dtype.kind in "biu" else "float"


def _shape(shape: tuple[int, ...]) -> str:
    return "x".join(str(size) for size in shape) or "a scalar"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}" if abs(value) < 0.99 else f"{value:.6f}"
