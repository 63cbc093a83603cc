"""How far an artifact is from the model as given: the values, and the table that a person reads."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from rich.table import Table


@dataclass(frozen=True)
class DataSource:
    """What a measure was taken on: its name, the SHA-256 of its bytes, and how many samples or tokens it has."""

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
    original: str  # What computed the original.
    data: tuple[DataSource, ...]  # What was run.
    outputs: tuple[OutputDrift, ...]
    perplexity: Perplexity | None = None


@dataclass(frozen=True)
class DriftOptions:
    """What is asked for beside the defaults: outputs that are logits, and a file of token ids (.npy or text)."""

    logits: tuple[str, ...] = ()
    tokens: Path | None = None


def render_drift(report: DriftReport) -> Table:
    """Return the report as a table for a terminal."""
    data = "; ".join(f"{one.name} ({one.count}, sha256 {one.sha256[:12]})" for one in report.data)
    caption = f"original: {report.original}; data: {data}"
    if report.perplexity is not None:
        p = report.perplexity
        caption += f"; perplexity over {p.tokens} tokens: {p.ours:.4g}, original {p.original:.4g}"
    table = Table(title=f"drift of {report.precision or 'the graph as given'} from float32", caption=caption)
    for column in ("output", "kind", "max abs", "max/RMS", "cosine", "row cosine", "lowest", "arg-max", "KL", "KL max"):
        table.add_column(column, justify="left" if column in {"output", "kind"} else "right")
    for one in report.outputs:
        measures = (
            one.max_abs, one.max_rel, one.cosine, one.row_cosine_mean, one.row_cosine_min,
            one.argmax_agreement, one.kl_mean, one.kl_max,
        )  # fmt: skip
        table.add_row(one.name, one.kind, *map(_number, measures))
    return table


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}" if abs(value) < 0.99 else f"{value:.6g}"
