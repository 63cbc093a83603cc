"""The arithmetic of `template.py`: what a lane does with one load of two rows of W.

Fragments of mma.m16n8k16 (PTX ISA 9.0, "Matrix Fragments for mma.m16n8k16"): lane 4 g + c has of A the rows g and g + 8
and of B the column g, in both the places 2 c, 2 c + 1, 2 c + 8, 2 c + 9 along k; of D rows g and g + 8, columns 2 c and
2 c + 1. The sum over k has no order, so what lies side by side in a lane's 16 bytes is taken for those places, in W and
in x alike; A are rows of W, B rows of x.

Quantised weights become pairs of halves without a conversion. Of 4 bits, a mask takes levels 4 apart, in bits 0 to 3 of
each half of a word, or in bits 4 to 7, where they count 16 times; so one shift serves 8 weights, and x has to be put
into pairs 4 apart as well, once for all rows of W. Then there are three forms:

- levels (4 bits, where x stays for many rows of W): a half with these bits alone is a subnormal number, level * 2**-24,
  and is multiplied as that, exactly. The levels in bits 4 to 7 have sums of their own, which count a 16th. The sums of
  a step begin with -8 times the sum of its x (`emit_offsets`), the result is multiplied by 2**24 in the end. A weight
  takes no arithmetic of its own but the mask; an infinite x gives NaN.
- sums: with the exponent of 1024, a level is 1024 + level, exactly; 1024 + offset is subtracted.
- weights (where a step is not within one group): as sums, and each weight is multiplied by its scale.
"""

from __future__ import annotations

from tvm import tirx
from tvm.tirx.script import builder as T

from relaxtune.schedules.templates.emit.device_function import device_call
from relaxtune.schedules.templates.emit.tensor_cores import MMA_KINDS, mma_source
from relaxtune.schedules.tir.epilogue import MatmulFunction

