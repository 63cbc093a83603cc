"""`relaxtune gate`: whether a build may take the place of another."""

from __future__ import annotations

import math
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import numpy as np
import typer

from relaxtune.pipeline.cli.artifacts import inputs_file, read_arrays
from relaxtune.pipeline.cli.groups import option, takes_groups
from relaxtune.pipeline.cli.options import (
    DEFAULT_STORE,
    FormatOption,
    OutcomeDatabaseOption,
    ReferenceOption,
    SamplesOption,
    SeedOption,
    StoreOption,
    ToleranceOptions,
    VerifyKeyOption,
    require_signed,
)
from relaxtune.pipeline.cli.output import OutputFormat, print_json, stdout_console, write_text
from relaxtune.pipeline.errors import UsageError

if TYPE_CHECKING:
    from relaxtune.pipeline.gate.gate import GateLimits


CallsOption = Annotated[
    Path | None,
    typer.Option("--inputs", metavar="X.npz|DIR", help="Recorded inputs for both artifacts. Default: random inputs."),
]


@dataclass(frozen=True)
class LimitOptions:
    """The limits of a gate."""

    max_slowdown: str = option("2%", "Allowed slowdown of the new build.", metavar="PERCENT")
    alpha: float = option(0.05, "Probability of a false alarm, and of accepting a slower build.")
    seconds: float = option(60.0, "Limit of seconds for timing; a clear result ends it early.")
    max_size: str = option("5%", "Allowed growth of the files; 'none': no limit.", metavar="PERCENT")
    max_memory: str = option("5%", "Allowed growth of memory on the device; 'none': no limit.", metavar="PERCENT")
    max_compile_time: str = option("none", "Allowed growth of the compile time; 'none': no limit.", metavar="PERCENT")
    exact: bool = option(False, "Refuse unless all bits of the outputs are equal.", "--exact")
    strict: bool = option(False, "Also refuse if noise hides whether the build is slower.", "--strict")

    def limits(self, tolerance: ToleranceOptions) -> GateLimits:
        """Return what these options say.

        Raises `UsageError`: a share cannot be read.
        """
        from relaxtune.pipeline.gate.gate import GateLimits
        from relaxtune.pipeline.gate.latency import LatencyLimit

        slowdown = parse_percent(self.max_slowdown, "--max-slowdown")
        if slowdown is None:
            raise UsageError("--max-slowdown none: a gate needs a limit of latency; expected a share such as 2%")
        return GateLimits(
            latency=LatencyLimit(slowdown, self.alpha, self.seconds),
            size=parse_percent(self.max_size, "--max-size"),
            memory=parse_percent(self.max_memory, "--max-memory"),
            compile_time=parse_percent(self.max_compile_time, "--max-compile-time"),
            tolerance=tolerance.limit(),
            exact=self.exact,
            strict=self.strict,
        )


@takes_groups()
def gate(
    new: Annotated[str, typer.Argument(metavar="NEW", help="The new artifact: a directory or a tag of the store.")],
    baseline: Annotated[
        str,
        typer.Option("--baseline", metavar="DIR|TAG", help="The artifact in use: a directory or a tag of the store."),
    ],
    options: LimitOptions,
    tolerance: ToleranceOptions,
    inputs: CallsOption = None,
    model: ReferenceOption = None,
    samples: SamplesOption = 3,
    seed: SeedOption = 0,
    junit: Annotated[Path | None, typer.Option("--junit", metavar="FILE", help="Write JUnit XML, too.")] = None,
    markdown: Annotated[Path | None, typer.Option("--markdown", metavar="FILE", help="Write Markdown, too.")] = None,
    store: StoreOption = DEFAULT_STORE,
    db: OutcomeDatabaseOption = None,
    verify_key: VerifyKeyOption = None,
    output_format: FormatOption = OutputFormat.TABLE,
) -> None:
    """Decide whether an artifact may replace another. Exits 5 if not.

    Both run by turns on this device until it is clear whether the new artifact is slower than --max-slowdown allows, or
    until --seconds are over. If noise hides the answer, the gate passes and prints the slowdown that it would have
    seen; with --strict it refuses.
    """
    from relaxtune.pipeline.gate.gate import run_gate
    from relaxtune.pipeline.gate.report import render, to_junit, to_markdown
    from relaxtune.pipeline.registry.registry import find_artifact, open_store
    from relaxtune.tuning_db.store import TuningDatabase

    limits = options.limits(tolerance)
    kept = open_store(store)
    place, before = find_artifact(new, kept), find_artifact(baseline, kept)
    require_signed(verify_key, place, before)
    # Opened first: a database that cannot be written ends the command before the time is spent.
    with nullcontext() if db is None else TuningDatabase.open(db) as database:
        report = run_gate(
            place, before, limits,
            source=model, inputs=read_calls(inputs), samples=samples, seed=seed, database=database,
        )  # fmt: skip
    for path, name, text in ((junit, "--junit", to_junit), (markdown, "--markdown", to_markdown)):
        if path is not None:
            write_text(path, text(report), name)
    if output_format is OutputFormat.JSON:
        print_json(report.to_json())
    else:
        stdout_console().print(render(report))
    report.raise_if_refused()


def read_calls(path: Path | None, option: str = "--inputs") -> list[dict[str, np.ndarray]] | None:
    """Return the inputs of the calls in a .npz file or in those of a folder; None without either.

    Raises `UsageError`: a file is none, or the folder has none.
    """
    if path is None:
        return None
    files = sorted(path.glob("*.npz")) if path.is_dir() else [path]
    if not files:
        raise UsageError(f"{option} {path} has no .npz file; relaxtune.CallRecorder writes them, one for each call")
    return [read_arrays(file, inputs_file(option)) for file in files]


def parse_percent(text: str, name: str) -> float | None:
    """Return a share such as `2%` or `0.5 %` as a fraction; None for `none`.

    Raises `UsageError`: it is neither.
    """
    if text.strip().lower() == "none":
        return None
    number, sign, rest = text.strip().partition("%")
    try:
        value = float(number) / 100
    except ValueError:
        value = math.nan
    if not sign or rest or not 0 <= value < math.inf:
        raise UsageError(f"{name} {text!r} is no share; expected a number and a percent sign, such as 2%")
    return value
