"""`--set KEY=VALUE`: the rare options of a command, hidden from its help and named there as keys of one option."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperOption

from relaxtune.pipeline.errors import UsageError

_TRUTHS = {
    **dict.fromkeys(("true", "yes", "on", "1"), True),
    **dict.fromkeys(("false", "no", "off", "0"), False),
}


def set_option(keys: Sequence[str]) -> inspect.Parameter:
    """Return the option `--set` of a command with rare options."""
    text = f"A rare setting (repeatable; see docs/command-line.md): {', '.join(keys)}."
    kind = Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help=text)]
    return inspect.Parameter("settings", inspect.Parameter.KEYWORD_ONLY, default=None, annotation=kind)


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
