"""Multiplications of a warp of the kernel of `template.py`: Q by K, then the weights by V.

Fragments of K and V serve all of a warp's rows. Each is loaded one instruction ahead of its use.
"""

from __future__ import annotations

from collections.abc import Sequence

from tvm import tirx
from tvm.tirx.script import builder as T

from relaxtune.schedules.templates.attention.tiles import ELEMENT_BYTES
from relaxtune.schedules.templates.attention_sm80.plan import ROWS, AttentionPlan
from relaxtune.schedules.templates.emit.device_function import device_call
from relaxtune.schedules.templates.emit.tensor_cores import (
    CHUNK,
    LDMATRIX_SOURCE,
    MMA_KINDS,
    chunk_place,
    mma_source,
    shared_address,
)

# A step along a row moves by two chunks: within a line of banks an exclusive or of the address.
_ALONG = "({at} ^ (2 * {step} & {mask}) * 16) + (2 * {step} & ~{mask}) * 16"
_LOAD_QUERIES = """
__forceinline__ __device__ void {name}(unsigned* to, unsigned at) {{
#pragma unroll
  for (int step = 0; step < {steps}; ++step) relaxtune_ldmatrix(to + 4 * step, {along});
}}
"""
# Either Q's fragments are in registers (`q`), or they are loaded for each step from an address.
_SCORES = """
__forceinline__ __device__ void {name}({parameters}, unsigned keys) {{
  unsigned b[2][4]{fragments};
#pragma unroll
  for (int i = 0; i < {count}; ++i) {{ {clear} }}
  relaxtune_ldmatrix(b[0], keys);
#pragma unroll
  for (int turn = 0; turn < {steps} * {pairs}; ++turn) {{
    int step = turn / {pairs}, j = turn % {pairs}, next = (turn + 1) / {pairs};
    if (j == 0) {{ {load_queries} }}
    if (turn + 1 < {steps} * {pairs})
      relaxtune_ldmatrix(b[(turn + 1) % 2], {along} + (turn + 1) % {pairs} * {rows_bytes});
    unsigned* k = b[turn % 2];
    {multiply}
  }}
}}
"""
_VALUES = """
__forceinline__ __device__ void {name}({parameters}, unsigned values) {{
  unsigned b[2][4];
  relaxtune_ldmatrix_trans(b[0], values);
#pragma unroll
  for (int turn = 0; turn < {steps} * {pairs}; ++turn) {{
    int step = turn / {pairs}, j = turn % {pairs}, next = (turn + 1) % {pairs};
    if (turn + 1 < {steps} * {pairs})
      relaxtune_ldmatrix_trans(b[(turn + 1) % 2], {along} + (turn + 1) / {pairs} * {rows_bytes});
    unsigned* v = b[turn % 2];
    {multiply}
  }}
}}
"""


