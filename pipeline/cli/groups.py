"""Options of commands: an `option` each, or a frozen dataclass of them; `takes_groups` gives them to a command.

Help shows the options in panels, the rare ones as keys of `--set KEY=VALUE` (`set_option.py`).
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import typing
from collections.abc import Callable, Sequence
from typing import Annotated, Any, TypeVar

import typer

from relaxtune.pipeline.cli.set_option import set_option

Command = Callable[..., None]
Value = TypeVar("Value")


def option(default: Value, text: str, *names: str, panel: str | None = None, rare: bool = False, **more: Any) -> Value:
    """Return a group's field, or a command's parameter: its default, help, and names if its own is not enough.

    A rare option is hidden from the help, which names it as a key of `--set`.
    """
    declared = typer.Option(*names, help=text, rich_help_panel=panel, hidden=rare, **more)
    field: Value = dataclasses.field(default=default, metadata={"option": declared})
    return field


def takes_groups(*, without: Sequence[str] = ()) -> Callable[[Command], Command]:
    """Replace each parameter of a command that is a dataclass by the options that its fields are; read each `option`.

    The command is called with the dataclass made of them. An option that is left out keeps its default.

    Fields named in `without` have no meaning for this command, or it has them itself.
    """

    def decorate(command: Command) -> Command:
        hints = typing.get_type_hints(command, include_extras=True)
        groups: dict[str, tuple[type, list[str]]] = {}
        options: list[inspect.Parameter] = []
        for parameter in inspect.signature(command).parameters.values():
            kind = hints[parameter.name]
            if not dataclasses.is_dataclass(kind):
                options.append(_parameter(parameter.name, kind, parameter.default))
                continue
            group = typing.cast(type, kind)
            of_fields = typing.get_type_hints(group, include_extras=True)
            fields = [field for field in dataclasses.fields(group) if field.name not in without]
            groups[parameter.name] = group, [field.name for field in fields]
            options += [_parameter(field.name, of_fields[field.name], field) for field in fields]
        rare = [one.name.replace("_", "-") for one in options if one.annotation.__metadata__[0].hidden]
        if rare:
            options.append(set_option(rare))
        # Arguments, which have no default, come first.
        options.sort(key=lambda option: option.default is not inspect.Parameter.empty)

        @functools.wraps(command)
        def run(**arguments: Any) -> None:
            arguments.pop("settings", None)  # read by `CommandWithSet`
            for name, (kind, fields) in groups.items():
                arguments[name] = kind(**{field: arguments.pop(field) for field in fields})
            command(**arguments)

        # Typer reads a command's options from its signature and annotations.
        run.__signature__ = inspect.Signature(options)  # type: ignore[attr-defined]
        run.__annotations__ = {option.name: option.annotation for option in options}
        return run

    return decorate


def _parameter(name: str, kind: Any, given: Any) -> inspect.Parameter:
    """Return a parameter as Typer reads it; `given` is its default, or the `option` that has it."""
    if isinstance(given, dataclasses.Field):
        kind = Annotated[kind, given.metadata["option"]] if given.metadata else kind
        given = inspect.Parameter.empty if given.default is dataclasses.MISSING else given.default
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=given, annotation=kind)
