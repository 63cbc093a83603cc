"""ONNX Runtime loads while something else compiles; what it gives is there before anything is timed."""

from __future__ import annotations

import pytest

from relaxtune.pipeline.bench.measure import Peers
from relaxtune.pipeline.choose import meanwhile as meanwhile_module
from relaxtune.pipeline.choose.meanwhile import meanwhile
from relaxtune.pipeline.errors import PipelineError
from relaxtune.pipeline.prepare import ModelRequest, PreparedModel, prepare_model
from relaxtune.pipeline.validate.reference import Reference
from relaxtune.pipeline.validate.validation import sample_inputs


@pytest.fixture(scope="module")
def prepared() -> PreparedModel:
    return prepare_model(ModelRequest("bert-tiny", {"input_ids": (1, 8)}, "llvm"))


def test_peer_and_reference_are_ready_and_the_samples_known(prepared: PreparedModel) -> None:
    with meanwhile(prepared, benchmark=True, samples=2, reference=None) as ready:
        (peer,) = ready.peers().arms.values()
        peer()
        reference = ready.reference()
    assert reference is not None
    assert reference._loaded is None
    for sample in sample_inputs(prepared.model, samples=2, seed=0, dims={}):
        reference.run(sample)
    assert reference._loaded is None


def test_what_was_made_beforehand_is_taken_and_nothing_is_loaded_that_nothing_asks_for(
    prepared: PreparedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = Reference(prepared.model)
    monkeypatch.setattr(meanwhile_module, "Reference", None)
    monkeypatch.setattr(meanwhile_module, "find_peers", None)
    with meanwhile(prepared, benchmark=False, samples=2, reference=own) as ready:
        assert ready.peers() == Peers()
        assert ready.reference() is own
    with meanwhile(prepared, benchmark=False, samples=0, reference=None) as ready:
        assert ready.reference() is None


def test_a_model_that_onnx_runtime_refuses_is_an_error_where_the_answer_is_asked_for(
    prepared: PreparedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise PipelineError("it does not load")

    monkeypatch.setattr(meanwhile_module, "Reference", refuse)
    with (
        meanwhile(prepared, benchmark=True, samples=1, reference=None) as ready,
        pytest.raises(PipelineError, match="it does not load"),
    ):
        ready.peers()
