"""Give every binding of `main` a name that leads back to an ONNX node, and write the map."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import tvm
from tvm import relax, tirx
from tvm.relax.expr_functor import PyExprMutator, mutator


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
) -> tuple[relax.Function, dict[str, tuple[str, ...]]]:
    """Return `function` with every binding named after an ONNX node, and the map binding name -> node names.

    A binding of `main` belongs to the node of the next mark. The copy of the results that closes the dataflow block
    stands for the nodes of its fields: passes drop the copy and keep its name.

    Parameters
    ----------
    function
        `main` as the frontend built it.
    marks
        (binding name, node name) in emission order: the last binding of each node.
    hints
        Node name -> identifier. The marked binding gets it as its name, the others before it `<identifier>_s0`, ...
    """
    node_of_mark = dict(marks)
    bindings = [binding for block in function.body.blocks for binding in block.bindings]
    taken = {binding.var.name for binding in bindings}
    renames: dict[str, str] = {}
    nodes: dict[str, tuple[str, ...]] = {}
    waiting: list[str] = []
    for binding in bindings:
        name = binding.var.name
        if name not in node_of_mark:
            waiting.append(name)
            continue
        node = node_of_mark[name]
        for inner in waiting:
            renames[inner] = _fresh(f"{hints[node]}_s", taken)
            nodes[renames[inner]] = (node,)
        renames[name] = name if name.startswith(hints[node]) else _fresh(hints[node], taken)
        nodes[renames[name]] = (node,)
        waiting = []
    for binding in bindings[len(bindings) - len(waiting) :]:
        nodes[binding.var.name] = _nodes_of_result(binding.value, renames, nodes)
    return _RenameBindings(renames).visit_expr(function), nodes


def name_sizes(function: relax.Function) -> relax.Function:
    """Return `function` with a name of its own for each size that is known when the model runs.

    TVM names the lengths of all ranges alike. Passes tell sizes by their names.
    """
    given = [var for param in function.params for var in relax.analysis.tir_vars_in_type(param.ty)]
    casts = [one for block in function.body.blocks for one in block.bindings if isinstance(one, relax.MatchCast)]
    made = [var for cast in casts for var in relax.analysis.definable_tir_vars_in_type(cast.ty)]
    taken = {str(var.name) for var in given}
    renames: dict[tirx.Var, tirx.Var] = {}
    for var in dict.fromkeys(var for var in made if var not in set(given)):
        name = _fresh(str(var.name), taken)
        if name != var.name:
            renames[var] = tirx.Var(name, var.ty)
    return function.bind_symbolic_vars(renames)


def _nodes_of_result(
    value: tvm.ir.Expr, renames: Mapping[str, str], nodes: Mapping[str, tuple[str, ...]]
) -> tuple[str, ...]:
    fields = value.fields if isinstance(value, relax.Tuple) else [value]
    names = [field.name for field in fields if isinstance(field, relax.Var)]
    return tuple(dict.fromkeys(node for name in names for node in nodes.get(renames.get(name, name), ())))


def _fresh(hint: str, taken: set[str]) -> str:
    """Return `hint`, or `hint` and a number, that no binding has yet; a hint ending in `_s` is always numbered."""
    if hint not in taken and not hint.endswith("_s"):
        taken.add(hint)
        return hint
    index = 0
    while (name := f"{hint}{index}") in taken:
        index += 1
    taken.add(name)
    return name
