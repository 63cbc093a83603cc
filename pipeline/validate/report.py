"""What a validation found: the report as data, as JSON and as a table."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

from rich.table import Table

from relaxtune.pipeline.errors import ValidationFailedError
from relaxtune.pipeline.validate.array_comparison import HISTOGRAM_EDGES, SampleComparison
from relaxtune.pipeline.validate.drift_report import DriftReport
from relaxtune.pipeline.validate.tolerances import Tolerance


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
        """Return the report as plain JSON data, with the worst of each measure beside the samples."""
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


def render(report: ValidationReport) -> Table:
    """Return the report as a table for a terminal."""
    verdict = "passed" if report.passed else "FAILED"
    table = Table(
        title=f"validation of {report.model}: {verdict}",
        caption=(
            f"{report.samples} samples, seed {report.seed}; rtol {report.tolerance.rtol:g}, atol "
            f"{report.tolerance.atol:g} x RMS; reference: {report.reference}{_repeats_text(report.repeats)}"
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
        table.add_row(output.name, output.dtype, *cells, _bars(output.histogram), output.verdict)
    return table


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


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}" if abs(value) < 0.99 else f"{value:.6f}"
