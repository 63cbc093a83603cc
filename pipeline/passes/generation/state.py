"""The state of a step of generation as parameters of its graph: what is computed of it, and how it is written."""

from __future__ import annotations

import math

import numpy as np
import tvm
from tvm import relax, tirx

from relaxtune.models.spec import COUNTS, HISTORY, PADDING, PLACE, POSITION, SAMPLING, SEED, TOKENS, Generation
from relaxtune.pipeline.passes.kit.ir import dtype_of, shape_of
from relaxtune.pipeline.passes.kit.rewrite import OPAQUE
from relaxtune.schedules.functions.generation_state import INDEX, Source, advance, write_caches
from relaxtune.schedules.functions.sampling import SamplingSpec
from relaxtune.schedules.sampling import sampling_function
from relaxtune.schedules.targets import ResolvedTarget


class State:
    """Emits into a builder; T (`total`) is the number of positions that the step looks at.

    `tokens` is the parameter [B, S] (`batch`, `new`), and `params` are the others by the names of `Generation.state`.
    """

    def __init__(
        self,
        builder: relax.BlockBuilder,
        target: ResolvedTarget,
        generation: Generation,
        tokens: relax.Var,
        total: tirx.Var,
    ) -> None:
        self._builder, self._target, self._total = builder, target, total
        self._capacity = generation.capacity
        self.batch, self.new = sizes_of_tensor(tokens)
        self.tokens = relax.Var(TOKENS, relax.TensorType([self.batch, self.new], INDEX))
        self.params = {
            name: relax.Var(
                name, relax.TensorType([axis if isinstance(axis, int) else self.batch for axis in shape], dtype)
            )
            for name, (shape, dtype) in generation.state.items()
        }
        self.position = self.params[POSITION]
        self.new_tokens = tirx.IntImm(INDEX, self.new) if isinstance(self.new, int) else self.new

    def written(self, cache: relax.Var, new: tvm.ir.Expr) -> relax.Var:
        """Write new places [B, H, S, D] of a cache [T, B, H, D]; return all of it."""
        emit = self._builder.emit
        new = self.cast(emit(relax.op.permute_dims(new, [2, 0, 1, 3])), dtype_of(cache))
        shape = sizes_of_tensor(new)
        strides = [math.prod(shape[axis + 1 :]) for axis in range(4)]
        source = Source(tuple(shape), dtype_of(new), 0, tuple(strides))
        func = write_caches([sizes_of_tensor(cache)], [dtype_of(cache)], shape, [source])
        name = self._builder.add_func(func, "write_caches")
        return emit(relax.op.call_tir_inplace(name, relax.Tuple([cache, new, self.position]), 0, cache.ty))

    def sampled(self, logits: relax.Var) -> relax.Var:
        """Return the token [B] that is drawn after the new ones; it is counted."""
        emit, state = self._builder.emit, self.params
        place = state[PLACE]
        if self.new != 1:
            place = emit(relax.op.broadcast_to(self.places(1, self.new_tokens), [self.batch]))
        spec = SamplingSpec(self.batch, int(sizes_of_tensor(logits)[1]), dtype_of(logits), counts=True)
        function = sampling_function(spec, self._target).with_attr("op_pattern", OPAQUE)
        name = self._builder.add_func(function.without_attr("global_symbol"), "sample")
        given = [logits, state[SAMPLING], state[SEED], place, state[COUNTS]]
        types = [given[4].ty, *(relax.TensorType(list(shape), dtype) for _, shape, dtype in spec.outputs)]
        call = emit(relax.op.call_tir_inplace(name, relax.Tuple(given), [4, -1, -1, -1], types))
        return emit(relax.TupleGetItem(call, 1))

    def advanced(self, token: relax.Var) -> relax.Var:
        """Write the token, then the position; return it."""
        kept = [self.position, self.params[PLACE], self.params[HISTORY], self.tokens]
        function = advance(self.batch, self.new, self._capacity, on_gpu=self._target.kind == "cuda")
        name = self._builder.add_func(function, "advance")
        places = [0, 1, 2, *([3] if self.new == 1 else [])]
        types = [kept[place].ty for place in places]
        call = self._builder.emit(relax.op.call_tir_inplace(name, relax.Tuple([*kept, token]), places, types))
        return self._builder.emit(relax.TupleGetItem(call, 0))

    def mask(self, dtype: str) -> relax.Var:
        """Return 1 for each of the T places that holds a token."""
        emit, op = self._builder.emit, relax.op
        place, before = (emit(op.expand_dims(one, [0])) for one in self._filled())
        after = emit(op.greater_equal(place, emit(op.expand_dims(self.params[PADDING], [1]))))
        return self.cast(emit(op.logical_and(before, after)), dtype)

    def hidden(self, scores: tvm.ir.Expr) -> relax.Var:
        """Return scores [..., T] that are -inf at places without a token."""
        emit = self._builder.emit
        return emit(relax.op.where(self._filled()[1], scores, relax.const(-np.inf, dtype_of(scores))))

    def positions(self, dtype: str) -> relax.Var:
        """Return the place of each new token among those of its sequence."""
        emit, op = self._builder.emit, relax.op
        places = emit(op.expand_dims(self.places(self.new), [0]))
        own = emit(op.subtract(places, emit(op.expand_dims(self.params[PADDING], [1]))))
        return self.cast(emit(op.maximum(own, relax.const(0, INDEX))), dtype)

    def places(self, count: int | tirx.Expr, start: tirx.Expr | int = 0) -> relax.Var:
        """Return so many places [count], from `start` behind the position on."""
        emit = self._builder.emit
        return emit(relax.op.add(emit(relax.op.arange(start, start + count, 1, INDEX)), self.position))

    def cast(self, tensor: tvm.ir.Expr, dtype: str) -> relax.Var:
        """Return a tensor in a dtype."""
        tensor = tensor if isinstance(tensor, relax.Var) else self._builder.emit(tensor)
        return tensor if dtype_of(tensor) == dtype else self._builder.emit(relax.op.astype(tensor, dtype))

    def _filled(self) -> tuple[relax.Var, relax.Var]:
        """Return the T places [T], and whether each is before the end of the new tokens."""
        emit, op = self._builder.emit, relax.op
        place = emit(op.arange(0, self._total, 1, INDEX))
        count = emit(op.shape_to_tensor(relax.ShapeExpr([self.new])))
        return place, emit(op.less(emit(op.subtract(place, self.position)), count))


def sizes_of_tensor(tensor: tvm.ir.Expr) -> list[int | tirx.Expr]:
    """Return the sizes of a tensor's axes, as numbers where they are."""
    return [int(axis) if isinstance(axis, tirx.IntImm) else axis for axis in shape_of(tensor) or ()]