# The factor of the sums of levels.
LEVELS_FACTOR = 2.0**24
_HALVES = """
__forceinline__ __device__ unsigned relaxtune_subtract(unsigned a, unsigned b) {
  unsigned d; asm("sub.f16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b)); return d;
}
__forceinline__ __device__ unsigned relaxtune_scale(unsigned a, unsigned b) {
  unsigned d; asm("mul.f16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b)); return d;
}
// 1024 + 16 level to level - 8, exactly.
__forceinline__ __device__ unsigned relaxtune_high_level(unsigned a) {
  unsigned d; asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(0x2c002c00u), "r"(0xd480d480u)); return d;
}
"""
# `count` words of 8 halves each 4, put into pairs 4 apart.
_PAIRS = """
__forceinline__ __device__ void relaxtune_pairs_{count}(unsigned* x) {{
#pragma unroll
  for (int i = 0; i < {count}; i += 4) {{
    unsigned a = x[i], b = x[i + 1], c = x[i + 2], d = x[i + 3];
    x[i] = __byte_perm(a, c, 0x5410);
    x[i + 1] = __byte_perm(b, d, 0x5410);
    x[i + 2] = __byte_perm(a, c, 0x7632);
    x[i + 3] = __byte_perm(b, d, 0x7632);
  }}
}}
"""
# 16-bit weights: `columns` tiles of x, 4 words each.
_PLAIN = """
__forceinline__ __device__ void {name}(float* sums, const unsigned* low, const unsigned* high, const unsigned* x) {{
#pragma unroll
  for (int m = 0; m < {columns}; ++m) {{
#pragma unroll
    for (int j = 0; j < 4; j += 2)
      relaxtune_mma_{kind}(sums + 4 * m, low[j], high[j], low[j + 1], high[j + 1], x[4 * m + j], x[4 * m + j + 1]);
  }}
}}
"""
# A word of 8-bit weights is 4 of them: an instruction.
_BYTES = """
__forceinline__ __device__ void {name}(float* sums, const unsigned* low, const unsigned* high, const unsigned* x,
                                       half scale_low, half scale_high) {{
  {begin}
#pragma unroll
  for (int v = 0; v < 4; ++v) {{
    unsigned a[2][2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {{
      unsigned word = r ? high[v] : low[v];
#pragma unroll
      for (int i = 0; i < 2; ++i) {{
        unsigned pair = relaxtune_subtract(__byte_perm(word, 0x64646464u, i ? 0x4342 : 0x4140), 0x64806480u);
        a[r][i] = {weight};
      }}
    }}
#pragma unroll
    for (int m = 0; m < {columns}; ++m)
      relaxtune_mma_f16({target} + 4 * m, a[0][0], a[1][0], a[0][1], a[1][1], x[8 * m + 2 * v], x[8 * m + 2 * v + 1]);
  }}
  {end}
}}
"""
# A word of 4-bit weights is 8 of them: two instructions.
_NIBBLES = """
__forceinline__ __device__ void {name}(float* sums, const unsigned* low, const unsigned* high, const unsigned* x,
                                       half scale_low, half scale_high) {{
  {begin}
#pragma unroll
  for (int v = 0; v < 4; ++v) {{
    unsigned a[2][4];
#pragma unroll
    for (int r = 0; r < 2; ++r) {{
      unsigned word = r ? high[v] : low[v];
#pragma unroll
      for (int i = 0; i < 4; ++i) {{
        unsigned bits = i < 2 ? word : word >> 8;
        unsigned pair = i % 2 ? relaxtune_high_level(bits & 0x00f000f0u | 0x64006400u)
                              : relaxtune_subtract(bits & 0x000f000fu | 0x64006400u, 0x64086408u);
        a[r][i] = {weight};
      }}
    }}
#pragma unroll
    for (int m = 0; m < {columns}; ++m) {{
      const unsigned* e = x + 16 * m + 4 * v;
      relaxtune_mma_f16({target} + 4 * m, a[0][0], a[1][0], a[0][2], a[1][2], e[0], e[1]);
      relaxtune_mma_f16({target} + 4 * m, a[0][1], a[1][1], a[0][3], a[1][3], e[2], e[3]);
    }}
  }}
  {end}
}}
"""
# Levels as they lie, the sums of a step scaled.
_LEVELS = """
__forceinline__ __device__ void {name}(float* sums, const unsigned* low, const unsigned* high, const unsigned* x,
                                       half scale_low, half scale_high, const float* offsets) {{
  float part[{count}], odd[{count}] = {{}};
#pragma unroll
  for (int i = 0; i < {count}; ++i) part[i] = offsets[i / 4 * 2 + i % 2];
#pragma unroll
  for (int v = 0; v < 4; ++v) {{
    unsigned a[2][4];
#pragma unroll
    for (int r = 0; r < 2; ++r) {{
      unsigned word = r ? high[v] : low[v];
      a[r][0] = word & 0x000f000fu;
      a[r][1] = word & 0x00f000f0u;
      a[r][2] = word >> 8 & 0x000f000fu;
      a[r][3] = word >> 8 & 0x00f000f0u;
    }}
#pragma unroll
    for (int m = 0; m < {columns}; ++m) {{
      const unsigned* e = x + 16 * m + 4 * v;
      relaxtune_mma_f16(part + 4 * m, a[0][0], a[1][0], a[0][2], a[1][2], e[0], e[1]);
      relaxtune_mma_f16(odd + 4 * m, a[0][1], a[1][1], a[0][3], a[1][3], e[2], e[3]);
    }}
  }}
#pragma unroll
  for (int i = 0; i < {count}; ++i) part[i] = fmaf(odd[i], 0.0625f, part[i]);
  {end}
}}
"""
# -8, in the form of levels, times the sums of x.
_OFFSETS = """
__forceinline__ __device__ void {name}(float* offsets, const unsigned* x) {{
  const unsigned level = 0x80088008u;
#pragma unroll
  for (int m = 0; m < {columns}; ++m) {{
    float even[4] = {{}}, odd[4] = {{}};
#pragma unroll
    for (int j = 0; j < 16; j += 4) {{
      const unsigned* e = x + 16 * m + j;
      relaxtune_mma_f16(even, level, level, level, level, e[0], e[1]);
      relaxtune_mma_f16(odd, level, level, level, level, e[2], e[3]);
    }}
    offsets[2 * m] = even[0] + odd[0];
    offsets[2 * m + 1] = even[1] + odd[1];
  }}
}}
"""
# A step within one group: integers are summed up and the sums scaled.
_BEGIN_SUMS = "float part[{count}] = {{}};"
_END_SUMS = """float f_low = __half2float(scale_low), f_high = __half2float(scale_high);
#pragma unroll
  for (int i = 0; i < {count}; ++i) sums[i] = fmaf(part[i], i & 2 ? f_high : f_low, sums[i]);"""
