"""Profiles of symbolic axes: least, typical and largest size."""

from __future__ import annotations

import pytest

from relaxtune.models import load_model
from relaxtune.models.axis_profile import AxisProfile, check_profile, parse_profiles, sizes_within
from relaxtune.models.errors import ModelShapeError

NAMES = ("input_ids", "attention_mask", "token_type_ids")


def test_profiles_are_read_from_one_text_or_several() -> None:
    wanted = {"sequence": AxisProfile(1, 128, 512), "batch": AxisProfile(1, 8, 32)}
    assert parse_profiles(["sequence=1:128:512,batch=1:8:32"]) == wanted
    assert parse_profiles(["sequence=1:128:512", "batch = 1 : 8 : 32"]) == wanted


@pytest.mark.parametrize("text", ["sequence", "sequence=512", "sequence=1:512", "=1:2:3", "sequence=1:x:3", "2=1:2:3"])
def test_profile_of_another_form_is_refused(text: str) -> None:
    with pytest.raises(ModelShapeError, match="expected AXIS=MIN:TYPICAL:MAX"):
        parse_profiles([text])


@pytest.mark.parametrize("text", ["sequence=8:4:512", "sequence=1:600:512", "sequence=0:0:0"])
def test_sizes_that_do_not_rise_are_refused(text: str) -> None:
    with pytest.raises(ModelShapeError, match="expected rising sizes"):
        parse_profiles([text])


def test_axis_twice_and_axis_that_is_not_there_are_refused() -> None:
    with pytest.raises(ModelShapeError, match="names axis 'batch' twice"):
        parse_profiles(["batch=1:2:3,batch=1:2:4"])
    model = load_model("bert-tiny", shapes=dict.fromkeys(NAMES, ("batch", 128)))
    check_profile({"batch": AxisProfile(1, 2, 3)}, model)
    with pytest.raises(ModelShapeError, match="axis 'sequence' of a profile is no symbolic axis"):
        check_profile({"sequence": AxisProfile(1, 2, 3)}, model)


def test_profile_beyond_the_table_of_positions_is_refused() -> None:
    model = load_model("bert-tiny", shapes=dict.fromkeys(NAMES, ("batch", "sequence")))
    check_profile({"sequence": AxisProfile(1, 2, 512)}, model)
    with pytest.raises(ModelShapeError, match=r"profile sequence=1:2:513: axis 'sequence' has size 513, table .* 512"):
        check_profile({"sequence": AxisProfile(1, 2, 513)}, model)


def test_sizes_that_are_chosen_stay_within_the_profile() -> None:
    model = load_model("bert-tiny", shapes=dict.fromkeys(NAMES, ("batch", "sequence")))
    assert sizes_within(model, {}) == {"batch": 2, "sequence": 16}
    assert sizes_within(model, {"batch": 1, "sequence": 12}) == {"batch": 1, "sequence": 12}
    assert sizes_within(model, {"sequence": 512}, {"sequence": 7}) == {"batch": 2, "sequence": 7}