class AttentionMultiply:
    """Emits the multiplications of a warp into the current IRBuilder.

    `tile_q`, `tile_k` and `tile_v` are the tiles in shared memory, the last two with an axis of stages.
    """

    def __init__(
        self, plan: AttentionPlan, dtype: str, tiles: tuple[tirx.Var, tirx.Var, tirx.Var], thread: tirx.Expr
    ) -> None:
        self._plan, self._dtype, self._kind = plan, dtype, MMA_KINDS[dtype]
        p = plan.parameters
        warp, lane = thread // 32, thread % 32
        half = lane // 16
        first = warp * (p.m_steps * ROWS)
        tile_q, tile_k, tile_v = tiles
        places = [
            tile_q.ptr_to([chunk_place(first + lane % 16, half, plan.width)]),
            tile_k.ptr_to([0, chunk_place(lane % 8 + half * 8, lane // 8 % 2, plan.width)]),
            tile_v.ptr_to([0, chunk_place(lane % 16, half, plan.value_width)]),
        ]
        self._at = T.alloc_local([3], "uint32")
        for index, place in enumerate(places):
            T.buffer_store(self._at, shared_address(place), [index])
        self._queries: list[tirx.Var] = []

    def load_queries(self) -> None:
        """Emit the loads of Q's fragments, which stay in registers."""
        plan = self._plan
        name = f"relaxtune_queries_{plan.depth_steps}_{plan.width}"
        source = LDMATRIX_SOURCE + _LOAD_QUERIES.format(
            name=name, steps=plan.depth_steps, along=_along("at", "step", plan.width)
        )
        for number in range(plan.parameters.m_steps):
            held = T.alloc_local([4 * plan.depth_steps], "uint32")
            T.evaluate(device_call(source, held.ptr_to([0]), self._query_at(number)))
            self._queries.append(held)

    def scores(self, scores: Sequence[tirx.Var], stage: tirx.Expr) -> None:
        """Emit `scores = Q K^T` for the keys of a stage; 16 rows each."""
        plan, p = self._plan, self._plan.parameters
        numbers = range(p.m_steps)
        rows_bytes = ROWS * plan.width * CHUNK * ELEMENT_BYTES
        held = plan.holds_queries
        queries = [f"const unsigned* q{n}" if held else f"unsigned q{n}" for n in numbers]
        fragment = "q{n}[4 * step + {w}]" if held else "a{n}[{w}]"
        along = _along("q{n}", "step", plan.width)
        name = f"relaxtune_scores_{self._kind}_{p.m_steps}_{p.block_k}_{plan.depth_steps}_{plan.width}_{int(held)}"
        source = _SCORES.format(
            name=name,
            parameters=", ".join([*(f"float* s{n}" for n in numbers), *queries]),
            fragments="" if held else "".join(f", a{n}[4]" for n in numbers),
            count=p.block_k // 2,
            clear=" ".join(f"s{n}[i] = 0.0f;" for n in numbers),
            steps=plan.depth_steps,
            pairs=p.block_k // 16,
            load_queries="" if held else " ".join(f"relaxtune_ldmatrix(a{n}, {along.format(n=n)});" for n in numbers),
            along=_along("keys", "next", plan.width),
            rows_bytes=rows_bytes,
            multiply=self._instructions("s", fragment, "k"),
        )
        operands = [self._queries[n].ptr_to([0]) if held else self._query_at(n) for n in numbers]
        keys = self._at[1] + tirx.Cast("uint32", stage * (p.block_k * plan.width * CHUNK * ELEMENT_BYTES))
        self._call(source, [*(one.ptr_to([0]) for one in scores), *operands, keys])

    def values(self, output: Sequence[tirx.Var], weights: Sequence[tirx.Var], stage: tirx.Expr) -> None:
        """Emit `output += P V` for the keys of a stage; the weights P are in registers."""
        plan, p = self._plan, self._plan.parameters
        numbers = range(p.m_steps)
        name = f"relaxtune_values_{self._kind}_{p.m_steps}_{p.block_k}_{plan.value_pairs}_{plan.value_width}"
        source = _VALUES.format(
            name=name,
            parameters=", ".join([*(f"float* o{n}" for n in numbers), *(f"const unsigned* p{n}" for n in numbers)]),
            steps=p.block_k // 16,
            pairs=plan.value_pairs,
            along=_along("values", "next", plan.value_width),
            rows_bytes=ROWS * plan.value_width * CHUNK * ELEMENT_BYTES,
            multiply=self._instructions("o", "p{n}[4 * step + {w}]", "v"),
        )
        values = self._at[2] + tirx.Cast("uint32", stage * (p.block_k * plan.value_width * CHUNK * ELEMENT_BYTES))
        self._call(source, [*(one.ptr_to([0]) for one in (*output, *weights)), values])

    def _query_at(self, number: int) -> tirx.Expr:
        bytes_each = ROWS * self._plan.width * CHUNK * ELEMENT_BYTES
        return self._at[0] + tirx.const(number * bytes_each, "uint32")

    def _instructions(self, sums: str, fragment: str, b: str) -> str:
        """Return the instructions of all rows on two times 8 columns; `fragment` is a word of some rows' operand A."""
        lines = []
        for n in range(self._plan.parameters.m_steps):
            words = ", ".join(fragment.format(n=n, w=word) for word in range(4))
            for pair in range(2):
                operands = f"{words}, {b}[{2 * pair}], {b}[{2 * pair + 1}]"
                lines.append(f"relaxtune_mma_{self._kind}({sums}{n} + 8 * j + {4 * pair}, {operands});")
        return "\n    ".join(lines)

    def _call(self, source: str, arguments: Sequence[tirx.Expr]) -> None:
        T.evaluate(device_call(LDMATRIX_SOURCE + mma_source(self._dtype) + source, *arguments))


def _along(at: str, step: str, width: int) -> str:
    return _ALONG.format(at=at, step=step, mask=min(width, 8) - 1)
