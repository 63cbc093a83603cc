"""The options that several commands take, written once: names, help and parsing."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from relaxtune.pipeline.cli.output import OutputFormat
from relaxtune.pipeline.errors import UsageError
from relaxtune.pipeline.tasks.routes import DEFAULT_ROUTES
from relaxtune.tuning_db.records import Route

DEFAULT_DATABASE = "relaxtune.db"

ModelArgument = Annotated[str, typer.Argument(metavar="MODEL", help="Path of an .onnx file, or a zoo name: bert-tiny.")]
ArtifactArgument = Annotated[Path, typer.Argument(metavar="DIR", help="Artifact directory.")]
TargetOption = Annotated[
    str, typer.Option("--target", help="auto, llvm, cuda, cuda:sm_90a, a TVM tag, or JSON. auto: a GPU, else this CPU.")
]
DatabaseOption = Annotated[
    str, typer.Option("--db", metavar="URL", help="Tuning database: a file or a SQLAlchemy URL.")
]
SharedDatabasesOption = Annotated[
    list[str] | None,
    typer.Option("--shared-db", metavar="URL", help="Database to read under --db (repeatable); never written."),
]
OutcomeDatabaseOption = Annotated[
    str | None, typer.Option("--db", metavar="URL", help="Note the result in this tuning database. Default: nowhere.")
]
PrecisionOption = Annotated[
    str | None,
    typer.Option(
        "--precision", help="fp32, tf32, fp16, bf16, w8a16, w4a16 or int8: asked for by name. Default: the graph's own."
    ),
]
GroupSizeOption = Annotated[
    int | None,
    typer.Option("--group-size", metavar="N", help="Weights with one scale (w8a16, w4a16), 0: a column. Default: 128."),
]
ShapeOption = Annotated[
    list[str] | None,
    typer.Option("--shape", metavar="IN=1x128,...", help="Pin input shapes; a name instead of a size stays symbolic."),
]
BucketOption = Annotated[
    list[str] | None,
    typer.Option(
        "--bucket",
        metavar="AXIS=128,256,...",
        help="Sizes of a symbolic axis that get code of their own, beside code for any size (repeatable).",
    ),
]
SeedOption = Annotated[int, typer.Option("--seed", help="Seed of the search, the zoo's weights and the inputs.")]
FormatOption = Annotated[OutputFormat, typer.Option("--format", help="How to write the result to stdout.")]
DisablePassOption = Annotated[
    list[str] | None, typer.Option("--disable-pass", metavar="NAME", help="Switch a pass off by name (repeatable).")
]
DumpIrOption = Annotated[
    Path | None, typer.Option("--dump-ir", metavar="DIR", help="Write the IR after each phase into DIR.")
]
EmbedWeightsOption = Annotated[
    bool, typer.Option("--embed-weights", help="Keep the weights inside model.so instead of params.safetensors.")
]
RoutesOption = Annotated[
    str | None,
    typer.Option(
        "--routes",
        metavar="ROUTE,...",
        help="Who may make kernels: metaschedule, template, library (cuBLASLt and cuDNN, which the artifact then needs "
        "where it runs). Default: all but library.",
    ),
]


def parse_routes(text: str | None) -> frozenset[Route]:
    """Return the routes of a `--routes` value; all but vendor libraries without one.

    Raises
    ------
    UsageError
        A name is not a route.
    """
    if text is None:
        return DEFAULT_ROUTES
    names = [name.strip() for name in text.split(",") if name.strip()]
    unknown = [name for name in names if name not in {route.value for route in Route}]
    if unknown:
        known = ", ".join(route.value for route in Route)
        raise UsageError(f"--routes {text!r}: {', '.join(unknown)} is no route; expected names from {known}")
    return frozenset(Route(name) for name in names)


def parse_shapes(texts: list[str] | None) -> dict[str, tuple[int | str, ...]]:
    """Return `--shape` values as input name -> shape.

    Raises
    ------
    UsageError
        A text is not `name=AxBxC`, or names an input twice.
    """
    from relaxtune.models import parse_shape_override
    from relaxtune.models.errors import ModelError

    shapes: dict[str, tuple[int | str, ...]] = {}
    for text in texts or []:
        for part in text.split(","):
            try:
                name, shape = parse_shape_override(part)
            except ModelError as error:
                raise UsageError(str(error)) from error
            if name in shapes:
                raise UsageError(f"--shape names input {name!r} twice: {text!r}; give each input once")
            shapes[name] = shape
    return shapes


def parse_buckets(texts: list[str] | None) -> dict[str, tuple[int, ...]]:
    """Return `--bucket` values as axis -> sizes.

    Raises
    ------
    UsageError
        A text is not `axis=size,size`, or names an axis twice.
    """
    from relaxtune.models.buckets import parse_bucket
    from relaxtune.models.errors import ModelError

    buckets: dict[str, tuple[int, ...]] = {}
    for text in texts or []:
        try:
            axis, sizes = parse_bucket(text)
        except ModelError as error:
            raise UsageError(f"--{error}") from error
        if axis in buckets:
            raise UsageError(f"--bucket names axis {axis!r} twice: {text!r}; give all its sizes in one: {axis}=128,256")
        buckets[axis] = sizes
    return buckets
