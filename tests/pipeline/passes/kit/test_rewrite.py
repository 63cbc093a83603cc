from __future__ import annotations

import numpy as np
from tvm import relax

from relaxtune.pipeline.passes.kit.graph import Graph
from relaxtune.pipeline.passes.kit.ir import bindings_of, is_op, key_of, main_of
from relaxtune.pipeline.passes.kit.rewrite import DONE, Rewriter, rename_bindings, replace_found, rewrite
from tests.pipeline.passes.pass_cases import assert_agrees, graph_of, operators_of, run_module, state_of

op = relax.op
X = {"x": ((2, 8), "float32")}
VALUES = np.random.default_rng(0).standard_normal((2, 8)).astype("float32")


def chain(b: relax.BlockBuilder, x: relax.Var) -> relax.Expr:
    return b.emit(op.tanh(b.emit(op.negative(b.emit(op.exp(x))))))


def the(graph: Graph, name: str) -> relax.Var:
    (var,) = (binding.var for binding in graph.bindings if is_op(binding.value, name))
    return var


def test_rewrite_binds_under_the_old_name_and_keeps_the_rest() -> None:
    graph = graph_of(chain, X)
    seen = Graph(graph.mod)
    changed = the(seen, "negative")

    def rule(new: Rewriter, binding: relax.VarBinding) -> relax.Expr | None:
        return op.abs(new.of(binding.value.args[0])) if binding.var == changed else None

    made = rewrite(graph.mod, state_of(graph), rule)
    assert operators_of(made) == ["exp", "abs", "tanh"]
    names = [binding.var.name for binding in bindings_of(main_of(made))]
    assert names == [binding.var.name for binding in seen.bindings]


def test_a_variable_in_place_of_a_binding_is_read_by_its_readers() -> None:
    graph = graph_of(chain, X)
    changed = the(Graph(graph.mod), "negative")
    made = replace_found(graph.mod, state_of(graph), {changed: 0}, lambda new, one, _: new.of(one.value.args[0]))
    assert operators_of(made) == ["exp", "tanh"]


def test_done_binds_nothing_and_dead_bindings_go() -> None:
    """A rule that writes a binding's reader anew drops the binding."""
    graph = graph_of(chain, X)
    seen = Graph(graph.mod)
    dropped, reader = the(seen, "negative"), the(seen, "tanh")

    def rule(new: Rewriter, binding: relax.VarBinding) -> relax.Expr | object | None:
        if binding.var == dropped:
            return DONE
        return op.sin(new.of(seen.value(dropped).args[0])) if binding.var == reader else None

    assert operators_of(rewrite(graph.mod, state_of(graph), rule)) == ["exp", "sin"]


def test_extra_bindings_stand_for_the_nodes_of_others_and_compute() -> None:
    graph = graph_of(chain, X)
    state = state_of(graph)
    state.sources |= {binding.var.name: (f"node_{binding.var.name}",) for binding in Graph(graph.mod).bindings}
    changed = the(Graph(graph.mod), "negative")

    def make(new: Rewriter, binding: relax.VarBinding, _: int) -> relax.Expr:
        twice = new.extra("twice", op.multiply(new.of(binding.value.args[0]), relax.const(2.0)), [binding.var])
        return op.negative(op.multiply(twice, relax.const(0.5)))

    made = replace_found(graph.mod, state, {changed: 0}, make)
    assert state.sources["twice"] == (f"node_{changed.name}",)
    assert_agrees(run_module(made, [VALUES]), [np.tanh(-np.exp(VALUES))], 1e-6)


def test_rename_bindings_renames_uses_too() -> None:
    graph = graph_of(chain, X)
    seen = Graph(graph.mod)
    renamed = rename_bindings(seen.main, {the(seen, "exp"): "first"})
    first, second, *_ = bindings_of(renamed)
    assert (first.var.name, second.value.args[0].name) == ("first", "first")


def test_graph_tells_who_reads() -> None:
    """A result of `main` reads itself, and so has no only reader."""
    graph = Graph(graph_of(chain, X).mod)
    result = graph.bindings[-1].var
    assert graph.readers(the(graph, "exp")) == [the(graph, "negative")]
    assert graph.only_reader(the(graph, "exp")) == the(graph, "negative")
    assert graph.readers(result) == [result]
    assert graph.only_reader(result) is None


def test_behind_follows_first_operands_through_the_named_operators() -> None:
    graph = Graph(graph_of(chain, X).mod)
    last = the(graph, "tanh")
    assert graph.behind(last, "tanh", "negative") == [last, the(graph, "negative"), the(graph, "exp")]
    assert graph.behind(last) == [last]


def test_keys_are_equal_for_equal_expressions_only() -> None:
    x = relax.Var("x", relax.TensorType([2, 8], "float32"))

    def key(expr: relax.Expr) -> object:
        return key_of(expr, {x: "x"})

    assert key(op.add(x, relax.const(1.0))) == key(op.add(x, relax.const(1.0)))
    # Numbers by value and dtype, larger constants by object, attributes by their text.
    assert key(op.add(x, relax.const(1.0))) != key(op.add(x, relax.const(2.0)))
    assert key(op.add(x, relax.const(1.0))) != key(op.add(x, relax.const(1.0, "float16")))
    assert key(relax.const(np.ones(3))) != key(relax.const(np.ones(3)))
    assert key(op.sum(x, axis=[0])) != key(op.sum(x, axis=[1]))
    assert key(op.exp(x)) != key_of(op.exp(x), {})
