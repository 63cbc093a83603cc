"""Sampling: a token of each sequence from its logits, as transformers' processors and warpers define it.

Notation
--------
::

    x[v] = logits[b, v] in float32; NaN counts as -inf
    penalties    x = x < 0 ? x * repetition : x / repetition        where counts[b, v] != 0
                 x = x - frequency * n - presence * (n > 0)         n = generated[v], the low 31 bits of counts[b, v]
    bias, mask   x = x + bias[b, v];   x = -inf where the mask's bit is 0
    temperature  x = x / temperature
    top-k        keeps x >= the k-th largest x: all ties
    top-p        keeps the smallest set whose mass reaches top_p of all; of ties at its border, the first tokens
    min-p        keeps mass(x) >= min_p * mass(max x)
    typical      keeps the smallest set, nearest to the mean of d, whose mass reaches typical_p of all: all ties
    mass(x) = round(2**30 * exp(d)),   d = x - max x                the mean of d is weighted by mass

Each filter sees what the one before it kept, and at least one token stays. The word of `counts` has PROMPT_BIT for a
token of the prompt, so that repetition counts prompt and output, presence and frequency the output alone, as OpenAI's
interface and vLLM do. In transformers, the order of a sort that is not stable decides which of top-p's ties stay.

A temperature below GREEDY_BELOW takes the largest x, the first one of ties, without a filter. Else the token is drawn
by its mass: the first one, in their order, whose running sum of masses is above `u * total`. The number u of 53 bits
comes from Philox4x32-10 with the seed as key and the position as counter.

Masses are integers, and their exponential is one polynomial of fused multiply-adds: sums have no order, so every
schedule on every device keeps the same sets and draws the same token. Gumbel's maximum would have no order either, but
needs a random number and two logarithms of each kept token, and equal logarithms on all devices. A token of less than
2**-31 of the largest probability has no mass and is never drawn.

The log-probability is that of the model: log-softmax of the logits as they came, at the token. Where nothing is above
-inf, the token is 0 and its log-probability -inf.
"""

from __future__ import annotations

from dataclasses import dataclass

from tvm import tirx

from relaxtune.schedules.sizes import Size

#: Columns of the tensor of parameters.
PARAMETERS = ("temperature", "top_k", "top_p", "min_p", "typical_p", "repetition", "presence", "frequency")
#: Their values without any effect; a `top_k` of 0 keeps all tokens.
NEUTRAL = (1.0, 0.0, 1.0, 0.0, 1.0, 1.0, 0.0, 0.0)
#: In a word of `counts`: the token is in the prompt.
PROMPT_BIT = -(2**31)
GREEDY_BELOW = 1e-5

MASS_BITS = 30
#: exp(d) = 2^n * exp(r), r = d - n * ln(2), ln(2) in two parts; exp(r) = 1 + r + r^2 * E(r), E by Horner's rule.
EXP_COEFFICIENTS = (0.5, 0.166665181517601, 0.04166620597243309, 0.008368889801204205, 0.001395049155689776)
LOG2_E, LN2_HIGH, LN2_LOW = 1.4426950408889634, 0.693359375, -2.12194440e-4
#: Lowest d that the exponential is computed of; its mass is 0. The sum of a float32 and ROUNDER is a whole number.
LOWEST, ROUNDER = -32.0, 12582912.0
#: Tokens are put into so many bins by -d, STEPS of a bin each, to find those that a filter may keep.
BINS, STEPS = 256, 8.0
#: Philox: multipliers, increments of the key, rounds (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3").
PHILOX_MULTIPLIERS, PHILOX_KEYS, PHILOX_ROUNDS = (0xD2511F53, 0xCD9E8D57), (0x9E3779B9, 0xBB67AE85), 10


@dataclass(frozen=True)
class SamplingSpec:
    """Sizes and optional inputs of a sampling function."""

    batch: Size
    vocabulary: int
    dtype: str  # Of the logits: float16, bfloat16 or float32.
    counts: bool = False  # Of tokens, for penalties; the function adds 1 at the token that it gives.
    bias: bool = False
    mask: bool = False  # A bit a token, in words of int32, the lowest bit first.

    @property
    def inputs(self) -> list[tuple[str, tuple[Size, ...], str]]:
        """Name, shape and dtype of the first parameters. `counts` is written too."""
        rows, columns = self.batch, self.vocabulary
        optional = {
            "counts": ((rows, columns), "int32"),
            "bias": ((rows, columns), "float32"),
            "mask": ((rows, (columns + 31) // 32), "int32"),
        }
        return [
            ("logits", (rows, columns), self.dtype),
            ("parameters", (rows, len(PARAMETERS)), "float32"),
            ("seed", (rows,), "int64"),
            ("position", (rows,), "int64"),
            *((name, *one) for name, one in optional.items() if getattr(self, name)),
        ]

    @property
    def outputs(self) -> list[tuple[str, tuple[Size, ...], str]]:
        """Name, shape and dtype of the other parameters; `scratch` is a workspace."""
        rows = self.batch
        return [
            ("token", (rows,), "int64"),
            ("log_probability", (rows,), "float32"),
            ("scratch", (rows, self.vocabulary), "float32"),
        ]

    def declare(self) -> tirx.PrimFunc:
        """Return the function without a body, whose parameters and attributes its kernels have."""
        params = [tirx.decl_buffer(shape, dtype, name) for name, shape, dtype in [*self.inputs, *self.outputs]]
        return tirx.PrimFunc(params, tirx.Evaluate(tirx.IntImm("int32", 0))).with_attr("tirx.noalias", True)
