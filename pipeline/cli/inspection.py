"""`relaxtune inspect` and `calibrate`: what a model needs and would become, and the ranges of its activations."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from relaxtune.pipeline.cli.gate import read_calls
from relaxtune.pipeline.cli.groups import option, takes_groups
from relaxtune.pipeline.cli.options import DimOption, FormatOption, ModelOptions, SeedOption, parse_dims, parse_shapes
from relaxtune.pipeline.cli.output import OutputFormat, emit, print_json, print_table, stdout_console
from relaxtune.pipeline.errors import ImportFailedError, UsageError
from relaxtune.pipeline.precision.calibration import Method
from relaxtune.pipeline.printable import short
from relaxtune.pipeline.printed_tables import TableView, first_of

if TYPE_CHECKING:
    from relaxtune.models import OnnxModel
    from relaxtune.pipeline.jobs.calibrate import Sample
    from relaxtune.pipeline.jobs.inspect import Inspection


@takes_groups(without=("group_size", "calibration", "bucket", "disable_pass", "dump_ir", "embed_weights", "routes"))
def inspect(
    model: ModelOptions,
    code: bool = option(False, "Generate the code of the kernels too, as compile does.", "--code"),
    output_format: FormatOption = OutputFormat.TABLE,
) -> None:
    """Show inputs, outputs, weights, limits, KV cache and tasks of a model, or every node that cannot be imported.

    Exits 1 if a node cannot be imported or compiling would refuse the model. --code also generates the kernels.
    """
    from relaxtune.pipeline.jobs.inspect import inspect_model

    inspection = inspect_model(model.request(), code=code)
    if output_format is OutputFormat.JSON:
        print_json(inspection.to_json())
    else:
        _print_facts(inspection)
        _print_unsupported(inspection) if inspection.unsupported else _print_tasks(inspection)
    if inspection.unsupported:
        operators = sorted({f"{node.domain}.{node.operator}" for node in inspection.unsupported})
        raise ImportFailedError(
            f"model {inspection.model!r}: {len(inspection.unsupported)} nodes cannot be imported: "
            f"{', '.join(operators)}. Export the model with the nearest supported things named above, give symbolic "
            f"sizes a number (--shape), or add converters to pipeline/importer/converters."
        )


def calibrate(
    source: Annotated[
        str, typer.Argument(metavar="MODEL", help="An .onnx file, a folder, hf:ORG/NAME, or a zoo name.")
    ],
    data: Annotated[
        Path,
        typer.Option("--data", metavar="X.npz|DIR|FILE.txt", help="Inputs of calls (.npz), or a text a line (.txt)."),
    ],
    out: Annotated[Path, typer.Option("--out", metavar="FILE", help="Where to write the ranges (JSON).")],
    tokenizer: Annotated[
        Path | None, typer.Option("--tokenizer", metavar="FILE", help="The model's tokenizer.json, for texts.")
    ] = None,
    method: Annotated[Method, typer.Option("--method", help="How outliers count.")] = Method.MAX,
    shape: Annotated[
        list[str] | None, typer.Option("--shape", metavar="IN=1x128,...", help="Pin input shapes.")
    ] = None,
    dim: DimOption = None,
    seed: SeedOption = 0,
    output_format: FormatOption = OutputFormat.TABLE,
) -> None:
    """Find the ranges of a model's activations; `compile --precision fp8 --calibration FILE` uses them."""
    from relaxtune.models import load_model
    from relaxtune.pipeline.jobs.calibrate import calibrate_model

    shapes = {**parse_shapes(shape), **{axis: (size,) for axis, size in parse_dims(dim).items()}}
    model = load_model(source, shapes=shapes or None, seed=seed)
    record = calibrate_model(model, _samples(model, data, tokenizer), method)
    record.write(out)
    columns = {
        "tensor": lambda one: one[0],
        "limit": lambda one: f"{one[1].limit:.4g}",
        "largest": lambda one: f"{one[1].largest:.4g}",
        "clipped": lambda one: f"{one[1].outliers:.3%}",
    }
    title = f"ranges of {len(record.ranges)} tensors by {method.value}, {record.samples} samples: {out}"
    emit(output_format, {**asdict(record), "key": record.key}, TableView.of(title, record.ranges.items(), columns))


