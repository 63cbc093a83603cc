"""`relaxtune inspect`: what a model needs and would become, or what keeps it from being imported."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING

import typer

from relaxtune.pipeline.cli.options import (
    FormatOption,
    ModelArgument,
    PrecisionOption,
    SeedOption,
    ShapeOption,
    TargetOption,
    parse_shapes,
)
from relaxtune.pipeline.cli.output import OutputFormat, TableView, print_json, print_table, stdout_console
from relaxtune.pipeline.errors import ImportFailedError

if TYPE_CHECKING:
    from relaxtune.pipeline.inspect import Inspection

_SIGNATURE_CHARS = 100


def inspect(
    model: ModelArgument,
    target: TargetOption = "auto",
    precision: PrecisionOption = None,
    shape: ShapeOption = None,
    seed: SeedOption = 0,
    output_format: FormatOption = OutputFormat.TABLE,
) -> None:
    """Say what a model needs: signature, weights, tasks, FLOPs, bytes, KV cache; or every node that stops its import.

    Exits 1 when a node cannot be imported.
    """
    from relaxtune.pipeline.inspect import inspect_model
    from relaxtune.pipeline.passes.module import LoweringOptions
    from relaxtune.pipeline.prepare import ModelRequest

    request = ModelRequest(
        source=model,
        shapes=parse_shapes(shape),
        target=target,
        lowering=LoweringOptions(precision=precision),
        seed=seed,
    )
    inspection = inspect_model(request)
    if output_format is OutputFormat.JSON:
        print_json(inspection.to_json())
    else:
        _print_facts(inspection)
        _print_unsupported(inspection) if inspection.unsupported else _print_tasks(inspection)
    _raise_if_unsupported(inspection)


def register(app: typer.Typer) -> None:
    """Attach the command to `app`."""
    app.command()(inspect)


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
    print_table(TableView(inspection.model, ("what", "value"), tuple(rows)))


def _print_unsupported(inspection: Inspection) -> None:
    rows = tuple(
        (
            f"{node.domain}.{node.operator}",
            "not imported" if node.opset is None else str(node.opset),
            ", ".join(node.nodes),
            ", ".join(node.inputs),
            node.reason,
            node.nearest,
        )
        for node in inspection.unsupported
    )
    columns = ("operator", "opset", "node", "inputs", "reason", "nearest supported")
    print_table(TableView("nodes that cannot be imported", columns, rows))
    if inspection.survey.not_looked_at:
        stdout_console().print(f"{inspection.survey.not_looked_at} nodes behind them could not be looked at")


def _print_tasks(inspection: Inspection) -> None:
    rows = tuple(
        (task.name, task.family, _sizes(task.signature), str(task.weight), f"{task.flops:,.0f}", f"{task.bytes:,.0f}")
        for task in inspection.tasks
    )
    columns = ("task", "family", "signature", "runs", "FLOPs a run", "bytes a run")
    print_table(TableView(f"tasks for {inspection.target}", columns, rows))
    stdout_console().print(
        f"one inference: {inspection.flops:,.0f} FLOPs, {inspection.bytes:,.0f} bytes read and written by its kernels",
        markup=False,
    )
    for name, reason in inspection.without_task.items():
        stdout_console().print(f"{name} is no task and not counted: {reason}", markup=False, soft_wrap=True)


def _sizes(signature: Mapping[str, object]) -> str:
    """Return the numbers and names of a signature in short, or its text cut off; the whole is in the JSON."""
    rest = {key: value for key, value in signature.items() if key != "family"}
    short = [f"{key}={value}" for key, value in rest.items() if isinstance(value, int | str)]
    text = " ".join(short) or json.dumps(rest, separators=(",", ":"))
    return text if len(text) <= _SIGNATURE_CHARS else f"{text[: _SIGNATURE_CHARS - 3]}..."


def _raise_if_unsupported(inspection: Inspection) -> None:
    if not inspection.unsupported:
        return
    operators = sorted({f"{node.domain}.{node.operator}" for node in inspection.unsupported})
    msg = (
        f"model {inspection.model!r}: {len(inspection.unsupported)} nodes cannot be imported: {', '.join(operators)}. "
        f"Export the model with the nearest supported things named above, give symbolic sizes a number (--shape), or "
        f"add converters to pipeline/importer/converters."
    )
    raise ImportFailedError(msg)
