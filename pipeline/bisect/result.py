"""`Bisection`: what is to blame for a wrong result, as a frozen value, JSON and a table."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from enum import StrEnum

from relaxtune.pipeline.printed_tables import TableView


class Culprit(StrEnum):
    """The cause of a fault."""

    KERNEL = "kernel"
    PASS = "pass"
    IMPORT = "import"
    RUNTIME = "runtime"


@dataclass(frozen=True)
class FaultyKernel:
    """A kernel of the artifact that differs from its unscheduled form on the same arguments.

    `route`, `record_id` and `decision_sha256` are the manifest's; `reason` says how it differs.
    """

    function: str
    onnx_nodes: tuple[str, ...]
    route: str
    record_id: int | None
    decision_sha256: str | None
    reason: str


@dataclass(frozen=True)
class FaultyPass:
    """A pass after which the results are wrong.

    `optional` says whether it can be switched off; `healed_without` whether the results are right then (None: not
    tried).
    """

    name: str
    phase: str
    optional: bool
    healed_without: bool | None


@dataclass(frozen=True)
class Bisection:
    """Where a wrong result comes from."""

    model: str  # Its name.
    # The stage with the fault. `import`: results are wrong before any pass, by a converter or the normalisation.
    # `runtime`: kernels and passes are right by themselves; what is left is the memory plan or the weights.
    culprit: Culprit
    # The first ONNX node whose tensor diverges, and its operator.
    node: str | None
    op_type: str | None
    # All nodes between the last tensors seen to be right and the first seen to be wrong; `node` is the first of them.
    nodes: tuple[str, ...]
    # The first wrong tensor, and how it differs from ONNX Runtime's.
    tensor: str | None
    reason: str
    # The first faulty kernel in the order of execution, and all of them.
    kernel: FaultyKernel | None = None
    kernels: tuple[FaultyKernel, ...] = ()
    lowering_pass: FaultyPass | None = None  # The pass to blame.
    tried: tuple[str, ...] = ()  # The trials, in order.
    reproduction: str | None = None  # The script that shows the fault, where one was written.

    def to_json(self) -> dict[str, object]:
        """Return the value as plain JSON data."""
        return asdict(self)

    @property
    def summary(self) -> str:
        """One sentence: node, and pass or kernel."""
        where = f"first wrong at ONNX node {self.node!r} ({self.op_type})" if self.node else "no single node"
        if self.culprit is Culprit.KERNEL and self.kernel is not None:
            record = f", record {self.kernel.record_id}" if self.kernel.record_id is not None else ""
            return f"{where}, by kernel {self.kernel.function!r} of route {self.kernel.route}{record}"
        if self.culprit is Culprit.PASS and self.lowering_pass is not None:
            healed = self.lowering_pass.healed_without
            off = " (right without it)" if healed else " (wrong without it too)" if healed is False else ""
            return f"{where}, brought in by pass {self.lowering_pass.name!r}{off}"
        if self.culprit is Culprit.IMPORT:
            return f"{where}, wrong as imported, before any pass"
        return f"{where}; passes and kernels are right by themselves: the memory plan, the weights or the runtime"


def render(bisection: Bisection) -> TableView:
    """Return the bisection as a table for a terminal."""
    rows = [("verdict", bisection.summary), ("tensor", bisection.tensor or "-"), ("difference", bisection.reason)]
    if len(bisection.nodes) > 1:
        rows.append(("nodes it may be in", ", ".join(bisection.nodes)))
    for kernel in bisection.kernels:
        rows.append((f"kernel {kernel.function}", kernel.reason))
    if bisection.reproduction is not None:
        rows.append(("reproduction", f"python {bisection.reproduction}"))
    rows += [(f"step {number}", text) for number, text in enumerate(bisection.tried, 1)]
    return TableView.facts(f"bisection of {bisection.model}: {bisection.culprit.value}", rows)