def _samples(model: OnnxModel, data: Path, tokenizer: Path | None) -> list[Sample]:
    """Return the inputs of the calls in a file or folder.

    Raises `UsageError`: there are none, or they cannot be read.
    """
    from relaxtune.pipeline.artifact.text.tokenizer import read_tokenizer
    from relaxtune.pipeline.jobs.calibrate import samples_of_texts

    if data.suffix != ".txt":
        if tokenizer is not None:
            raise UsageError(f"--tokenizer is for texts, and --data {data} has none; leave it out, or name a .txt file")
        return list(read_calls(data, "--data") or ())
    if tokenizer is None:
        raise UsageError(f"--data {data} has texts; name the model's tokenizer.json by --tokenizer FILE")
    try:
        lines = [line.strip() for line in data.read_text(encoding="utf-8").splitlines()]
    except (OSError, ValueError) as error:
        raise UsageError(f"--data {data} cannot be read ({error}); expected UTF-8 text, a sample a line") from error
    samples = samples_of_texts(model, list(filter(None, lines)), read_tokenizer(tokenizer))
    if not samples:
        raise UsageError(f"--data {data} has no text; expected a sample a line, as many as a fixed batch of the model")
    return samples


def _print_facts(inspection: Inspection) -> None:
    rows = [("input", str(spec)) for spec in inspection.inputs]
    rows += [("output", str(spec)) for spec in inspection.outputs]
    rows += [("axes", relation) for relation in inspection.relations]
    rows += [
        ("weights", f"{item.count:,} {item.dtype} in {item.tensors} tensors, {item.bytes:,} bytes")
        for item in inspection.parameters
    ]
    rows.append(("opsets", ", ".join(f"{domain} {version}" for domain, version in inspection.opsets.items())))
    rows.append(("nodes", str(inspection.nodes)))
    if inspection.cache is not None:
        cache = inspection.cache
        size = "depends on symbolic axes" if cache.bytes is None else f"{cache.bytes:,} bytes"
        per_token = "unknown" if cache.bytes_per_token is None else f"{cache.bytes_per_token:,}"
        rows.append(("KV cache", f"{per_token} bytes a token; length {cache.length}: {size}"))
    print_table(TableView.facts(inspection.model, rows, "value"))


def _print_unsupported(inspection: Inspection) -> None:
    columns = {
        "operator": lambda node: f"{node.domain}.{node.operator}",
        "opset": lambda node: "not imported" if node.opset is None else node.opset,
        "node": lambda node: ", ".join(node.nodes),
        "inputs": lambda node: ", ".join(node.inputs),
        "reason": lambda node: node.reason,
        "nearest supported": lambda node: node.nearest,
    }
    print_table(TableView.of("nodes that cannot be imported", inspection.unsupported, columns))
    if inspection.survey.not_looked_at:
        stdout_console().print(f"{inspection.survey.not_looked_at} nodes behind them could not be looked at")


def _print_tasks(inspection: Inspection) -> None:
    columns = {
        "task": lambda task: short(task.name),
        "family": lambda task: task.family,
        "sizes": lambda task: _sizes(task.signature),
        "calls": lambda task: task.weight,
        "MFLOP": lambda task: f"{task.flops / 1e6:,.3f}",
        "MB": lambda task: f"{task.bytes / 1e6:,.3f}",
    }
    console = stdout_console()
    if inspection.tasks:
        print_table(TableView.of(f"tasks for {inspection.target}, work of one inference", inspection.tasks, columns))
        work = f"{inspection.flops:,.0f} FLOPs, {inspection.bytes:,.0f} bytes read and written by kernels"
        console.print(f"one inference: {work}")
    else:
        console.print(f"no tasks for {inspection.target}: no kernel can be tuned")
    _print_without_task(inspection)
    if not inspection.code:
        console.print("kernels were not generated; add --code to try")


def _print_without_task(inspection: Inspection) -> None:
    """Write how many kernels are no tasks: one line where sizes are symbolic, with what to do, else one a reason."""
    kernels = inspection.without_task
    free = dict.fromkeys(axis for spec in inspection.inputs for axis in spec.shape if isinstance(axis, str))
    if kernels and free:
        sizes = ",".join(f"{axis}=SIZE" for axis in free)
        stdout_console().print(
            f"{len(kernels)} kernels are not counted, since the sizes of {', '.join(free)} are known at run time only; "
            f"--dim {sizes} counts them at these sizes (--format json names each kernel)"
        )
        return
    groups = defaultdict(list)
    for name, reason in kernels.items():
        groups[reason].append(name)
    for reason, names in groups.items():
        stdout_console().print(f"{first_of(names)}: no task and not counted, since {reason}")


def _sizes(signature: Mapping[str, object]) -> str:
    """Return the sizes of a matmul or a convolution, or the first input of another kernel; all is in the JSON."""
    numbers = {key: value for key, value in signature.items() if type(value) is int}
    if numbers:
        return " ".join(f"{key}={value}" for key, value in numbers.items() if (key, value) != ("batch", 1))
    match signature.get("inputs"):
        case [[list(shape), str(dtype)], *_]:
            return f"{'x'.join(map(str, shape)) or 'scalar'} {dtype}"
    return ""
