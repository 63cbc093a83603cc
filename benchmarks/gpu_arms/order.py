"""`Order`: what the table's process asks one case's process to do, and the names of the arms."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

from benchmarks.gpu_arms.cases import CASES, Case

OWN_ARM = "relaxtune"
INDUCTOR_ARM = "max-autotune"
GRAPH_ARM = "eager-graph"
ORT_ARM = "ort"

# In the table's order.
ARMS = (OWN_ARM, INDUCTOR_ARM, GRAPH_ARM, ORT_ARM)


@dataclass(frozen=True)
class Order:
    """What to do for one case.

    Attributes
    ----------
    case
        Its name.
    cases
        The table that the name is looked up in.
    arms
        Which arms, in the order in which they take turns.
    artifact
        relaxtune's artifact directory.
    runs, warmup
        Timed and untimed runs of each arm.
    masked
        Whether the peers honour the padding mask, as relaxtune's graph does; without it they attend without a mask,
        which is faster and gives the same result on rows without padding.
    lock
        File of the GPU's turn.
    """

    case: str
    arms: tuple[str, ...]
    artifact: str
    runs: int
    warmup: int
    masked: bool
    lock: str
    cases: tuple[Case, ...] = CASES

    def to_json(self) -> str:
        """Return the order as one line of JSON."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Order:
        """Return the order of a line of JSON."""
        data = json.loads(text)
        cases = tuple(Case(**case) for case in data["cases"])
        return cls(**{**data, "arms": tuple(data["arms"]), "cases": cases})


def parse_arms(text: str | None) -> tuple[str, ...]:
    """Return the arms of a comma-separated list, in the table's order; all of them for None.

    Raises
    ------
    ValueError
        A name is no arm.
    """
    if text is None:
        return ARMS
    wanted = {name.strip() for name in text.split(",") if name.strip()}
    unknown = wanted - set(ARMS)
    if unknown or not wanted:
        raise ValueError(f"no arm is called {', '.join(sorted(unknown)) or repr(text)}; expected {', '.join(ARMS)}")
    return tuple(name for name in ARMS if name in wanted)
