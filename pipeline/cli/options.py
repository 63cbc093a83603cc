"""The options that several commands take, written once: names, help and parsing."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from relaxtune.pipeline.cli.groups import Value, option
from relaxtune.pipeline.cli.output import OutputFormat
from relaxtune.pipeline.errors import UsageError
from relaxtune.pipeline.tasks.routes import DEFAULT_ROUTES
from relaxtune.tuning_db.records import Route
from relaxtune.tuning_db.urls import DatabaseUrl

if TYPE_CHECKING:
    from relaxtune.pipeline.prepare import ModelRequest
    from relaxtune.pipeline.validate.tolerances import Tolerance


# The titles of the panels of options.
MODEL, SIZES, SEARCH, RECORDS, OUTPUT = "Model", "Sizes", "Search", "Records", "Output"
DEFAULT_DATABASE = DatabaseUrl("relaxtune.db")
_DATABASE_VARIABLE = "RELAXTUNE_DB"


def url_option(text: str, name: str = "--db", **more: Any) -> Any:
    """Return an option whose value is a `DatabaseUrl`, so that no message can show its password."""
    variable = _DATABASE_VARIABLE if name == "--db" else None
    return typer.Option(
        name, metavar="URL", help=text, parser=DatabaseUrl.of, rich_help_panel=RECORDS, envvar=variable, **more
    )


def optional_database(text: str) -> Any:
    """Return a `--db` that reads or notes in the default database only if that is there; `none` leaves it out."""

    def resolved(url: DatabaseUrl | None) -> DatabaseUrl | None:
        if url is None:
            return DEFAULT_DATABASE if Path(DEFAULT_DATABASE.reveal()).is_file() else None
        return None if url.reveal() == "none" else url

    return url_option(f"{text} Default: {DEFAULT_DATABASE}, if it exists; `none` uses no database.", callback=resolved)


ArtifactArgument = Annotated[Path, typer.Argument(metavar="DIR", help="Artifact directory.")]
DatabaseOption = Annotated[DatabaseUrl, url_option("Tuning database: a file or a SQLAlchemy URL.")]
SharedDatabasesOption = Annotated[
    list[DatabaseUrl] | None, url_option("Database to read under --db (repeatable); never written.", "--shared-db")
]
OutcomeDatabaseOption = Annotated[DatabaseUrl | None, optional_database("Record the result in this tuning database.")]
SeedOption = Annotated[
    int, typer.Option("--seed", help="Seed of the search, of the zoo's weights and of random inputs.")
]
FormatOption = Annotated[
    OutputFormat, typer.Option("--format", help="How to write the result to stdout.", rich_help_panel=OUTPUT)
]
ReferenceOption = Annotated[
    str | None, typer.Option("--model", metavar="MODEL", help="The ONNX model. Default: the artifact's source.")
]
DimOption = Annotated[
    list[str] | None,
    typer.Option(
        "--dim", metavar="AXIS=SIZE,...", help="Pin a symbolic axis in all inputs (repeatable).", rich_help_panel=SIZES
    ),
]
LengthsOption = Annotated[
    Path | None,
    typer.Option("--lengths", metavar="FILE", help="Sizes of real calls: lines of 'sequence,count' (docs/shapes.md)."),
]
StoreOption = Annotated[
    str,
    typer.Option(
        "--store", envvar="RELAXTUNE_STORE", metavar="DIR|URL", help="The artifact store: a folder, or a URL of fsspec."
    ),
]
DEFAULT_STORE = "relaxtune-store"
VerifyKeyOption = Annotated[
    Path | None,
    typer.Option(
        "--verify-key",
        envvar="RELAXTUNE_VERIFY_KEY",
        metavar="KEY",
        help="Accept only artifacts signed with the private key of this public key (PEM).",
    ),
]
SamplesOption = Annotated[int, typer.Option("--samples", min=1, help="Random inputs to compare.")]


@dataclass(frozen=True)
class ModelOptions:
    """The options of a model; `request` makes the value that the jobs take."""

    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL", help="An .onnx file, a folder in the hub's layout, hf:ORG/NAME, or a zoo name."
        ),
    ]
    target: str = option(
        "auto", "auto (a GPU, else this CPU), llvm, cuda, cuda:sm_90a, cuda:sm_89@L4, a tag, JSON.", panel=MODEL
    )
    portable: bool = option(
        False,
        "Add PTX to the GPU's code, so that the drivers of newer GPUs can translate it.",
        "--portable",
        panel=MODEL,
    )
    precision: str | None = option(
        None,
        "Compute or store in fp32, tf32, fp16, bf16, fp8, w8a16, w4a16 or int8. Default: the graph's own.",
        panel=MODEL,
    )
    group_size: int | None = option(
        None, "Weights that share a scale (w8a16, w4a16); 0: a whole column. Default: 128.", metavar="N", rare=True
    )
    calibration: Path | None = option(
        None, "Ranges of activations for --precision fp8, as `calibrate` writes them.", metavar="FILE", panel=MODEL
    )
    shape: list[str] | None = option(
        None,
        "Pin input shapes; a name in place of a size keeps the axis symbolic.",
        metavar="IN=1x128,...",
        panel=SIZES,
    )
    dim: DimOption = None
    bucket: list[str] | None = option(
        None,
        "Add code for these sizes of a symbolic axis; other sizes use the symbolic code (repeatable).",
        metavar="AXIS=128,256,...",
        panel=SIZES,
    )
    profile: list[str] | None = option(
        None,
        "Least, typical and largest size of a symbolic axis. Memory is planned for the largest; "
        "larger calls are refused.",
        metavar="AXIS=MIN:TYPICAL:MAX,...",
        panel=SIZES,
    )
    lengths: Path | None = option(
        None,
        "Sizes of real calls in place of --profile: lines of 'sequence,count' (docs/shapes.md).",
        metavar="FILE",
        panel=SIZES,
    )
    unpad: bool = option(
        False, "Compute only the tokens of an encoder, not the padding (docs/shapes.md).", "--unpad", panel=SIZES
    )
    generate: bool = option(
        False,
        "Compile a decoder that owns its caches and generates tokens (docs/generation.md).",
        "--generate",
        panel=MODEL,
    )
    max_length: int | None = option(
        None,
        "With --generate: the most tokens of a sequence, prompt included. Default: the model's limit, 2048 at most.",
        min=2,
        metavar="N",
        panel=MODEL,
    )
    seed: int = option(0, "Seed of the search, of the zoo's weights and of random inputs.", rare=True)
    disable_pass: list[str] | None = option(None, "Switch a pass off by name (repeatable).", metavar="NAME", rare=True)
    dump_ir: Path | None = option(None, "Write the IR after each phase into DIR.", metavar="DIR", rare=True)
    embed_weights: bool = option(
        False, "Keep the weights inside model.so instead of params.safetensors.", "--embed-weights", rare=True
    )
    routes: str | None = option(
        None,
        "Routes that may make kernels: metaschedule, template, library. An artifact with library needs cuBLASLt and "
        "cuDNN where it runs. Default: all but library.",
        metavar="ROUTE,...",
        panel=SEARCH,
    )

    def request(self) -> ModelRequest:
        """Return the request that these options are.

        Raises `UsageError`: a shape, a bucket, a profile, a route or a calibration record cannot be read, or the
        profile is given twice; `ModelShapeError`: the file of lengths cannot be read.
        """
        from relaxtune.models.axis_profile import parse_profiles
        from relaxtune.models.buckets import parse_bucket
        from relaxtune.models.errors import ModelError
        from relaxtune.models.size_histogram import profile_of, read_histogram
        from relaxtune.pipeline.passes.module import LoweringOptions
        from relaxtune.pipeline.precision.calibration import CalibrationRecord
        from relaxtune.pipeline.prepare import ModelRequest

        if self.lengths is not None and self.profile:
            raise UsageError("--lengths gives the profile too; leave --profile out, or --lengths")
        lengths = read_histogram(self.lengths) if self.lengths is not None else ()
        try:
            profile = profile_of(lengths) if lengths else parse_profiles(self.profile or ())
        except ModelError as error:
            raise UsageError(f"--profile: {error}") from error
        shapes, dims = parse_shapes(self.shape), parse_dims(self.dim)
        if both := sorted(shapes.keys() & dims.keys()):
            raise UsageError(f"--shape and --dim both name {both[0]!r}; name it once")
        return ModelRequest(
            source=self.model,
            shapes={**shapes, **{axis: (size,) for axis, size in dims.items()}},
            target=self.target,
            portable=self.portable,
            lowering=LoweringOptions(
                precision=self.precision,
                group_size=self.group_size,
                calibration=CalibrationRecord.read(self.calibration).scales() if self.calibration else None,
                disabled_passes=frozenset(self.disable_pass or ()),
                dump_dir=self.dump_ir,
                embed_weights=self.embed_weights,
                unpad=self.unpad,
            ),
            seed=self.seed,
            routes=parse_routes(self.routes),
            buckets=_parse_named(
                self.bucket or (),
                parse_bucket,
                "--bucket",
                "names axis {!r} twice: {!r}; give all its sizes in one: AXIS=128,256",
            ),
            profile=profile,
            lengths=lengths,
            generate=self.generate,
            max_length=self.max_length,
        )


@dataclass(frozen=True)
class ToleranceOptions:
    """Allowed differences; None takes the command's default."""

    rtol: float | None = option(None, "Relative tolerance.", min=0.0)
    atol: float | None = option(None, "Absolute tolerance, as a multiple of the output's RMS.", min=0.0)

    def limit(self) -> Tolerance | None:
        """Return both as one limit, where the one that is not given is 0; None without either."""
        from relaxtune.pipeline.validate.tolerances import Tolerance

        if self.rtol is None and self.atol is None:
            return None
        return Tolerance(self.rtol or 0.0, self.atol or 0.0)


