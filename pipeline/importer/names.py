"""Give every binding of `main` a name that leads back to an ONNX node, and write the map."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import tvm
from tvm import relax
from tvm.relax.expr_functor import PyExprMutator, mutator

OUTPUT = "output"


@mutator
class _RenameBindings(PyExprMutator):  # type: ignore[misc]
    """Replace the name of each variable in `names` where it is bound; its uses follow."""

    def __init__(self, names: Mapping[str, str]) -> None:
        super().__init__()
        self._names = names

    def visit_var_def_(self, var: relax.Var) -> relax.Var:
        return self._renamed(var, relax.Var)

    def visit_dataflow_var_def_(self, var: relax.DataflowVar) -> relax.Var:
        return self._renamed(var, relax.DataflowVar)

    def _renamed(self, var: relax.Var, kind: type[relax.Var]) -> relax.Var:
        name = self._names.get(var.name)
        if name is None:
            return var
        new = kind(name, var.ty)
        self.set_var_remap(var, new)
        return new


def name_bindings(
    function: relax.Function, marks: Sequence[tuple[str, str]], hints: Mapping[str, str]
) -> tuple[relax.Function, dict[str, str]]:
    """Return `function` with every binding named after an ONNX node, and the map binding name -> node name.

    Parameters
    ----------
    function
        `main` as the frontend built it.
    marks
        (binding name, node name) in emission order: the last binding of each node.
    hints
        Node name -> identifier for its unmarked bindings, which become `<identifier>_s0`, `_s1`, ...
    """
    node_of_mark = dict(marks)
    bound = [binding.var.name for block in function.body.blocks for binding in block.bindings]
    renames: dict[str, str] = {}
    nodes: dict[str, str] = {}
    waiting: list[str] = []
    taken = set(bound)
    for name in bound:
        waiting.append(name)
        if name not in node_of_mark:
            continue
        node = node_of_mark[name]
        for inner in waiting:
            new = inner if inner.startswith(hints[node]) else _fresh(hints[node], taken)
            if new != inner:
                renames[inner] = new
            nodes[new] = node
        waiting = []
    for inner in waiting:  # the copy of the result that closes the dataflow block computes nothing
        nodes[inner] = OUTPUT
    return _RenameBindings(renames).visit_expr(function), nodes


def _fresh(hint: str, taken: set[str]) -> str:
    index = 0
    while (name := f"{hint}_s{index}") in taken:
        index += 1
    taken.add(name)
    return name
