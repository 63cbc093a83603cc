"""Operands of the wgmma instructions of `template.py`: dtypes, their sums, depth and columns.

=============  =============  =====  ===========  ==============================================================
A              B              depth  sums         B lies as
=============  =============  =====  ===========  ==============================================================
float16        float16        16     float32      [K, N] or [N, K]
bfloat16       bfloat16       16     float32      [K, N] or [N, K]
int8, uint8    int8, uint8    32     int32        [N, K] only ("K-major": there are no transposed 8-bit operands)
float8         float8         32     float32      [N, K] only; float8_e4m3fn and float8_e5m2 in any pair
=============  =============  =====  ===========  ==============================================================

An instruction reads 32 bytes of each row of K, whatever the dtype, so that tiles, swizzles and descriptors, counted in
bytes, are the same for all. Integer sums wrap around at 32 bits, as int32 arithmetic does.

Source: PTX ISA 9.0, "Asynchronous Warpgroup Level Matrix Multiply-Accumulate Instructions": matrix shape (N of integers
are multiples of 16; the instruction's own syntax stops at 224), and syntax.

Sums of float8 are float32 in name, but the tensor cores cut each addend off at about 14 bits of the sum (DeepSeek-AI,
"DeepSeek-V3 Technical Report", arXiv:2412.19437, section 3.3.2): with numbers between 0 and 1, an H200 summed up 5.2e-3
too little over K = 512, 3.1e-2 over 2048 and 0.25 over 16384 (`python -m benchmarks.kernels.float8_sums`). So they only
sum up a stage, 128 products, and the stages are added up in float32 registers: 5e-4 too little over any K, and of
normal numbers a relative error of 1.3e-4, as with cuBLASLt's exact sums. It takes twice the registers for sums.
"""

from __future__ import annotations

from dataclasses import dataclass

from relaxtune.schedules.errors import Refusal

ROW_BYTES = 128
STEP_BYTES = 32
# dtype -> (PTX's name, bytes, PTX's sums)
_KINDS = {
    "float16": ("f16", 2, "f32"),
    "bfloat16": ("bf16", 2, "f32"),
    "int8": ("s8", 1, "s32"),
    "uint8": ("u8", 1, "s32"),
    "float8_e4m3fn": ("e4m3", 1, "f32"),
    "float8_e5m2": ("e5m2", 1, "f32"),
}
DTYPES = tuple(_KINDS)
_INTEGER_COLUMNS_MAX = 224


@dataclass(frozen=True)
class Operands:
    """The dtypes of A and B, as `operands_of` takes them."""

    a: str
    b: str

    @property
    def bytes(self) -> int:
        """Of an element of A or B."""
        return _KINDS[self.a][1]

    @property
    def block_k(self) -> int:
        """Elements of K in a row of a tile in shared memory, which has 128 bytes."""
        return ROW_BYTES // self.bytes

    @property
    def integer(self) -> bool:
        """Whether the sums are int32."""
        return _KINDS[self.a][2] == "s32"

    @property
    def exact_sums(self) -> bool:
        """Whether a stage's sums are added up in float32 outside the tensor cores, which keep too few bits of them."""
        return self.a.startswith("float8")

    @property
    def register(self) -> str:
        """The dtype of an accumulator's register: int32 sums are held as uint32, as TVM's table of wgmma has them."""
        return "uint32" if self.integer else "float32"

    @property
    def tensor_map(self) -> str:
        """The dtype that TMA is told."""
        return self.a if self.bytes > 1 else "uint8"

    def columns(self, block_n: int) -> int | None:
        """Return N of the instructions that make a tile of `block_n` columns, None where no equal ones do."""
        if not self.integer or block_n <= _INTEGER_COLUMNS_MAX:
            return block_n
        return block_n // 2 if block_n % 32 == 0 else None

    def instruction(self, columns: int) -> str:
        """Return the name of the instruction of so many columns."""
        a, _, sums = _KINDS[self.a]
        step = STEP_BYTES // self.bytes
        return f"wgmma.mma_async.sync.aligned.m64n{columns}k{step}.{sums}.{a}.{_KINDS[self.b][0]}"

    def modifiers(self, *, transposed: bool) -> tuple[int, ...]:
        """Return the operands after the predicate: signs of A and B, and which of them are not rows of K."""
        if self.integer:
            return ()
        return (1, 1, 0, int(not transposed)) if self.bytes > 1 else (1, 1)


def operands_of(a: str, b: str, *, transposed: bool) -> Operands | Refusal:
    """Return the operands of a matmul by the dtypes of A and B, or why wgmma does not multiply them.

    B is [N, K] where `transposed`.
    """
    for dtype in (a, b):
        if dtype not in _KINDS:
            return Refusal(f"the operands are {dtype}, expected one of {', '.join(DTYPES)}")
    if a != b and (_KINDS[a][1:] != _KINDS[b][1:] or _KINDS[a][1] > 1):
        return Refusal(f"the operands are {a} and {b}, which wgmma does not multiply")
    if _KINDS[a][1] == 1 and not transposed:
        return Refusal(f"B of {b} is [K, N], expected [N, K] (8-bit operands of wgmma are rows of K); turn the weight")
    return Operands(a, b)
