"""`relaxtune validate`, `compare`, `run`, `generate` and `embed`: commands on one artifact."""

from __future__ import annotations

import io
import logging
import os
import time
import zipfile
import zlib
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import typer

from relaxtune.pipeline.cli.groups import option, takes_groups
from relaxtune.pipeline.cli.options import (
    ArtifactArgument,
    FormatOption,
    OutcomeDatabaseOption,
    ReferenceOption,
    SamplesOption,
    SeedOption,
    ToleranceOptions,
    VerifyKeyOption,
    require_signed,
)
from relaxtune.pipeline.cli.output import (
    OutputFormat,
    emit,
    print_json,
    print_table,
    stderr_console,
    stdout_console,
)
from relaxtune.pipeline.errors import PipelineError, UsageError, ValidationFailedError
from relaxtune.pipeline.output_file import output_file
from relaxtune.pipeline.printable import short
from relaxtune.pipeline.printed_tables import TableView
from relaxtune.tuning_db.urls import DatabaseUrl

if TYPE_CHECKING:
    from relaxtune.pipeline.bisect import Bisection, FaultyKernel
    from relaxtune.pipeline.jobs.artifacts import ValidatedArtifact, ValidationRequest

logger = logging.getLogger(__name__)

_OUTPUTS_FILE = "an artifact, or a .npz file of outputs, as `relaxtune run DIR --inputs X.npz --outputs Y.npz` writes"


@dataclass(frozen=True)
class ValidateOptions:
    """How an artifact is validated, and where the result is noted."""

    samples: SamplesOption = 3
    seed: SeedOption = 0
    repeat: int = option(2, "Runs of each input; with 2 or more, their bits are compared.", min=1)
    logits: list[str] | None = option(None, "Output to treat as logits in the drift (repeatable).", metavar="NAME")
    tokens: Path | None = option(None, "Token ids (.npy or text) to compute the perplexity of.", metavar="FILE")
    kernels: bool = option(False, "Also compare each kernel with its unscheduled function, on one input.", "--kernels")
    bisect: bool = option(False, "After a failure, find the ONNX node and the pass or kernel to blame.", "--bisect")
    repro: Path | None = option(None, "Where --bisect writes a reproduction. Default: DIR-repro.", metavar="DIR")
    db: OutcomeDatabaseOption = None

    def request(self, tolerance: ToleranceOptions) -> ValidationRequest:
        """Return the request that these options are."""
        from relaxtune.pipeline.jobs.artifacts import ValidationRequest
        from relaxtune.pipeline.validate.report import DriftOptions

        drift = DriftOptions(tuple(self.logits or ()), self.tokens)
        return ValidationRequest(tolerance.rtol, tolerance.atol, self.samples, self.seed, self.repeat, drift, self.db)


@takes_groups()
def validate_command(
    directory: ArtifactArgument,
    tolerance: ToleranceOptions,
    options: ValidateOptions,
    model: ReferenceOption = None,
    verify_key: VerifyKeyOption = None,
    output_format: FormatOption = OutputFormat.TABLE,
) -> None:
    """Compare an artifact with ONNX Runtime on random inputs. Exits 3 if they disagree.

    By default the tolerance follows from dtype and precision.
    """
    from relaxtune.pipeline.artifact.directory import record_validation
    from relaxtune.pipeline.bisect import check_kernels, render as render_bisection
    from relaxtune.pipeline.jobs.artifacts import validate_artifact
    from relaxtune.pipeline.validate.report import render, render_drift

    require_signed(verify_key, directory)
    done = validate_artifact(directory, model, options.request(tolerance))
    report = done.report
    data = report.to_json()
    faulty: tuple[FaultyKernel, ...] = ()
    if options.kernels:
        faulty = check_kernels(done.module, done.model, done.inputs[0], database=options.db)
        data["faulty_kernels"] = [asdict(kernel) for kernel in faulty]
        record_validation(directory, data)
    found = None
    if options.bisect:
        found = _bisect(done, directory, options.repro, options.db)
        data["bisection"] = None if found is None else found.to_json()
        record_validation(directory, data)
    if output_format is OutputFormat.JSON:
        print_json(data)
    else:
        stdout_console().print(render(report))
        if report.drift is not None:
            stdout_console().print(render_drift(report.drift))
        if found is not None:
            stdout_console().print(render_bisection(found))
        if options.kernels:
            columns = {
                "kernel": lambda one: short(one.function),
                "route": lambda one: one.route,
                "ONNX nodes": lambda one: ", ".join(one.onnx_nodes),
                "difference": lambda one: one.reason,
            }
            print_table(TableView.of(f"{len(faulty)} faulty kernels", faulty, columns))
    report.raise_if_failed()
    if faulty:
        raise ValidationFailedError(
            f"{report.model}: its outputs are within tolerance, and {len(faulty)} kernels are not: "
            + "; ".join(f"{one.function} ({one.route}): {one.reason}" for one in faulty)
        )