# Else each weight is scaled, rounded to a half.
_BEGIN_WEIGHTS = """unsigned scale[2] = {
      __half_as_ushort(scale_low) * 0x10001u, __half_as_ushort(scale_high) * 0x10001u};"""


def emit_pairs(matmul: MatmulFunction, x: tirx.Expr, words: int) -> None:
    """Emit, where weights have 4 bits, the putting of registers of x into the pairs that `emit_products` takes."""
    if matmul.weight_bits == 4:
        T.evaluate(device_call(_PAIRS.format(count=words), x))


def emit_offsets(column_tiles: int, offsets: tirx.Expr, x: tirx.Expr) -> None:
    """Emit what `emit_products` begins the sums of a step with: 2 float32 for each 8 rows of x, at `offsets`."""
    name = f"relaxtune_gemv_offsets_{column_tiles}"
    body = _OFFSETS.format(name=name, columns=column_tiles)
    T.evaluate(device_call(mma_source("float16") + body, offsets, x))


def emit_products(
    matmul: MatmulFunction,
    column_tiles: int,
    grouped: bool,
    sums: tirx.Expr,
    rows: tuple[tirx.Expr, tirx.Expr],
    x: tirx.Expr,
    scales: tuple[tirx.Expr, tirx.Expr] | None,
    offsets: tirx.Expr | None = None,
) -> None:
    """Emit the products of one load of two rows.

    `column_tiles` are tiles of 8 rows of x; `sums` is the address of 4 float32 sums for each of these, `rows` those of
    4 words of rows g and g + 8, `x` that of the words of x, as `emit_pairs` leaves them: half as many as a load has
    weights, for each 8 rows. `scales` are the rows' scales in float16, None for weights that are not quantised;
    `grouped` says that sums are scaled, not weights. `offsets` is the address of what `emit_offsets` made of x: the
    products are of levels. It is None for the other forms.
    """
    columns = column_tiles
    if scales is None:
        dtype = matmul.input_dtype
        kind = MMA_KINDS[dtype]
        name = f"relaxtune_gemv_{kind}_{columns}"
        source = mma_source(dtype) + _PLAIN.format(name=name, kind=kind, columns=columns)
        T.evaluate(device_call(source, sums, *rows, x))
        return
    count = 4 * columns
    if offsets is not None:
        name = f"relaxtune_gemv_levels_{columns}"
        body = _LEVELS.format(name=name, columns=columns, count=count, end=_END_SUMS.format(count=count))
        source = mma_source("float16") + body
        T.evaluate(device_call(source, sums, *rows, x, *scales, offsets))
        return
    parts = (
        {"begin": _BEGIN_SUMS.format(count=count), "end": _END_SUMS.format(count=count), "weight": "pair"}
        if grouped
        else {"begin": _BEGIN_WEIGHTS, "end": "", "weight": "relaxtune_scale(pair, scale[r])"}
    )
    name = f"relaxtune_gemv_u{matmul.weight_bits}_{columns}{'_sums' if grouped else ''}"
    body = (_NIBBLES if matmul.weight_bits == 4 else _BYTES).format(
        name=name, columns=columns, target="part" if grouped else "sums", **parts
    )
    source = mma_source("float16") + _HALVES + body
    T.evaluate(device_call(source, sums, *rows, x, *scales))