def require_signed(verify_key: Path | None, *directories: Path) -> None:
    """Check the signatures of artifacts, where a key is given, before any of their code runs.

    Raises `ArtifactError`: one is not signed by the owner of the key.
    """
    if verify_key is not None:
        from relaxtune.pipeline.artifact.signature import require_signature

        for directory in directories:
            require_signature(directory, verify_key)


def parse_routes(text: str | None) -> frozenset[Route]:
    """Return the routes of a `--routes` value; all but vendor libraries without one.

    Raises `UsageError`: a name is not a route.
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

    Raises `UsageError`: a text is not `name=AxBxC`, or names an input twice.
    """
    from relaxtune.models import parse_shape_override

    parts = [part for text in texts or () for part in text.split(",")]
    return _parse_named(parts, parse_shape_override, "--shape", "names input {!r} twice: {!r}; give each input once")


def parse_dims(texts: list[str] | None) -> dict[str, int]:
    """Return `--dim` values as axis -> size.

    Raises `UsageError`: a text is not `axis=size`, or an axis is named twice.
    """
    from relaxtune.models.dims import parse_dim

    parts = [part for text in texts or () for part in text.split(",")]
    return _parse_named(parts, parse_dim, "--dim", "names axis {!r} twice: {!r}; give each axis once")


def parse_sizes(text: str, option: str) -> tuple[int, ...]:
    """Return the sizes of an option such as `1,2,4,8`, the smallest first.

    Raises `UsageError`: the text has another form.
    """
    sizes = [part.strip() for part in text.split(",")]
    if not all(size.isdecimal() and int(size) for size in sizes):
        raise UsageError(f"{option} {text!r}: expected sizes such as 1,2,4,8")
    return tuple(sorted({int(size) for size in sizes}))


def _parse_named(
    texts: Iterable[str], parse: Callable[[str], tuple[str, Value]], option: str, twice: str
) -> dict[str, Value]:
    from relaxtune.models.errors import ModelError

    found: dict[str, Value] = {}
    for text in texts:
        try:
            name, value = parse(text)
        except ModelError as error:
            raise UsageError(f"{option}: {error}") from error
        if name in found:
            raise UsageError(f"{option} {twice.format(name, text)}")
        found[name] = value
    return found
