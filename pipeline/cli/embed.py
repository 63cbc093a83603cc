"""`relaxtune embed`: a vector of each line of a file."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import numpy as np
import typer

from relaxtune.pipeline.cli.groups import option, takes_groups
from relaxtune.pipeline.cli.options import ArtifactArgument, FormatOption, VerifyKeyOption
from relaxtune.pipeline.cli.output import OutputFormat, emit
from relaxtune.pipeline.errors import UsageError
from relaxtune.pipeline.output_file import output_file
from relaxtune.pipeline.printed_tables import TableView


@takes_groups()
def embed(
    directory: ArtifactArgument,
    texts: Annotated[Path, typer.Argument(metavar="FILE.txt", help="Texts, one a line.")],
    out: Path | None = option(None, "Where to write the vectors, float32 [lines, width].", metavar="X.npy"),
    verify_key: VerifyKeyOption = None,
    output_format: FormatOption = OutputFormat.TABLE,
) -> None:
    """Compute a vector of each line of a file; --format json without --out prints the vectors."""
    from relaxtune.models.files import read_regular
    from relaxtune.pipeline.artifact.module import Module

    try:
        lines = read_regular(texts).decode("utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as e:
        raise UsageError(f"{texts} cannot be read ({e}); expected a text file in UTF-8, one text a line") from e
    if not lines:
        raise UsageError(f"{texts} has no lines; expected one text a line")
    module = Module.load(directory, verify_key=verify_key)
    started = time.perf_counter()
    vectors = module.embed(lines)
    seconds = time.perf_counter() - started
    if out is not None:
        with output_file(out, "--out") as file:
            np.save(file, vectors)
    facts = {"texts": len(vectors), "width": vectors.shape[1], "seconds": seconds, "texts_per_s": len(lines) / seconds}
    data = {**facts, **({"vectors": vectors.tolist()} if out is None else {"out": str(out)})}
    shown = {name: str(value) if isinstance(value, int) else f"{value:.4g}" for name, value in facts.items()}
    emit(output_format, data, TableView.facts(f"vectors {'not kept: no --out' if out is None else out}", shown.items()))
