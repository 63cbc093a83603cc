"""Pass: what reads rows and places apart is computed of tokens alone; padding is left out."""

from __future__ import annotations

import math
from collections.abc import Sequence

import tvm
from tvm import relax, te, tirx
from tvm.relax.expr_functor import mutator

from relaxtune.models.inputs import InputKind, describe_inputs
from relaxtune.models.unpadding import ROWS, SLOTS, SPANS, TOKENS, Unpadding
from relaxtune.pipeline.errors import UsageError
from relaxtune.pipeline.passes.kit.graph import Graph
from relaxtune.pipeline.passes.kit.ir import dtype_of, is_constant, is_op, main_of, shape_of, with_main
from relaxtune.pipeline.passes.kit.rewrite import DONE, Done, Rewriter, written_by
from relaxtune.pipeline.passes.kit.sizes import sizes_of
from relaxtune.pipeline.passes.kit.state import LoweringState
from relaxtune.pipeline.passes.tokens.axes import MixesTokensError, is_clean, leading, places
from relaxtune.pipeline.passes.tokens.axis_rules import NORMS, Followed, axes_read
from relaxtune.pipeline.passes.tokens.follow import follow_tokens

# Of numbers of tokens on a GPU: each that comes has a CUDA graph.
_MULTIPLE = 64


def unpad(mod: tvm.ir.IRModule, state: LoweringState) -> tvm.ir.IRModule:
    """Return `mod` with tokens alone in what reads rows and places apart, where it was asked for.

    ::

        x = take(table, ids)            [B, S, H]        x = take(table, take(ids, rows))           [tokens, H]
        q = x @ W                       [B, S, H]   ->   q = x @ W                                  [tokens, H]
        a = attention(q, k, v, mask)    [B, S, H]        a = attention(take(q, slots), ..., mask)   [B, S, H]
        y = a @ U                       [B, S, H]        y = take(a, rows) @ U                      [tokens, H]

    `main` gets three more inputs (`Unpadding.lists`). `rows` [tokens] says where each token lies in [B * S], `slots`
    [B, S] which token a place is, and at padding some token of the same row; `spans` is for attention over tokens.
    Attention runs in the padded form here: its mask hides the keys at padding, and nothing reads the queries there.
    Other operators that mix tokens must read masked values there (a mean after a product with the mask).
    Outputs are 0 at padding.

    Raises `UsageError`: the graph has no mask, or an operation mixes tokens and padding; the message names the node.
    """
    if not state.options.unpad:
        return mod
    graph = Graph(mod)
    mask = _mask_of(graph, state)
    try:
        found = follow_tokens(graph, mask)
    except MixesTokensError as e:
        raise UsageError(_refusal(graph, state, str(e))) from None
    zeros = []
    for spec, result in zip(state.graph.outputs, _results(graph), strict=True):
        axes, name = found.of(result), spec.name
        if axes is None or is_clean(axes):
            continue
        zeros.append(name)
        if leading(axes) is None:
            raise UsageError(_refusal(graph, state, f"output {name!r} has tokens along other axes than its first ones"))
    if not found.packed:
        raise UsageError(_refusal(graph, state, f"nothing in it is computed of places that {mask.name!r} masks"))
    multiple = _MULTIPLE if state.launches_cost else 1
    state.unpadding = Unpadding(str(mask.name), tuple(sorted(found.kept)), multiple, tuple(zeros))
    state.note(f"{len(found.packed)} of {len(graph.bindings)} bindings are computed of tokens alone")
    mod, rows, slots = _with_inputs(mod, mask)
    return written_by(mod, _Unpad(mod, state, graph, found, mask, rows, slots))


def _mask_of(graph: Graph, state: LoweringState) -> relax.Var:
    masks = {rule.name for rule in describe_inputs(state.graph.model) if rule.kind is InputKind.MASK}
    found = [
        param for param, spec in zip(graph.main.params, state.graph.inputs, strict=False)
        if spec.name in masks and len(sizes_of(param) or ()) == 2
    ]  # fmt: skip
    if len(found) != 1:
        names = ", ".join(str(param.name) for param in found) or "none"
        raise UsageError(
            f"--unpad of model {state.graph.name!r}: expected one input that masks padding, [rows, places] of 0 and 1, "
            f"got {names}; leave --unpad out"
        )
    return found[0]


def _refusal(graph: Graph, state: LoweringState, reason: str) -> str:
    name, _, rest = reason.removeprefix("at ").partition(": ")
    nodes = state.nodes_of([name]) if reason.startswith("at ") else ()
    where = f"node {', '.join(map(repr, nodes))}: {rest}" if nodes else reason
    return f"--unpad of model {state.graph.name!r}: {where}; leave --unpad out, or use --bucket or --profile"