@takes_groups()
def compare(
    first: Annotated[Path, typer.Argument(metavar="A", help="An artifact, or a .npz of outputs that `run` saved.")],
    second: Annotated[Path, typer.Argument(metavar="B", help="Another build, or its outputs from another machine.")],
    limits: ToleranceOptions,
    inputs: Path | None = option(None, "Inputs of both artifacts. Default: random.", metavar="X.npz"),
    model: ReferenceOption = None,
    samples: SamplesOption = 3,
    seed: SeedOption = 0,
    exact: bool = option(False, "Exit 3 unless all bits are the same.", "--exact"),
    verify_key: VerifyKeyOption = None,
    output_format: FormatOption = OutputFormat.TABLE,
) -> None:
    """Measure the drift between two builds of a model.

    Exits 3 if --exact, --rtol or --atol is given and not met. With only one of --rtol and --atol, the other is 0.
    """
    from relaxtune.pipeline.validate.builds import compare_builds
    from relaxtune.pipeline.validate.comparison import render

    require_signed(verify_key, *(path for path in (first, second) if path.is_dir()))
    sides = [path if path.is_dir() else read_arrays(path, _OUTPUTS_FILE) for path in (first, second)]
    comparison = compare_builds(
        *sides,
        names=(str(first), str(second)),
        inputs=None if inputs is None else read_arrays(inputs),
        source=model,
        samples=samples,
        seed=seed,
        exact=exact,
        tolerance=None if exact else limits.limit(),
    )
    if output_format is OutputFormat.JSON:
        print_json(comparison.to_json())
    else:
        for table in render(comparison):
            stdout_console().print(table)
    comparison.raise_if_failed()


def run(
    directory: ArtifactArgument,
    inputs: Annotated[Path, typer.Option("--inputs", metavar="X.npz", help="An array for each input, by name.")],
    outputs: Annotated[Path, typer.Option("--outputs", metavar="Y.npz", help="Where to write the outputs.")],
    verify_key: VerifyKeyOption = None,
    output_format: FormatOption = OutputFormat.TABLE,
) -> None:
    """Run an artifact once on the arrays of a .npz file."""
    from relaxtune.pipeline.artifact.module import Module

    module = Module.load(directory, verify_key=verify_key)
    results = module.run(read_arrays(inputs))
    with output_file(outputs, "--outputs") as file:
        np.savez(file, **results)  # type: ignore[arg-type]  # the stub takes every keyword for `allow_pickle`
    rows = tuple((name, str(array.dtype), "x".join(map(str, array.shape))) for name, array in results.items())
    data = {name: {"dtype": str(array.dtype), "shape": list(array.shape)} for name, array in results.items()}
    emit(output_format, data, TableView(f"written to {outputs}", ("output", "dtype", "shape"), rows))


@dataclass(frozen=True)
class PromptOptions:
    """The prompt, and how many tokens follow it."""

    ids: str | None = option(None, "Token ids of the prompt.", metavar="ID,ID,...")
    prompt: str | None = option(None, "Text of the prompt.", metavar="TEXT")
    tokenizer: Path | None = option(None, "The model's tokenizer.json. Default: the artifact's.", metavar="FILE")
    inputs: Path | None = option(None, "Inputs of the encoder, in place of a prompt.", metavar="X.npz")
    max_new_tokens: int = option(128, "Limit of generated tokens.", min=1, metavar="N")
    stop: str | None = option(None, "Token ids that end the text. Default: the model's.", metavar="ID,...")
    temperature: float = option(0.0, "Temperature of the draw; 0 takes the likeliest token.", min=0.0)
    top_k: int = option(0, "Draw from the K likeliest tokens; 0: from all.", min=0, metavar="K")
    top_p: float = option(1.0, "Draw from the likeliest tokens that add up to this probability.", min=0.0, max=1.0)
    min_p: float = option(0.0, "Draw from tokens at least this share as likely as the likeliest.", min=0.0, max=1.0)
    repetition_penalty: float = option(1.0, "Divide logits of tokens in prompt and text by this.", min=0.01)
    presence_penalty: float = option(0.0, "Subtract this from logits of tokens in the text.")
    frequency_penalty: float = option(0.0, "Subtract this from a token's logit for each time it is in the text.")
    seed: int = option(0, "Seed of the draw.")


