"""Take norms into fused matmuls: functions that read what a norm would have read, in the place of its result.

See `schedules.tir.row_norm` for the algebra. All makers return a function as FuseTIR would leave it, one that
`recognise_matmul` recognises; parameters are those of the given function in their order, then the new inputs, then the
outputs: statistics or partial sums, if they are one, and the product.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tvm import te, tirx
from tvm.ir.expr import TensorLoad

from relaxtune.schedules.tir.blocks import Size, position_of, shape_of
from relaxtune.schedules.tir.epilogue import MatmulFunction
from relaxtune.schedules.tir.expressions import find_all, list_loads, rebuild
from relaxtune.schedules.tir.rotated_matmul import float32_product
from relaxtune.schedules.tir.row_norm import COUNT, SCALE, SHIFT, partial_sums, row_statistics

Visit = Callable[[tirx.Expr], tirx.Expr]


@dataclass(frozen=True)
class OperandNorm:
    """A norm of the rows of a matmul's left operand.

    `centred`, `epsilon` and `groups` are as in `RowNorm`. With `shifted`, a number is added to each column of the
    product (`beta @ W`): a parameter. With `keeps_statistics`, the statistics are an output.
    """

    centred: bool
    epsilon: float
    groups: int
    shifted: bool
    keeps_statistics: bool


def normalise_operand(func: tirx.PrimFunc, matmul: MatmulFunction, norm: OperandNorm) -> tirx.PrimFunc:
    """Return a fused matmul of normalised rows as one of the rows that the norm reads.

    Its B has to hold `gamma[:, None] * W`. New inputs, in float32: the rows' partial sums [groups, rows..., COUNT];
    where centred, the sums of B's columns [N]; where shifted, what is added to each column of the product [N].
    """
    build = _Builder(func, matmul)
    columns, rows = (matmul.n,), matmul.epilogue.shape[:-1]
    partials = build.input((norm.groups, *rows, COUNT), "float32", "partials")
    sums = build.input(columns, "float32", "column_sums") if norm.centred else None
    shift = build.input(columns, "float32", "shift") if norm.shifted else None
    statistics = row_statistics(partials, matmul.k, centred=norm.centred, epsilon=norm.epsilon)

    def normalise(product: te.Tensor) -> te.Tensor:
        def value(*index: tirx.Var) -> tirx.Expr:
            *row, column = index
            total = product(*index) * statistics(*row, _index(SCALE))
            if sums is not None:
                total += statistics(*row, _index(SHIFT)) * sums[column]
            return total if shift is None else total + shift[column]

        return te.compute(product.shape, value, name="normalised")

    return build.finish(normalise, statistics if norm.keeps_statistics else None)


def keep_partial_sums(func: tirx.PrimFunc, matmul: MatmulFunction, group: int) -> tirx.PrimFunc:
    """Return a fused matmul with the partial sums of its result's rows as an output."""
    return _Builder(func, matmul).finish(lambda product: product, None, group=group)


def normalise_residual(
    func: tirx.PrimFunc, matmul: MatmulFunction, residual: int, *, shifted: bool = True
) -> tirx.PrimFunc:
    """Return a fused matmul that adds normalised rows as one that reads the rows that the norm reads.

    `residual` is the position of the parameter that holds those rows then. New inputs, in float32: their statistics
    [rows..., COUNT], gamma [N] and, where `shifted`, beta [N].
    """
    build = _Builder(func, matmul)
    *rows, width = matmul.epilogue.shape
    statistics = build.input((*rows, COUNT), "float32", "statistics")
    gamma = build.input((width,), "float32", "gamma")
    beta = build.input((width,), "float32", "beta") if shifted else None
    source = func.params[residual]

    def visit(expr: tirx.Expr, at: Visit) -> tirx.Expr | None:
        # A residual that was rounded and widened again need not be rounded.
        load = expr.value if isinstance(expr, tirx.Cast) and str(expr.ty.dtype) == "float32" else expr
        if not isinstance(load, TensorLoad) or not load.source.same_as(source):
            return None
        *row, column = (at(index) for index in load.indices)
        scaled = build.inputs[residual](*row, column).astype("float32") * statistics(*row, _index(SCALE))
        value = (scaled + statistics(*row, _index(SHIFT))) * gamma[column]
        value = value if beta is None else value + beta[column]
        return value if str(expr.ty.dtype) == "float32" else tirx.Cast(str(expr.ty.dtype), value)

    return build.finish(lambda product: product, None, visit)


