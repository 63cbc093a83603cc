from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import pytest
from hypothesis import given, strategies as st

from relaxtune.schedules.templates.base import Parameters, TemplateError, added, template_of


@dataclass(frozen=True)
class SomeParameters(Parameters):
    template: ClassVar[str] = "some"

    tile: int = 1
    kind: str = "x"
    fast: bool = False


@dataclass(frozen=True)
class GrownParameters(SomeParameters):
    """`SomeParameters` of a later version."""

    slow: bool = added(default=False)


@given(st.integers(), st.text(), st.booleans())
def test_parameters_survive_json(tile: int, kind: str, fast: bool) -> None:
    parameters = SomeParameters(tile, kind, fast)
    assert SomeParameters.from_json(parameters.to_json()) == parameters
    assert template_of(parameters.to_json()) == "some"


def test_json_is_canonical() -> None:
    assert SomeParameters().to_json() == '{"fast":false,"kind":"x","template":"some","tile":1}'


def test_decisions_mean_the_default_of_a_field_that_was_added_later() -> None:
    before = SomeParameters(tile=3)
    assert GrownParameters(tile=3).to_json() == before.to_json()
    assert GrownParameters.from_json(before.to_json()) == GrownParameters(tile=3)
    slow = GrownParameters(tile=3, slow=True)
    assert GrownParameters.from_json(slow.to_json()) == slow
    assert '"slow":true' in slow.to_json()
    # The version before cannot make what the field asks for.
    with pytest.raises(TemplateError, match="written by another version"):
        SomeParameters.from_json(slow.to_json())


def test_a_field_that_was_added_later_has_a_type_too() -> None:
    with pytest.raises(TemplateError, match=r"got .*slow \(int\)"):
        GrownParameters.from_json('{"fast":false,"kind":"x","slow":1,"template":"some","tile":1}')


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is not JSON"),
        ("[1]", "is no JSON object"),
        ('{"template":"other","tile":1}', "is not of template 'some'"),
        ('{"template":"some","tile":1}', r"expected the fields fast \(bool\), kind \(str\), tile \(int\), got tile"),
        ('{"template":"some","tile":true,"kind":"x","fast":false}', r"got fast \(bool\), kind \(str\), tile \(bool\)"),
    ],
)
def test_from_json_says_what_is_wrong(text: str, message: str) -> None:
    with pytest.raises(TemplateError, match=message):
        SomeParameters.from_json(text)


def test_template_of_asks_for_a_name() -> None:
    with pytest.raises(TemplateError, match="names no template"):
        template_of('{"tile":1}')