def _results(graph: Graph) -> list[relax.Var]:
    result = graph.main.body.body
    whole = graph.values.get(result, result)
    return list(whole.fields) if isinstance(whole, relax.Tuple) else [result]


def _with_inputs(mod: tvm.ir.IRModule, mask: relax.Var) -> tuple[tvm.ir.IRModule, relax.Var, relax.Var]:
    """Return the module with the further inputs of `main`, and those of them that say where tokens are."""
    main, tokens = main_of(mod), tirx.Var(TOKENS, "int64")
    rows = relax.Var(ROWS, relax.TensorType([tokens], "int32"))
    spans = relax.Var(SPANS, relax.TensorType([tokens, tirx.IntImm("int64", 2)], "int32"))
    slots = relax.Var(SLOTS, relax.TensorType(shape_of(mask), "int32"))
    params = [*main.params, rows, spans, slots]
    function = relax.Function(params, main.body, main.ret_ty, main.is_pure, main.attrs)
    return with_main(mod, function.with_attr("num_input", len(params))), rows, slots


@mutator
class _Unpad(Rewriter):
    def __init__(
        self, mod: tvm.ir.IRModule, state: LoweringState, graph: Graph, found: Followed, mask: relax.Var,
        rows: relax.Var, slots: relax.Var,
    ) -> None:  # fmt: skip
        super().__init__(mod, state)
        self._found, self._mask, self._rows, self._slots = found, mask, rows, slots
        self._results = set(_results(graph))
        self._tokens = shape_of(rows)[0]  # type: ignore[index]
        self._places = shape_of(mask) or []
        # Variable of the old function -> tokens of it, and its padded form, in the new one.
        self._packed: dict[relax.Var, relax.Var] = {}
        self._padded: dict[relax.Var, tvm.ir.Expr] = {}
        self._at: dict[str, relax.Var] = {}

    def rule(self, binding: relax.VarBinding) -> tvm.ir.Expr | Done | None:
        var, value = binding.var, binding.value
        if isinstance(value, relax.Tuple) and self._results.intersection(value.fields):
            return relax.Tuple([self._result(one) for one in value.fields])
        if var not in self._found.packed:
            return None
        packed = self._of_tokens(var, value)
        self._packed[var] = (
            packed if isinstance(packed, relax.Var) else self.extra(f"{var.name}__tokens", packed, [var])
        )
        if var in self._results and not isinstance(var, relax.DataflowVar):
            self._padded[var] = self.name(var, self._result(var))
        return DONE

    def visit_var_(self, op: relax.Var) -> tvm.ir.Expr:
        return self._whole(op) if op in self._packed else super().visit_var_(op)

    def visit_dataflow_var_(self, op: relax.Var) -> tvm.ir.Expr:
        return self._whole(op) if op in self._packed else super().visit_dataflow_var_(op)

    # Between tokens and the padded form.

    def _whole(self, var: relax.Var) -> tvm.ir.Expr:
        """Return the padded form of tokens, with the graph's number at padding where there is one."""
        if var not in self._padded:
            wide = self.emit(relax.op.take(self._packed[var], self._one("slots"), axis=0, mode="clip"))
            padded = self.extra(f"{var.name}__padded", relax.op.reshape(wide, var.ty.shape), [var])
            held = [factor.pad for factor in places(self._found.of(var) or ())]
            number = held[0] if held and isinstance(held[0], float) else None
            self._padded[var] = padded if number is None else self._filled(var, padded, number)
        return self._padded[var]

    def _result(self, var: tvm.ir.Expr) -> tvm.ir.Expr:
        axes = self._found.of(var)
        return self.of(var) if axes is None or is_clean(axes) else self._filled(var, self.of(var), 0.0)

    def _filled(self, var: relax.Var, padded: tvm.ir.Expr, number: float) -> relax.Var:
        """Return the padded form with a number where the mask hides a place."""
        if "mask" not in self._at:
            mask = self.of(self._mask)
            zero = relax.const(0, dtype_of(mask))
            self._at["mask"] = mask if dtype_of(mask) == "bool" else self.emit(relax.op.not_equal(mask, zero))
        shape = shape_of(var) or []
        cut = leading(self._found.of(var) or ()) or 2
        ones = [*shape[:cut], *([1] * (len(shape) - cut))]
        seen = self.emit(relax.op.reshape(self._at["mask"], ones))
        return self.emit(relax.op.where(seen, padded, relax.const(number, dtype_of(var))))

    def _one(self, name: str) -> relax.Var:
        """Return what is made of the two inputs once: flat slots, and each token's row and place."""
        if name not in self._at:
            rows, width = self.of(self._rows), self._places[1]
            if name == "slots":
                made = relax.op.reshape(self.of(self._slots), [self._places[0] * width])
            elif name == "all":
                return rows
            else:
                part = tirx.floordiv if name == "batch" else tirx.floormod

                def compute(rows: te.Tensor, width: tirx.Expr) -> te.Tensor:
                    return te.compute(rows.shape, lambda t: part(rows[t], width.astype("int32")), name=f"token_{name}")

                made = self.kernel(compute, rows, width, name=f"token_{name}")
            self._at[name] = self.emit(made)
        return self._at[name]

    def _tokens_of(self, expr: tvm.ir.Expr, cut: int, rank: int) -> tvm.ir.Expr:
        """Return an operand of an operation of `rank` axes, `cut` of them leading, as one of tokens."""
        if isinstance(expr, relax.Var) and expr in self._packed:
            return self._packed[expr]
        shape = shape_of(expr) if isinstance(expr.ty, relax.TensorType) else None
        if shape is None or len(shape) <= rank - cut:
            return self.of(expr)
        data = self.of(expr)
        lead, rest = shape[: cut - (rank - len(shape))], shape[cut - (rank - len(shape)) :]
        lead = [tirx.IntImm("int64", 1)] * (cut - len(lead)) + lead
        wide = [not isinstance(size, tirx.IntImm) or int(size) != 1 for size in lead]
        if not any(wide) and not isinstance(self._tokens, tirx.IntImm):
            return self._reshaped(data, rest or [1])
        which = "all" if all(wide) or cut == 1 else "batch" if wide[0] else "place"
        flat = self._reshaped(data, [math.prod(lead[1:], start=lead[0]), *rest])
        return self.emit(relax.op.take(flat, self._one(which), axis=0, mode="clip"))

    def _reshaped(self, data: tvm.ir.Expr, shape: Sequence[tirx.Expr]) -> tvm.ir.Expr:
        if is_constant(data):
            return relax.const(data.value.numpy().reshape([int(size) for size in shape]), dtype_of(data))
        return self.emit(relax.op.reshape(data, list(shape)))

    # Operations of tokens.

    def _of_tokens(self, var: relax.Var, value: tvm.ir.Expr) -> tvm.ir.Expr:
        cut = self._found.packed[var]
        if isinstance(value, relax.Var):
            return self._packed[value]
        shape = shape_of(var) or []
        rank = len(shape)
        if is_op(value, "concat"):
            parts = [self._tokens_of(part, cut, rank) for part in value.args[0].fields]
            return relax.op.concat(parts, int(value.attrs.axis) % rank - cut + 1)
        data = value.args[0]
        if is_op(value, "take"):
            table, ids = value.args
            return relax.Call(
                value.op, [self.of(table), self._tokens_of(ids, cut, len(shape_of(ids) or ()))], value.attrs
            )
        if is_op(value, "matmul"):
            return relax.op.matmul(self._tokens_of(data, cut, rank), self.of(value.args[1]), value.attrs.out_dtype)
        if is_op(value, *_SHAPED):
            return self._moved(value, shape, cut)
        if is_op(value, *NORMS):
            # Counted from the end, the axes are the same behind tokens.
            behind = [axis - rank for axis in axes_read(value)]
            make = relax.op.nn.layer_norm if is_op(value, "nn.layer_norm") else relax.op.nn.rms_norm
            rest = [self.of(one) for one in value.args[1:]]
            return make(self._tokens_of(data, cut, rank), *rest, behind, value.attrs.epsilon)
        return relax.Call(value.op, [self._tokens_of(one, cut, rank) for one in value.args], value.attrs, value.ty_args)

    def _moved(self, value: relax.Call, shape: Sequence[tirx.Expr], cut: int) -> tvm.ir.Expr:
        data = self._packed[value.args[0]]
        if is_op(value, "strided_slice"):
            rank = len(shape)
            axes = relax.Tuple([tirx.IntImm("int64", int(a) % rank - cut + 1) for a in value.args[1].fields])
            rest = [self.of(one) for one in value.args[2:]]
            return relax.Call(value.op, [data, axes, *rest], value.attrs)
        return relax.op.reshape(data, [self._tokens, *shape[cut:]])


_SHAPED = ("reshape", "expand_dims", "squeeze", "strided_slice")