@takes_groups()
def generate(
    directory: ArtifactArgument,
    options: PromptOptions,
    verify_key: VerifyKeyOption = None,
    output_format: FormatOption = OutputFormat.TABLE,
) -> None:
    """Generate tokens after a prompt and print each at once, as text; without a tokenizer, as ids.

    If the model has an encoder, the prompt goes to the encoder. With --inputs, the prompt begins the text.
    """
    from relaxtune.pipeline.artifact.generation.generator import Sampling
    from relaxtune.pipeline.artifact.module import Module
    from relaxtune.pipeline.artifact.text.tokenizer import artifact_tokenizer, end_tokens, read_tokenizer

    prompts = (options.ids is not None) + (options.prompt is not None)
    if prompts > 1 or (prompts == 0 and options.inputs is None):
        raise UsageError("expected one prompt: --ids ID,ID,..., or --prompt TEXT")
    tokenizer = None if options.tokenizer is None else read_tokenizer(options.tokenizer)
    if options.ids is not None:
        ids = _ids(options.ids, "--ids")
    elif options.prompt is None:
        ids = []
    else:
        tokenizer = tokenizer or artifact_tokenizer(directory, "; or name the file by --tokenizer FILE")
        tokenizer.no_truncation()
        ids = tokenizer.encode(options.prompt).ids
    stop = end_tokens(directory) if options.stop is None else _ids(options.stop, "--stop")
    given = asdict(options)
    sampling = Sampling(**{field.name: given[field.name] for field in fields(Sampling) if field.name in given})
    module = Module.load(directory, verify_key=verify_key)
    prompt, inputs = ids, None if options.inputs is None else read_arrays(options.inputs)
    if inputs is None and module.generator.generation.names.context:
        prompt, inputs = [], {"input_ids": np.array([ids])}
    decoded = _text_of(tokenizer)
    tokens, text, first = [], "", 0.0
    started = time.perf_counter()
    most = options.max_new_tokens
    for token in module.generate(prompt, inputs=inputs, max_new_tokens=most, stop=stop, sampling=sampling):
        first = first or time.perf_counter()
        part = decoded(token)
        tokens.append(token)
        text += part
        if output_format is OutputFormat.TABLE:
            typer.echo(part, nl=False)
    first_ms = 1e3 * (first - started)
    rest_ms = 1e3 * (time.perf_counter() - first) / max(len(tokens) - 1, 1)
    if output_format is OutputFormat.JSON:
        found = {"prompt": ids, "tokens": tokens, "text": text if tokenizer is not None else None}
        print_json({**found, "first_token_ms": first_ms, "token_ms": rest_ms})
        return
    typer.echo()
    stderr_console().print(f"{len(tokens)} tokens: the first after {first_ms:.1f} ms, then {rest_ms:.2f} ms each")


@takes_groups()
def embed(
    directory: ArtifactArgument,
    texts: Annotated[Path, typer.Argument(metavar="FILE.txt", help="Texts, one for each line.")],
    out: Path | None = option(None, "Where to write the vectors: float32, one row for each line.", metavar="X.npy"),
    verify_key: VerifyKeyOption = None,
    output_format: FormatOption = OutputFormat.TABLE,
) -> None:
    """Compute a vector for each line of a file; --format json without --out prints the vectors."""
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


def _ids(text: str, name: str) -> list[int]:
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() for part in parts):
        raise UsageError(f"{name} {text!r}: expected token ids such as 1,15043,3186")
    return [int(part) for part in parts]


def _text_of(tokenizer: Any) -> Callable[[int], str]:
    """Return a function that takes each token in turn and returns the text that is complete with it."""
    if tokenizer is None:
        return lambda token: f"{token} "
    from tokenizers.decoders import DecodeStream

    stream = DecodeStream(skip_special_tokens=True)
    return lambda token: stream.step(tokenizer, token) or ""


def _bisect(
    done: ValidatedArtifact, directory: Path, repro: Path | None, database: DatabaseUrl | None
) -> Bisection | None:
    """Return what makes a validation fail, with a reproduction written; None when it passed or nothing was found.

    A bisection that is not possible is logged and changes nothing: the validation has failed all the same.
    """
    from relaxtune.pipeline.bisect import bisect
    from relaxtune.pipeline.jobs.reproduction import write_reproduction

    module, model, report = done.module, done.model, done.report
    if report.passed:
        return None
    inputs = done.inputs[report.failed_sample or 0]
    try:
        found = bisect(module, model, inputs, report.tolerance, database=database)
    except PipelineError as e:
        logger.warning("not bisected: %s", e)
        return None
    if found is None:
        logger.warning("not bisected: run again on the input that failed, the module was right")
        return None
    folder = repro or directory.with_name(f"{directory.name}-repro")
    made = write_reproduction(
        found, module.manifest, directory, model, inputs, report.tolerance, folder, database=database
    )
    return replace(found, reproduction=str(made.script))


def inputs_file(option: str = "--inputs") -> str:
    """Return what an option for the inputs of a call expects."""
    return f"for {option} a .npz file with one array for each input, as numpy.savez(path, input_ids=..., ...) writes"


def read_arrays(path: Path, expected: str | None = None) -> dict[str, np.ndarray]:
    """Return the arrays of a .npz file by name.

    Raises `UsageError`: it is none; the message says what is expected.
    """
    from relaxtune.models.files import read_regular

    try:
        content = io.BytesIO(read_regular(path))
        with zipfile.ZipFile(content) as archive:
            size = sum(one.file_size for one in archive.infolist())
        if size > (memory := os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")):
            raise UsageError(
                f"{path} unpacks to {size / 1e9:,.0f} GB, and this machine has {memory / 1e9:,.0f} GB of memory"
            )
        with np.load(content, allow_pickle=False) as members:
            # Values that are no arrays come as bytes.
            return {
                name: np.lib.format.read_array(io.BytesIO(value)) if isinstance(value, bytes) else value
                for name, value in members.items()
            }
    except (OSError, ValueError, RuntimeError, MemoryError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        raise UsageError(f"{path} cannot be read ({error}); expected {expected or inputs_file()}") from error
