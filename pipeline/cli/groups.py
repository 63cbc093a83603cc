"""Groups of options: a frozen dataclass whose fields are each an `option`; `takes_groups` gives them to a command.

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
    """Return a field of a group: its default, its help, and its names if the field's own name is not enough.

    A rare option is hidden from the help, which names it as a key of `--set`.
    """
    declared = typer.Option(*names, help=text, rich_help_panel=panel, hidden=rare, **more)
    field: Value = dataclasses.field(default=default, metadata={"option": declared})
    return field


def takes_groups(*, without: Sequence[str] = ()) -> Callable[[Command], Command]:
    """Replace each parameter of a command that is a dataclass by the options that its fields are.

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
                options.append(parameter.replace(annotation=kind, kind=inspect.Parameter.KEYWORD_ONLY))
                continue
            made = _options(typing.cast(type, kind), without)
            groups[parameter.name] = typing.cast(type, kind), [option.name for option in made]
            options += made
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


def _options(group: type, without: Sequence[str]) -> list[inspect.Parameter]:
    hints = typing.get_type_hints(group, include_extras=True)
    return [
        inspect.Parameter(
            field.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=inspect.Parameter.empty if field.default is dataclasses.MISSING else field.default,
            annotation=Annotated[hints[field.name], field.metadata["option"]] if field.metadata else hints[field.name],
        )
        for field in dataclasses.fields(group)
        if field.name not in without
    ]