def find_bias(func: tirx.PrimFunc, matmul: MatmulFunction) -> int | None:
    """Return the position of a float32 bias that is added to the product before all else and used nowhere else.

    A term for each column of the product may be added to that parameter.
    """
    epilogue = matmul.epilogue
    if epilogue.second is not None:
        return None
    added = [
        other
        for total in find_all(epilogue.value, tirx.Add)
        for inner, other in ((total.a, total.b), (total.b, total.a))
        if inner.same_as(epilogue.accumulator)
    ]
    if not added or not isinstance(added[0], TensorLoad) or not epilogue.is_per_column(added[0]):
        return None
    bias = added[0].source
    alone = all(isinstance(other, TensorLoad) and other.source.same_as(bias) for other in added)
    count = sum(use.same_as(epilogue.accumulator) for use in find_all(epilogue.value, tirx.Var))
    read = sum(load.source.same_as(bias) for load in list_loads(epilogue.value))
    if not alone or count != len(added) or read != len(added) or str(bias.ty.dtype) != "float32":
        return None
    return position_of(func, bias)


def adds_only(func: tirx.PrimFunc, matmul: MatmulFunction, residual: int) -> bool:
    """Whether a matmul's epilogue is a sum in float32, rounded once, of the product and parameters with a residual."""
    value = matmul.epilogue.value
    terms = [value.value if isinstance(value, tirx.Cast) else value]
    leaves: list[tirx.Expr] = []
    while terms:
        term = terms.pop()
        if str(term.ty.dtype) != "float32":
            return False
        if isinstance(term, tirx.Add):
            terms += [term.a, term.b]
        else:
            leaves.append(term.value if isinstance(term, tirx.Cast) else term)
    loads = [leaf for leaf in leaves if isinstance(leaf, TensorLoad)]
    read = [load for load in loads if load.source.same_as(func.params[residual])]
    products = [leaf for leaf in leaves if leaf.same_as(matmul.epilogue.accumulator)]
    return len(read) == len(products) == 1 and len(loads) + 1 == len(leaves)


class _Builder:
    """A fused matmul under construction, of the parameters of another, which reads no statistics of A's rows."""

    def __init__(self, func: tirx.PrimFunc, matmul: MatmulFunction) -> None:
        self._func = func
        self._matmul = matmul
        outputs = {matmul.output} | ({matmul.partials.output} if matmul.partials is not None else set())
        self.inputs: dict[int, te.Tensor] = {
            position: te.placeholder(_sizes(shape_of(param) or ()), str(param.ty.dtype), name=str(param.name))
            for position, param in enumerate(func.params)
            if position not in outputs
        }
        self._more: list[te.Tensor] = []

    def input(self, shape: Sequence[Size], dtype: str, name: str) -> te.Tensor:
        """Return a new parameter."""
        self._more.append(te.placeholder(_sizes(shape), dtype, name=name))
        return self._more[-1]

    def finish(
        self,
        normalise: Callable[[te.Tensor], te.Tensor],
        statistics: te.Tensor | None,
        replace: Callable[[tirx.Expr, Visit], tirx.Expr | None] = lambda _expr, _visit: None,
        group: int | None = None,
    ) -> tirx.PrimFunc:
        """Return the function, whose epilogue reads what `normalise` makes of the product.

        `replace` returns what stands in the place of a node of the epilogue, None where it stays; it visits operands
        itself. Statistics are an output beside the function's own, and so are partial sums of `group` columns; partial
        sums that are an output stay.
        """
        m, epilogue = self._matmul, self._matmul.epilogue
        product = normalise(float32_product(self.inputs[m.a], self.inputs[m.b], turned=m.b_transposed))

        def value(*index: tirx.Var) -> tirx.Expr:
            *row, column = index
            at: dict[tirx.Var, tirx.Expr] = dict(zip(epilogue.axes, index, strict=True))
            accumulators = (epilogue.accumulator, epilogue.second)
            for accumulator, place in zip(accumulators, epilogue.product_columns(column), strict=False):
                at[accumulator] = product(*row, place)

            def visit(expr: tirx.Expr) -> tirx.Expr:
                replaced = replace(expr, visit)
                if replaced is not None:
                    return replaced
                if isinstance(expr, tirx.Var):
                    return at.get(expr, expr)
                if isinstance(expr, TensorLoad):
                    inputs = self.inputs.items()
                    source = next(one for at, one in inputs if self._func.params[at].same_as(expr.source))
                    return source(*(visit(index) for index in expr.indices))
                return rebuild(expr, visit)

            return visit(epilogue.value)

        result = te.compute(_sizes(epilogue.shape), value, name="epilogue")
        inputs = [self.inputs[position] for position in sorted(self.inputs)]
        partials = m.partials
        group = partials.group if partials is not None else group
        outputs = [*([] if statistics is None else [statistics]), result]
        if group is not None:
            outputs.insert(0, partial_sums(result, group))
        return te.create_prim_func([*inputs, *self._more, *outputs], index_dtype_override="int64")


def _index(value: int) -> tirx.IntImm:
    return tirx.IntImm("int64", value)


def _sizes(shape: Sequence[Size]) -> list[tirx.Expr]:
    return [_index(size) if isinstance(size, int) else size for size in shape]
