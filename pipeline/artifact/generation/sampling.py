"""`Sampling`: how the next token is drawn."""

from __future__ import annotations

from dataclasses import astuple, dataclass, fields

from relaxtune.pipeline.errors import UsageError

# Field -> the least and the largest value.
_RANGES = {"top_p": (0.0, 1.0), "min_p": (0.0, 1.0), "typical_p": (0.0, 1.0), "temperature": (0.0, 1e6)}


@dataclass(frozen=True)
class Sampling:
    """How the next token is drawn; by default it is the one with the largest logit.

    Filters and penalties mean what they mean in transformers: penalties change the logits first, then the temperature,
    then top-k, top-p, min-p and typical each keep some of the tokens that are left. At temperature 0 no filter matters.
    """

    temperature: float = 0.0
    top_k: int = 0  # 0 keeps all.
    top_p: float = 1.0
    min_p: float = 0.0
    typical_p: float = 1.0
    # A factor against tokens of prompt and text; numbers off the logits of tokens of the text, once, and each time.
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int = 0  # Of the first sequence of a batch; the next one has the next number.

    def __post_init__(self) -> None:
        """Refuse what no token can be drawn by."""
        for name, (least, most) in _RANGES.items():
            if not least <= getattr(self, name) <= most:
                raise UsageError(f"{name} is {getattr(self, name)}; expected {least:g} to {most:g}")
        if self.repetition_penalty <= 0 or self.top_k < 0:
            got = f"{self.repetition_penalty} and {self.top_k}"
            raise UsageError(f"expected repetition_penalty above 0 and top_k of 0 or more, got {got}")

    @property
    def parameters(self) -> tuple[float, ...]:
        """The columns of the tensor that a step reads (`schedules.functions.sampling.PARAMETERS`)."""
        return astuple(self)[: len(fields(self)) - 1]

    @property
    def counts(self) -> bool:
        """Whether it matters which tokens there were."""
        return (self.repetition_penalty, self.presence_penalty, self.frequency_penalty) != (1.0, 0.0, 0.0)


GREEDY = Sampling()
