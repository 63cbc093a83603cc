"""Groups of options: a frozen dataclass whose fields are each an `option`; `takes_groups` gives them to a command.

Help shows the options in panels, the rare ones as keys of `--set KEY=VALUE`.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import typing
from collections.abc import Callable, Iterator, Sequence
from typing import Annotated, Any, TypeVar

import typer
from typer.core import TyperCommand, TyperOption

from relaxtune.pipeline.errors import UsageError

Command = Callable[..., None]
Value = TypeVar("Value")
_TRUTHS = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}


def option(default: Value, text: str, *names: str, panel: str | None = None, rare: bool = False, **more: Any) -> Value:
    """Return a field of a group: its default, its help, and its names if the field's own name is not enough.

    A rare option is hidden from the help, which names it as a key of `--set`.
    """
    declared = typer.Option(*names, help=text, rich_help_panel=panel, hidden=rare, **more)
    field: Value = dataclasses.field(default=default, metadata={"option": declared})
    return field


class CommandWithSet(TyperCommand):
    """A command that takes its hidden options as `--set KEY=VALUE` too."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        rare = [one for one in self.params if isinstance(one, TyperOption) and one.hidden]
        self._rare = {one.opts[0].removeprefix("--"): one for one in rare}

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the arguments, each `--set KEY=VALUE` as the hidden option KEY."""
        return super().parse_args(ctx, list(self._expanded(args)) if self._rare else args)

    def _expanded(self, args: list[str]) -> Iterator[str]:
        rest = iter(args)
        for argument in rest:
            if argument == "--":
                yield from (argument, *rest)
            elif argument == "--set":
                yield from self._setting(next(rest, ""))
            elif argument.startswith("--set="):
                yield from self._setting(argument.removeprefix("--set="))
            else:
                yield argument

    def _setting(self, text: str) -> Iterator[str]:
        key, equals, value = text.partition("=")
        found = self._rare.get(key.replace("_", "-"))
        if found is None or not equals:
            raise UsageError(f"--set {text!r}: expected KEY=VALUE with a key of {', '.join(self._rare)}")
        if not found.is_flag:
            yield f"{found.opts[0]}={value}"
            return
        truth = _TRUTHS.get(value.lower())
        if truth is None:
            raise UsageError(f"--set {text!r}: expected true or false")
        if truth or found.secondary_opts:
            yield found.opts[0] if truth else found.secondary_opts[0]


def takes_groups(*, without: Sequence[str] = ()) -> Callable[[Command], Command]:
    """Replace each parameter of a command that is a dataclass by the options that its fields are.

    The command is called with the dataclass made of them. An option that is left out keeps its default.

    Parameters
    ----------
    without : sequence of str
        Fields that have no meaning for this command, or that it has itself.
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
        rare = [one.name.replace("_", "-") for one in options if _declared(one).hidden]
        if rare:
            options.append(_set_option(rare))
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


def _declared(option: inspect.Parameter) -> Any:
    return option.annotation.__metadata__[0]


def _set_option(keys: Sequence[str]) -> inspect.Parameter:
    text = f"A rare setting (repeatable): {', '.join(keys)}; docs/command-line.md says what each does."
    declared = typer.Option("--set", metavar="KEY=VALUE", help=text)
    kind = Annotated[list[str] | None, declared]
    return inspect.Parameter("settings", inspect.Parameter.KEYWORD_ONLY, default=None, annotation=kind)


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
