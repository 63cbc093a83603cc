"""Events and result of a batch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass

from relaxtune.pipeline.batch.cells import Cell
from relaxtune.pipeline.batch.plan import Plan
from relaxtune.pipeline.errors import ValidationFailedError
from relaxtune.pipeline.tuning.options import TuningSummary
from relaxtune.pipeline.tuning.progress import ProgressEvent
from relaxtune.tuning_db.cell_states import NO_FACTS, CellFacts, CellState


@dataclass(frozen=True)
class CellEvent:
    """A cell came to a state."""

    cell: Cell
    state: CellState
    facts: CellFacts = NO_FACTS
    note: str = ""  # Why nothing had to be done, "" where something had.

    def to_json(self) -> dict[str, object]:
        """Return the event as plain JSON data."""
        facts, cell = asdict(self.facts), asdict(self.cell)
        return {
            "cell": cell.pop("name"),
            "status": self.state.value,
            "reason": facts.pop("error") or "",
            "note": self.note,
            **facts,
            **cell,
        }


@dataclass(frozen=True)
class CandidateEvent:
    """A candidate was measured, or failed."""

    progress: ProgressEvent
    # Cell -> milliseconds of its kernels by the best known of each; only cells that have this task, and only when all
    # of their tasks were measured.
    kernels_ms: dict[str, float]


BatchEvent = CellEvent | CandidateEvent
OnEvent = Callable[[BatchEvent], None]


@dataclass(frozen=True)
class BatchResult:
    """The result of a plan: its cells in the plan's order, and the tuning run of each target that had one.

    A cell that is still `queued` was not reached; `relaxtune batch resume` takes it up.
    """

    plan: Plan
    batch_id: str
    cells: tuple[CellEvent, ...]
    tuning: tuple[TuningSummary, ...]

    @property
    def accepted(self) -> int:
        """How many cells are done."""
        return sum(one.state is CellState.DONE for one in self.cells)

    @property
    def exit_code(self) -> int:
        """The exit code of the command: 0 where every cell was accepted, 3 where a validation failed, else 1."""
        if any(one.facts.validated is False for one in self.cells):
            return ValidationFailedError.exit_code
        return int(self.accepted < len(self.cells))
