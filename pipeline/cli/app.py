"""`relaxtune`: the command line. One file a group of commands; this one joins them and owns errors and exit codes.

The command files import what is heavy (TVM, ONNX, SQLAlchemy) inside the command that needs it, so that `--help` and
usage errors answer at once.
"""

from __future__ import annotations

import gc
import signal
import sys
import traceback
from collections.abc import Iterator
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

import relaxtune
from relaxtune.pipeline.cli import (
    artifact,
    artifacts,
    batch,
    bench,
    compilation,
    dashboard,
    doctor,
    gate,
    inspection,
    report,
)
from relaxtune.pipeline.cli.db import group as database
from relaxtune.pipeline.cli.groups import Command
from relaxtune.pipeline.cli.output import configure_logging, print_error
from relaxtune.pipeline.cli.set_option import CommandWithSet
from relaxtune.pipeline.errors import PipelineError, UsageError
from relaxtune.pipeline.printable import printable
from relaxtune.pipeline.tuning.measure.stop import signals_end_native_code
from relaxtune.tuning_db.urls import hide_secrets

EXIT_FAILED = 1
EXIT_INTERRUPTED = 130
# Objects made between two collections of garbage, 700 by default: most are TVM's and SymPy's modules, and stay. With
# these `compile` takes 0.9 of the time for bert-tiny and 0.95 for BERT-base, and no more memory (2 cores).
_OBJECTS_A_COLLECTION = 10_000


class _Commands(TyperGroup):
    def invoke(self, ctx: Any) -> Any:
        """Run a command; of an option that only other commands have, the message names them."""
        try:
            return super().invoke(ctx)
        except Exception as error:
            # Typer has no public name for the error of an option that is not there.
            wanted = getattr(error, "option_name", None)
            others = [name for name, options in _options_of(self) if wanted in options]
            refused = getattr(error, "ctx", None)
            if refused is None or not others or refused.command_path.partition(" ")[2] in others:
                raise
            more = f" and {len(others) - 5} more" if len(others) > 5 else ""
            raise UsageError(
                f"{wanted} is no option of `{refused.command_path}`; these commands have it: "
                f"{', '.join(others[:5])}{more}"
            ) from error


def _options_of(command: Any, name: str = "") -> Iterator[tuple[str, list[str]]]:
    """Yield each command below one, by its words, with its options."""
    yield name, [one for parameter in command.params for one in (*parameter.opts, *parameter.secondary_opts)]
    for word, inner in getattr(command, "commands", {}).items():
        yield from _options_of(inner, f"{name} {word}".strip())


app = typer.Typer(
    name="relaxtune",
    cls=_Commands,
    help="From an ONNX transformer to a tuned, validated shared library.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"relaxtune {relaxtune.__version__}")
        raise typer.Exit


@app.callback()
def _root(
    _version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks.")] = False,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Log details to stderr.")] = False,
) -> None:
    """From an ONNX transformer to a tuned, validated shared library."""
    configure_logging(verbose=verbose or debug)


COMMANDS: dict[str, Command] = {
    "tune": compilation.tune,
    "compile": compilation.compile_command,
    "validate": artifacts.validate_command,
    "compare": artifacts.compare,
    "bench": bench.bench,
    "run": artifacts.run,
    "generate": artifacts.generate,
    "embed": artifacts.embed,
    "gate": gate.gate,
    "inspect": inspection.inspect,
    "calibrate": inspection.calibrate,
    "report": report.report,
    "dashboard": dashboard.dashboard,
    "doctor": doctor.doctor,
}
for name, command in COMMANDS.items():
    app.command(name=name, cls=CommandWithSet)(command)
app.add_typer(artifact.app, name="artifact")
app.add_typer(batch.app, name="batch")
app.add_typer(doctor.cluster, name="cluster")
app.add_typer(database.app, name="db")


def expected_errors() -> tuple[type[BaseException], ...]:
    """Return the errors whose message is meant for the user; any other is a defect and keeps its traceback."""
    from relaxtune.models.errors import ModelError
    from relaxtune.schedules.errors import ScheduleError
    from relaxtune.tuning_db.errors import TuningDatabaseError

    return (PipelineError, ModelError, ScheduleError, TuningDatabaseError, OSError, MemoryError, KeyboardInterrupt)


def exit_code_of(error: BaseException) -> int:
    """Return the exit code the command line gives for `error` (DESIGN, section 5)."""
    if isinstance(error, KeyboardInterrupt):
        return EXIT_INTERRUPTED
    if isinstance(error, PipelineError):
        return error.exit_code
    return EXIT_FAILED


def _check_text(arguments: list[str]) -> None:
    """Refuse names that are not UTF-8: no manifest, page or database could hold them."""
    for argument in arguments:
        if any("\ud800" <= letter <= "\udfff" for letter in argument):
            raise UsageError(f"the name {printable(argument)} is not UTF-8; rename the file or the folder")


def main(arguments: list[str] | None = None) -> None:
    """Run the command line and exit with its code."""
    arguments = sys.argv[1:] if arguments is None else arguments
    debug = "--debug" in arguments
    # `--debug` and `--verbose` read the same before and after the command.
    leading = [flag for flag in ("--debug", "--verbose") if flag in arguments]
    rest = [argument for argument in arguments if argument not in leading]
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)  # as clean as Ctrl-C
    collected = gc.get_threshold()
    gc.set_threshold(_OBJECTS_A_COLLECTION, *collected[1:])
    try:
        _check_text(arguments)
        with signals_end_native_code():
            app(args=[*leading, *rest], prog_name="relaxtune")
    except SystemExit as ended:
        if ended.code == EXIT_INTERRUPTED:  # Typer has taken the KeyboardInterrupt.
            print_error("interrupted")
        raise
    except (Exception, KeyboardInterrupt) as error:
        if not isinstance(error, expected_errors()):
            raise
        if debug:
            sys.stderr.write(printable(hide_secrets(traceback.format_exc())))
        text = "interrupted" if isinstance(error, KeyboardInterrupt) else str(error) or type(error).__name__
        print_error(f"out of memory: {text}" if isinstance(error, MemoryError) else text)
        sys.exit(exit_code_of(error))
    finally:
        gc.set_threshold(*collected)
        signal.signal(signal.SIGTERM, before)
