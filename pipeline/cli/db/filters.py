"""The filters of `relaxtune db`: every option once, and `takes_filters`, which gives some of them to a command."""

from __future__ import annotations

import functools
import inspect
import typing
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from typing import Annotated, Any

import typer

from relaxtune.pipeline.errors import UsageError
from relaxtune.tuning_db.records import RecordFilter, Route, Status

#: Name of the parameter -> its type and option. The order is that of `--help`.
OPTIONS: dict[str, Any] = {
    "model": Annotated[str | None, typer.Option("--model", help="Only workloads that a job found in this model.")],
    "family": Annotated[str | None, typer.Option("--family", help="Only this operator family: matmul, softmax, ...")],
    "workload": Annotated[str | None, typer.Option("--workload", help="Only this workload hash.")],
    "shape": Annotated[str | None, typer.Option("--shape", help="Only kernels with an argument like 1x128x768.")],
    "dtype": Annotated[str | None, typer.Option("--dtype", help="Only kernels with an argument like float16.")],
    "target": Annotated[str | None, typer.Option("--target", help="Only this target kind: llvm, cuda.")],
    "arch": Annotated[str | None, typer.Option("--arch", help="Only this architecture: sm_90a, znver4.")],
    "device": Annotated[str | None, typer.Option("--device", help="Only what this device measured: 'NVIDIA H200'.")],
    "tvm": Annotated[str | None, typer.Option("--tvm", help="Only what this TVM version compiled.")],
    "route": Annotated[Route | None, typer.Option("--route", help="Only kernels made by this route.")],
    "status": Annotated[Status | None, typer.Option("--status", help="Only candidates that ended like this.")],
    "job": Annotated[str | None, typer.Option("--job", help="Only candidates of this job.")],
    "since": Annotated[datetime | None, typer.Option("--since", help="Only records of this time (UTC) or later.")],
    "until": Annotated[datetime | None, typer.Option("--until", help="Only records before this time (UTC).")],
}

Command = Callable[..., None]


def takes_filters(*, without: Sequence[str] = ()) -> Callable[[Command], Command]:
    """Give a command the filter options; it is called with the `RecordFilter` they make, as `filters`.

    Parameters
    ----------
    without : sequence of str
        Names of `OPTIONS` that have no meaning for it, or that it has itself.
    """
    names = [name for name in OPTIONS if name not in without]

    def decorate(command: Command) -> Command:
        @functools.wraps(command)
        def run(**arguments: Any) -> None:
            chosen = {name: arguments.pop(name) for name in names}
            command(filters=make_filters(**chosen), **arguments)

        keyword = inspect.Parameter.KEYWORD_ONLY
        hints = typing.get_type_hints(command, include_extras=True)
        own = [
            parameter.replace(annotation=hints[parameter.name], kind=keyword)
            for parameter in inspect.signature(command).parameters.values()
            if parameter.name != "filters"
        ]
        options = [inspect.Parameter(name, keyword, default=None, annotation=OPTIONS[name]) for name in names]
        # Typer reads a command's options from its signature and annotations; required ones come first.
        required = [parameter for parameter in own if parameter.default is inspect.Parameter.empty]
        others = [parameter for parameter in own if parameter.default is not inspect.Parameter.empty]
        parameters = [*required, *options, *others]
        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        return run

    return decorate


def make_filters(
    *,
    shape: str | None = None,
    since: datetime | None = None,
    until: datetime | None = None,
    workload: str | None = None,
    target: str | None = None,
    device: str | None = None,
    tvm: str | None = None,
    job: str | None = None,
    **same: Any,
) -> RecordFilter:
    """Return the filter that the options of a command say; `same` are those that the filter calls alike."""
    return RecordFilter(
        shape=_sizes(shape),
        since=as_utc(since),
        until=as_utc(until),
        workload_hash=workload,
        target_kind=target,
        device_name=device,
        tvm_version=tvm,
        job_id=job,
        **same,
    )


def as_utc(moment: datetime | None) -> datetime | None:
    """Return a time of the command line, which has no zone, in UTC."""
    return None if moment is None else moment.replace(tzinfo=UTC)


def _sizes(text: str | None) -> tuple[int, ...] | None:
    if text is None:
        return None
    if not all(part.isdigit() for part in text.split("x")):
        raise UsageError(f"--shape {text!r}: expected sizes such as 1x128x768")
    return tuple(int(part) for part in text.split("x"))
