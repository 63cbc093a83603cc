"""A decoder's graph as one step of generation: what it grew it now writes in place.

::

    logits, caches [B, H, P + S, D]... = graph(ids [B, S], mask [B, P + S], positions [B, S], caches [B, H, P, D]...)

    logits [B, V], position [1] = step(tokens [B, S], position [1], history [N + 1, B], ..., caches [T, B, H, D]...)

`position` is the number of tokens so far, P, and T a number of positions that holds P + S at least. Where P + S is a
size it becomes T; where P is a value it becomes `position`. Places from P + S on are hidden as padding is. A cache has
its positions outermost, so that T of them are the beginning of one tensor of any capacity. The step writes the new
places of the caches, the next token into the history (and over the tokens, where S is 1), and then the position. Its
state is `Generation.state`; the token is drawn as `schedules.functions.sampling` says.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

import tvm
from tvm import relax, tirx
from tvm.relax.expr_functor import PyExprMutator, mutator
from tvm_ffi import structural_map

from relaxtune.models.spec import LOGITS, POSITION, VISIBLE, DecoderNames, Generation, TensorSpec
from relaxtune.pipeline.importer.graph import ImportedGraph
from relaxtune.pipeline.passes.generation.caches import Decoder, NoDecoderError, find_decoder
from relaxtune.pipeline.passes.generation.state import State, sizes_of_tensor
from relaxtune.pipeline.passes.generation.visibility import computed_from, softmaxes_without_mask
from relaxtune.pipeline.passes.kit.graph import Graph
from relaxtune.pipeline.passes.kit.ir import (
    ELEMENTWISE,
    bindings_of,
    dtype_of,
    is_constant,
    is_op,
    main_of,
    shape_of,
    with_functions,
    with_main,
)
from relaxtune.pipeline.passes.kit.sizes import size_of
from relaxtune.schedules.functions.generation_state import INDEX
from relaxtune.schedules.targets import ResolvedTarget
from relaxtune.schedules.tir.expressions import used_vars

# Operators that compute a token's part [width] of a tensor of that part of others.
_BY_TOKEN = (*ELEMENTWISE, "mean", "sum", "nn.layer_norm", "nn.rms_norm", "matmul")
_LOOK_UPS = ("take", "gather_nd", "gather_elements")


@dataclass(frozen=True)
class StepOptions:
    """How a decoder becomes a step."""

    capacity: int  # Positions of the caches.
    target: ResolvedTarget
    half: str | None = None  # Dtype of caches in place of float32.
    given: Collection[int] = ()  # Places of the inputs that an encoder gives.


def as_step(graph: ImportedGraph, options: StepOptions, sizes: Mapping[str, int] | None = None) -> ImportedGraph:
    """Return a decoder as a step of generation, with some of its axes (T is `VISIBLE`) of known sizes.

    Raises
    ------
    NoDecoderError
        The graph is no decoder, or uses the size of its caches in a way that generation cannot.
    """
    main, sizes = main_of(graph.mod), dict(sizes or {})
    known = {var: sizes[str(var.name)] for var in relax.analysis.defined_symbolic_vars(main) if str(var.name) in sizes}
    main = main.bind_symbolic_vars(known)
    place = graph.mod.get_global_var("main")
    decoder = find_decoder(with_functions(graph.mod, {place: main}), graph.name, options.given)
    total = tirx.Var(VISIBLE, INDEX)
    batch, new = (axis if isinstance(axis, int) else str(axis) for axis in (decoder.batch, decoder.new))
    words = int((shape_of(decoder.logits) or [])[2])
    generation = Generation(options.capacity, words, batch, new, _names(graph, main, decoder))
    # A function has to have its sizes from a parameter; no other one may have T alone.
    carrier = relax.Var(VISIBLE, relax.TensorType([total], INDEX))
    main = relax.Function([*main.params, carrier], main.body, main.ret_ty, main.is_pure, main.attrs)
    sized = main.bind_symbolic_vars({decoder.past: total - sizes_of_tensor(decoder.tokens)[1]})
    mod = with_functions(graph.mod, {place: sized})
    bound = {one.var: other.var for one, other in zip(bindings_of(main), bindings_of(sized), strict=True)}
    decoder = decoder.renamed(dict(zip(main.params, sized.params, strict=True)) | bound)
    writer = _Step(Graph(mod), decoder, options, generation, total, graph.name)
    function = relax.analysis.remove_all_unused(writer.write())
    if VISIBLE in sizes:
        function = function.bind_symbolic_vars({total: sizes[VISIBLE]})
    mod = tvm.relax.transform.Normalize()(with_main(writer.builder_.get(), function))
    main = main_of(mod)
    outputs = zip((LOGITS, POSITION), main.ret_ty.fields, strict=True)
    return replace(
        graph,
        mod=mod,
        inputs=tuple(_spec(str(param.name), param.ty) for param in main.params),
        outputs=tuple(_spec(name, ty) for name, ty in outputs),
        generation=generation,
    )


def _names(graph: ImportedGraph, main: relax.Function, decoder: Decoder) -> DecoderNames:
    inputs = {param: spec.name for param, spec in zip(main.params, graph.inputs, strict=True)}
    result = Graph(with_functions(graph.mod, {graph.mod.get_global_var("main"): main})).values[main.body.body]
    outputs = {field: spec.name for field, spec in zip(result.fields, graph.outputs, strict=True)}
    mask, positions = (None if one is None else inputs[one] for one in (decoder.mask, decoder.positions))
    caches = tuple((inputs[one.param], outputs[one.grown]) for one in decoder.caches)
    context = tuple(inputs[one] for one in decoder.context)
    return DecoderNames(inputs[decoder.tokens], mask, positions, outputs[decoder.logits], caches, graph.inputs, context)


def _spec(name: str, ty: relax.TensorType) -> TensorSpec:
    shape = (int(axis) if isinstance(axis, tirx.IntImm) else str(size_of(axis)) for axis in ty.shape.values)
    return TensorSpec(name, str(ty.dtype), tuple(shape))


@mutator
class _Step(PyExprMutator):  # type: ignore[misc]  # TVM's classes carry no types
    """Writes the step of a graph that has T - S in the place of P."""

    def __init__(
        self, graph: Graph, decoder: Decoder, options: StepOptions, generation: Generation, total: tirx.Var, model: str
    ) -> None:
        functions = {name: func for name, func in graph.mod.functions_items() if name.name_hint != "main"}
        super().__init__(tvm.ir.IRModule(functions, attrs=graph.mod.attrs, global_infos=graph.mod.global_infos))
        self._graph, self._decoder, self._model = graph, decoder, model
        self._options, self._total = options, total
        self._grown = {cache.grown: cache for cache in decoder.caches}
        self._inside = self._look_ups()
        self._open = softmaxes_without_mask(graph, decoder, total, model)
        self._lasts: dict[relax.Var, relax.Var] = {}
        self._only_last = self._read_by_last()
        self._analyzer = tvm.sym.Analyzer()

        self._state = State(self.builder_, options.target, generation, decoder.tokens, total)
        self._context = {one: self._kept(one, sizes_of_tensor(one)) for one in decoder.context}
        self._caches = {}
        for one in decoder.caches:
            _, *heads, _, width = sizes_of_tensor(one.param)
            self._caches[one.param] = self._kept(one.param, [total, self._state.batch, *heads, width])

    def _kept(self, param: relax.Var, shape: list[int | tirx.Expr]) -> relax.Var:
        """Return the parameter of a tensor that is kept between steps."""
        dtype = dtype_of(param)
        dtype = self._options.half or dtype if dtype == "float32" else dtype
        return relax.Var(param.name, relax.TensorType(shape, dtype))

    def write(self) -> relax.Function:
        """Return the step."""
        decoder, state = self._decoder, self._state
        params = [state.tokens, *state.params.values(), *self._context.values(), *self._caches.values()]
        with self.builder_.function("main", params):
            with self.builder_.dataflow():
                for old, new in {decoder.tokens: state.tokens, **self._context}.items():
                    self.set_var_remap(old, state.cast(new, dtype_of(old)))
                if decoder.mask is not None:
                    self.set_var_remap(decoder.mask, state.mask(dtype_of(decoder.mask)))
                if decoder.positions is not None:
                    self.set_var_remap(decoder.positions, state.positions(dtype_of(decoder.positions)))
                for binding in self._graph.bindings:
                    self.visit_binding(binding)
                logits = self._last(decoder.logits)
                row = self.builder_.emit(relax.op.reshape(logits, [state.batch, sizes_of_tensor(logits)[2]]))
                results = self.builder_.emit_output(relax.Tuple([row, state.advanced(state.sampled(row))]))
            self.builder_.emit_func_output(results)
        return self.builder_.get()["main"]

    def visit_var_binding_(self, binding: relax.VarBinding) -> None:  # called by TVM
        value, var = binding.value, binding.var
        if isinstance(value, relax.Tuple) and var == self._graph.main.body.body:
            return
        made = self._made(var, value)
        made = self.builder_.normalize(self.visit_expr(value) if made is None else made)
        new = relax.DataflowVar(var.name, made.ty)
        self.builder_.emit_normalized(relax.VarBinding(new, made))
        self.set_var_remap(var, new)

    def _last(self, expr: tvm.ir.Expr) -> relax.Var:
        """Return the part [B, 1, ...] of a tensor [B, S, ...] for the last token, from as few places as can be."""
        if not self._by_token(expr):
            return self.visit_expr(expr)
        if expr not in self._lasts:
            if expr in self._only_last:
                value = self._graph.values[expr]
                made = relax.Call(value.op, [self._last(arg) for arg in value.args], value.attrs, value.ty_args)
            else:
                end, whole = self._state.new_tokens, self.visit_expr(expr)
                # A matmul in half precision rounds it. Behind the slice, attention would not be known to be rounded.
                readers = (self._graph.value(reader) for reader in self._graph.readers(expr))
                if self._options.half is not None and all(is_op(reader, "matmul") for reader in readers):
                    whole = self._state.cast(whole, self._options.half)
                part = relax.op.strided_slice(whole, [1], [end - 1], [end], assume_inbound=True)
                made = self._state.cast(part, dtype_of(expr))
            made = self.builder_.normalize(made)
            last = self._lasts[expr] = relax.DataflowVar(expr.name, made.ty)
            self.builder_.emit_normalized(relax.VarBinding(last, made))
        return self._lasts[expr]

    def _read_by_last(self) -> set[relax.Var]:
        """Return the tensors [B, S, ...] of which only the last token's part is needed, and that it alone makes."""
        found: set[relax.Var] = set()
        for binding in reversed(self._graph.bindings):
            var, value = binding.var, binding.value
            readers = self._graph.readers(var)
            needed = var == self._decoder.logits or (readers and all(reader in found for reader in readers))
            alone = is_op(value, *_BY_TOKEN) and (not is_op(value, "matmul") or is_constant(value.args[1]))
            if needed and alone and self._by_token(var):
                found.add(var)
        return found

    def _by_token(self, expr: tvm.ir.Expr) -> bool:
        """Whether a tensor is [B, S, width], S being more than 1."""
        sizes = shape_of(expr) if isinstance(expr, relax.Var) else None
        return sizes is not None and len(sizes) == 3 and sizes_of_tensor(expr)[1] != 1

    def _made(self, var: relax.Var, value: tvm.ir.Expr) -> tvm.ir.Expr | None:
        """Return another value of a binding that grows a cache, or that reads P as a number."""
        if var in self._grown:
            cache = self._grown[var]
            written = self._state.written(self._caches[cache.param], self.visit_expr(cache.new))
            return relax.op.permute_dims(self._state.cast(written, dtype_of(var)), [1, 2, 0, 3])
        if var in self._open:
            return relax.op.nn.softmax(self._state.hidden(self.visit_expr(value.args[0])), int(value.attrs.axis))
        if is_op(value, "shape_to_tensor") and var not in self._inside:
            return self._numbers(value)
        if is_op(value, "arange") and self._mentions(value.args[0]):
            start, end, step = value.args
            counted = relax.op.arange(self._first(start), self._first(end), step, dtype_of(var))
            return relax.op.add(self.builder_.emit(counted), self._state.cast(self._state.position, dtype_of(var)))
        if is_op(value, "strided_slice"):
            return self._slice(var, value)
        if is_op(value, "arange"):
            return relax.op.arange(*map(self._analyzer.simplify, value.args), dtype_of(var))
        self._check(var, value)
        return None

    def _mentions(self, expr: object) -> bool:
        return isinstance(expr, tirx.Expr) and any(used.same_as(self._total) for used in used_vars(expr))

    def _first(self, expr: tirx.Expr, total: tirx.Expr | None = None) -> tirx.Expr:
        """Return a number less P: with S in the place of T, or with another number there."""
        total = self._state.new_tokens if total is None else total
        return self._analyzer.simplify(
            structural_map(expr, [(tirx.Var, lambda var: total if var.same_as(self._total) else var)])
        )

    def _numbers(self, call: relax.Call) -> tvm.ir.Expr | None:
        """Return sizes as numbers: P is the position."""
        values = list(call.args[0].values)
        if not any(map(self._mentions, values)):
            return None
        counts, fixed = [self._times(value) for value in values], [self._first(value) for value in values]
        if counts == [1] and isinstance(fixed[0], tirx.IntImm) and int(fixed[0]) == 0:
            return self._state.position
        moved = self.builder_.emit(relax.op.multiply(self._state.position, relax.const(counts, INDEX)))
        return relax.op.add(self.builder_.emit(relax.op.shape_to_tensor(relax.ShapeExpr(fixed))), moved)

    def _times(self, expr: tirx.Expr) -> int:
        """Return how often P is in a number."""
        one = self._analyzer.simplify(self._first(expr, self._total + 1) - expr)
        if not isinstance(one, tirx.IntImm):
            raise NoDecoderError(self._model, f"it computes the number {expr} of the size of its caches")
        return int(one)

    def _slice(self, var: relax.Var, call: relax.Call) -> tvm.ir.Expr | None:
        """Return a slice that begins at P, or that is the end of P + S places, by its places."""
        data, axes, begins, *_ = call.args
        moved: tvm.ir.Expr | None = None
        for axis, begin in zip(map(int, axes.fields), begins.fields, strict=True):
            whole, length = sizes_of_tensor(data)[axis], (shape_of(var) or ())[axis]
            from_end = isinstance(begin, tirx.IntImm) and int(begin) < 0 and self._mentions(whole)
            if self._mentions(length) or not (from_end or self._mentions(begin)):
                continue
            start = self._first(whole + begin if from_end else begin)
            rest = self.visit_expr(data) if moved is None else self.builder_.emit(moved)
            moved = relax.op.take(rest, self._state.places(length, start), axis=axis, mode="clip")
        if moved is not None and len(axes.fields) > 1:
            raise NoDecoderError(self._model, f"{var.name} slices several axes at once, one of them by the past")
        return moved

    def _look_ups(self) -> set[relax.Var]:
        """Return what indices of tensors with T places are computed from: there P + S is a distance in memory."""
        found: set[relax.Var] = set()
        for binding in self._graph.bindings:
            if is_op(binding.value, *_LOOK_UPS) and any(map(self._mentions, shape_of(binding.value.args[0]) or ())):
                found |= set(computed_from(binding.value.args[1], self._graph))
        return found

    def _check(self, var: relax.Var, value: tvm.ir.Expr) -> None:
        """Refuse what has a number of places made of P in another way than P + S."""
        sizes = [*(shape_of(var) or ())]
        if isinstance(value, relax.Call):
            sizes += [arg for arg in value.args if isinstance(arg.ty, tvm.ir.PrimType)]
        for size in filter(self._mentions, sizes):
            rest = self._first(size, tirx.IntImm(INDEX, 0))
            if not isinstance(rest, tirx.IntImm) or int(rest) != 0:
                past = self._analyzer.simplify(size)
                raise NoDecoderError(self._model, f"{var.name} has a size made of the past alone ({past})")
