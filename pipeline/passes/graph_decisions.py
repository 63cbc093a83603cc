"""The choices of the lowering that a tune may settle by measurement: a pass left out, or with another limit of rows.

Each pass is in the lowering since it pays as a rule. It does not pay on every device and for every size; so a tune
times whole models without it (`pipeline.choose.graph_search`), and the model's record keeps what was faster.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace

from relaxtune.pipeline.passes.module import LoweredModule, LoweringOptions

logger = logging.getLogger(__name__)

_EVERY_ROW = 1 << 31


@dataclass(frozen=True)
class GraphDecision:
    """A named alternative to what a pass does: the pass is left out, or acts on matmuls of up to `rows` rows."""

    name: str  # Says what the model is like with it.
    pass_name: str
    rows: int | None = None

    def applied(self, options: LoweringOptions, reason: str = "") -> LoweringOptions:
        """Return options with the decision, and the reason for it."""
        decided = {**options.decided, self.name: reason}
        if self.rows is not None:
            return replace(options, decided=decided, rows_max={**options.rows_max, self.pass_name: self.rows})
        return replace(options, decided=decided, disabled_passes=options.disabled_passes | {self.pass_name})

    def may_change(self, lowered: LoweredModule) -> bool:
        """Whether a model may be another one with the decision: its pass did something, or could with more rows."""
        if any(_BY_NAME[name].pass_name == self.pass_name for name in lowered.options.decided):
            return False
        report = next(one for one in lowered.reports if one.name == self.pass_name)
        more = self.rows == _EVERY_ROW and lowered.target.kind.name == "cuda"
        return report.enabled and (more or report.changed)


#: The decisions, those that gained most in earlier experiments first.
DECISIONS = (
    GraphDecision("norms apart", "fuse_norms", rows=0),
    GraphDecision("norms in all matmuls", "fuse_norms", rows=_EVERY_ROW),
    GraphDecision("Q, K and V apart", "combine_matmuls"),
    GraphDecision("rotary apart", "rotate_in_matmul"),
    GraphDecision("rotary in all matmuls", "rotate_in_matmul", rows=_EVERY_ROW),
    GraphDecision("gates apart", "interleave_gates"),
    GraphDecision("convolutions direct", "convolutions_to_matmul"),
    GraphDecision("transposes apart", "write_matmuls_transposed"),
    GraphDecision("weights not packed", "pack_weights"),
    GraphDecision("weights not turned", "turn_weights"),
    GraphDecision("look-ups apart", "gather_rows"),
    GraphDecision("attention as matmuls", "recognise_attention"),
)
_BY_NAME = {one.name: one for one in DECISIONS}
#: The passes that decisions are about.
DECIDED_PASSES = frozenset(one.pass_name for one in DECISIONS)


def with_decisions(options: LoweringOptions, decided: Mapping[str, str]) -> LoweringOptions:
    """Return options with decisions by name, and the reason for each; names of other versions are left out."""
    for name, reason in decided.items():
        if name in _BY_NAME:
            options = _BY_NAME[name].applied(options, reason)
        else:
            logger.warning("graph decision %r is of another version and is left out; tune the model again", name)
    return options


def decision_notes(options: LoweringOptions, pass_name: str) -> tuple[str, ...]:
    """Return what was decided about a pass, and why."""
    decided = options.decided.items()
    return tuple(f"{name}: {reason}" for name, reason in decided if _BY_NAME[name].pass_name == pass_name)
