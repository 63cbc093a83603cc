"""Reports of a validation, and of the drift from the model as given: values, JSON and tables."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from relaxtune.pipeline.errors import ValidationFailedError
from relaxtune.pipeline.printed_tables import TableView
from relaxtune.pipeline.validate.array_comparison import HISTOGRAM_EDGES, SampleComparison
from relaxtune.pipeline.validate.tolerances import Tolerance

# Columns that a narrow terminal does without, in this order.
_OPTIONAL = ("arg-max", "mean abs", "max rel", "dtype", "kind", "row cosine", "cosine", "atol needed")


@dataclass(frozen=True)
class DataSource:
    """The data of a measure: its name, the SHA-256 of its bytes, and how many samples or tokens it has."""

    name: str
    sha256: str
    count: int


@dataclass(frozen=True)
class OutputDrift:
    """One float output over all samples, elements that are finite in both."""

    name: str
    kind: str  # "logits" or "embedding".
    # Largest error, and largest error relative to the original's root mean square.
    max_abs: float
    max_rel: float
    cosine: float | None  # Of the whole outputs as vectors, the lowest over the samples; None where one is all zero.
    # Of vectors along the last axis; None for outputs without one.
    row_cosine_mean: float | None
    row_cosine_min: float | None
    # For logits; None for others.
    argmax_agreement: float | None
    kl_mean: float | None
    kl_max: float | None
    broken: int  # Elements that are NaN or infinite where the original is finite.


@dataclass(frozen=True)
class Perplexity:
    """Of one file of tokens, by the original and by the artifact; `tokens` were predicted."""

    data: DataSource
    original: float
    ours: float
    tokens: int


@dataclass(frozen=True)
class DriftReport:
    """The distance from the original."""

    precision: str | None  # Name of the artifact's policy, None where the graph's own dtypes were kept.
    original: str  # The runtime of the original.
    data: tuple[DataSource, ...]  # The inputs of the runs.
    outputs: tuple[OutputDrift, ...]
    perplexity: Perplexity | None = None


@dataclass(frozen=True)
class DriftOptions:
    """Options of a drift report: outputs that are logits, and a file of token ids (.npy or text)."""

    logits: tuple[str, ...] = ()
    tokens: Path | None = None


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
    def ill_conditioned(self) -> bool:
        """Whether it passed only because ONNX Runtime itself moves by about as much when it rounds otherwise."""
        return self.passed and any(sample.movement.largest for sample in self.samples)

    @property
    def verdict(self) -> str:
        """In words: what is wrong, or whether it is right by itself, or by how far ONNX Runtime moves."""
        if not self.passed:
            return self.reason
        if not self.ill_conditioned:
            return "ok"
        if not any(sample.movement.ties for sample in self.samples):
            return "ok, ill-conditioned"
        own = max(sample.movement.apart for sample in self.samples)
        apart = max(sample.apart for sample in self.samples)
        return f"ok, ties of quantisers: {apart:.2%} of the values differ, {own:.2%} between ONNX Runtime's own answers"

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
    """Whether a module gives the same bits again."""

    runs: int  # How often each sample was run, the first time included; other samples ran in between.
    differing: Mapping[str, int]  # Outputs that were not the same bit for bit, with how many elements differed.
    # Whether one of the runs had every kernel's output filled with NaN before, so that unwritten memory shows; not done
    # where kernels cannot be watched (CUDA graphs).
    poisoned: bool
    # Whether the artifact's manifest promises equal bits (`pipeline.artifact.determinism`); None where it says nothing.
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
        """Return the report as plain JSON data, with the worst of each measure and all samples."""
        measures = (
            "max_abs", "mean_abs", "max_rel", "cosine", "required_atol", "required_rtol", "required_factor",
            "argmax_agreement",
        )  # fmt: skip
        outputs = []
        for output in self.outputs:
            worst = {measure: output.worst(measure) for measure in measures}
            counts = {"edges": list(HISTOGRAM_EDGES), "counts": list(output.histogram)}
            own = {
                "passed": output.passed, "verdict": output.verdict, "reason": output.reason, "worst": worst,
                "histogram": counts,
            }  # fmt: skip
            outputs.append({**asdict(output), **own})
        repeats = None
        if self.repeats is not None:
            repeats = {**asdict(self.repeats), "identical": self.repeats.identical, "passed": self.repeats.passed}
        return {**asdict(self), "passed": self.passed, "outputs": outputs, "repeats": repeats}

    def raise_if_failed(self) -> None:
        """Raise `ValidationFailedError` with the outputs that failed and why, if any did."""
        failed = "; ".join(f"output {output.name!r}: {output.reason}" for output in self.outputs if not output.passed)
        if self.repeats is not None and not self.repeats.passed:
            names = ", ".join(f"{name!r} in {count} elements" for name, count in self.repeats.differing.items())
            again = (
                f"{self.model} gave other bits when it was run again on the same inputs: {names}. A kernel reads "
                "unwritten memory, or sums in an order that changes; `relaxtune validate --bisect` looks for it"
            )
            raise ValidationFailedError(
                again if not failed else f"{again}. It also disagrees with ONNX Runtime: {failed}"
            )
        if failed:
            raise ValidationFailedError(
                f"{self.model} disagrees with ONNX Runtime (rtol {self.tolerance.rtol:g}, atol "
                f"{self.tolerance.atol:g}): {failed}"
            )


def render(report: ValidationReport) -> TableView:
    """Return the report as a table for a terminal."""
    caption = (
        f"{report.samples} samples, seed {report.seed}; rtol {report.tolerance.rtol:g}, atol "
        f"{report.tolerance.atol:g} x RMS; reference: {report.reference}"
    )
    if report.repeats is not None:
        same = "the same bits" if report.repeats.identical else "OTHER BITS in " + ", ".join(report.repeats.differing)
        caption += f"; {report.repeats.runs} runs of each: {same}"
    measures: dict[str, Callable[[OutputReport], object]] = {
        "max abs": lambda one: number(one.worst("max_abs")),
        "mean abs": lambda one: number(one.worst("mean_abs")),
        "max rel": lambda one: number(one.worst("max_rel")),
        "cosine": lambda one: number(one.worst("cosine")),
        "atol needed": lambda one: number(one.worst("required_atol")),
        "tolerance used": lambda one: number(one.worst("required_factor")),
        "arg-max": lambda one: number(one.worst("argmax_agreement")),
    }
    columns = {
        "output": lambda one: one.name,
        "dtype": lambda one: one.dtype,
        **measures,
        "errors / tolerance": lambda one: _bars(one.histogram),
        "result": lambda one: one.verdict,
    }
    verdict = "passed" if report.passed else "FAILED"
    title = f"validation of {report.model}: {verdict}"
    return TableView.of(title, report.outputs, columns, caption, measures.keys(), _OPTIONAL)


def render_drift(report: DriftReport) -> TableView:
    """Return the report as a table for a terminal."""
    data = "; ".join(f"{one.name} ({one.count}, sha256 {one.sha256[:12]})" for one in report.data)
    caption = f"original: {report.original}; data: {data}"
    if report.perplexity is not None:
        p = report.perplexity
        caption += f"; perplexity over {p.tokens} tokens: {p.ours:.4g}, original {p.original:.4g}"
    measures: dict[str, Callable[[OutputDrift], object]] = {
        "max abs": lambda one: number(one.max_abs),
        "max/RMS": lambda one: number(one.max_rel),
        "cosine": lambda one: number(one.cosine),
        "row cosine": lambda one: number(one.row_cosine_mean),
        "lowest row": lambda one: number(one.row_cosine_min),
        "arg-max": lambda one: number(one.argmax_agreement),
        "KL": lambda one: number(one.kl_mean),
        "KL max": lambda one: number(one.kl_max),
    }
    columns = {"output": lambda one: one.name, "kind": lambda one: one.kind, **measures}
    title = f"drift of {report.precision} from float32" if report.precision else "drift from float32"
    return TableView.of(title, report.outputs, columns, caption, measures.keys(), _OPTIONAL)


def _bars(histogram: Sequence[int]) -> str:
    """Return a histogram as one character a bin, its height the logarithm of the count; `|` stands at the tolerance."""
    if not histogram:
        return "-"
    top = math.log1p(max(histogram))
    heights = [math.ceil(math.log1p(count) / top * 7) if count else 0 for count in histogram]
    text = "".join("\u00b7\u2581\u2582\u2583\u2584\u2585\u2586\u2587"[height] for height in heights)
    within = HISTOGRAM_EDGES.index(1.0) + 1
    return f"{text[:within]}|{text[within:]}"


def number(value: float | None) -> str:
    """Return a measure for a table."""
    return "-" if value is None else f"{value:.3g}" if abs(value) < 0.99 else f"{value:.6f}"
