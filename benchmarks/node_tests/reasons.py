"""Why cases fail: every failure of ours must match exactly one line of this table, the first that fits it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.node_tests.arms import Outcome, Stage
from benchmarks.node_tests.cases import NodeCase


@dataclass(frozen=True)
class Reason:
    """A kind of failure, told by its stage, its operators, the case's name and the error's text; empty fits all.

    Attributes
    ----------
    name
        Short, for the table of counts.
    explanation
        Why it is so, and what follows for a user.
    """

    name: str
    explanation: str
    stage: Stage
    operators: tuple[str, ...] = ()
    case: str = ""
    error: str = ""

    def fits(self, case: NodeCase, outcome: Outcome) -> bool:
        """Return whether it explains an outcome."""
        return (
            outcome.stage is self.stage
            and (not self.operators or case.operator in self.operators)
            and re.search(self.case, case.name) is not None
            and re.search(self.error, outcome.error, re.DOTALL) is not None
        )


REASONS: Sequence[Reason] = (
    Reason(
        "no tensors",
        "Sequences, optionals and text are no tensors; a graph with them inside of its signature is refused.",
        Stage.NO_TENSORS,
    ),
    Reason(
        "type of an input",
        "Signatures hold numbers of whole bytes and float8 as of NVIDIA's GPUs: not 2 and 4 bits, the other float8 "
        "formats, text. Integers of 4 bits are taken where exports have them, in weights.",
        Stage.LOAD,
        error="which is not supported; expected one of bfloat16",
    ),
    Reason(
        "no elements",
        "A tensor without elements is refused when the model is loaded: there is nothing to make a kernel for.",
        Stage.LOAD,
        error="is 0, expected a positive number or a name",
    ),
    Reason(
        "shape inference of STFT",
        "onnx infers all the frequencies of a real signal, its test expects half of them: its strict check refuses it.",
        Stage.LOAD,
        ("STFT",),
        error="Inferred shape and existing shape differ",
    ),
    Reason(
        "known at run time only",
        "Shapes, axes, bounds and depths that are computed from inputs leave the shape of the result unknown. "
        "Exports have them as constants or compute them from shapes; so does the form `constant` of the same case.",
        Stage.IMPORT,
        error=(
            "known at run time only|expected a constant|Only constant|must be a constant|Dynamic Split|Dynamic pads|"
            "new shape to be Shape|requires a compile-time constant axis|'Var' object has no attribute 'value'|"
            "Type .* for size is currently unsupported"
        ),
    ),
    Reason(
        "control flow",
        "Loop has no converter: exports of transformers unroll loops, and generation is run outside of the graph.",
        Stage.IMPORT,
        error=r"ai\.onnx\.Loop",
    ),
    Reason(
        "training",
        "Training mode is refused: the models are for inference.",
        Stage.IMPORT,
        ("BatchNormalization", "Dropout"),
        error="in training mode",
    ),
    Reason(
        "float8 and float4 quantisation",
        "Of float8 and float4, only float8 e4m3fn is quantised to and from: ONNX Runtime's CPU, the reference, lacks "
        "most of the others.",
        Stage.IMPORT,
        ("DequantizeLinear", "QuantizeLinear"),
        error="quantised type: expected one of .* got float[84]",
    ),
    Reason(
        "float8 casts",
        "LLVM's code for float8 neither saturates nor knows subnormals and NaN as ONNX does; no kernel of ours has "
        "float8 on a CPU.",
        Stage.MISMATCH,
        ("Cast", "CastLike"),
        case="FLOAT8",
    ),
    Reason(
        "output shape of ConvTranspose",
        "An output shape that differs from what the pads give is refused; TVM would ignore it.",
        Stage.IMPORT,
        ("ConvTranspose",),
        error="attribute 'output_shape'",
    ),
    Reason(
        "order of SpaceToDepth",
        "The attribute came with opset 28, which ONNX Runtime does not read yet; it is refused.",
        Stage.IMPORT,
        ("SpaceToDepth",),
        error="attribute 'mode'",
    ),
    Reason(
        "indices of MaxPool",
        "The places of maxima, a second output, are not computed; no transformer reads them.",
        Stage.IMPORT,
        ("MaxPool",),
        error="gave 1 outputs, the node has 2",
    ),
    Reason(
        "resized region",
        "TVM resizes a region of both spatial axes only, without the attribute `axes`.",
        Stage.IMPORT,
        ("Resize",),
        case="tf_crop_and_resize_axes",
        error="2-dim shape",
    ),
    Reason(
        "rounded aspect ratio",
        "A size rounded up to keep the aspect ratio is more than size times scale; it is refused.",
        Stage.IMPORT,
        ("Resize",),
        error="axis of .* elements, scale",
    ),
    Reason(
        "Mod of infinities",
        "Mod with fmod 0 takes floats since an opset that ONNX Runtime does not read yet; finite ones are right.",
        Stage.MISMATCH,
        ("Mod",),
        case="float_edge_cases_fmod_0",
    ),
    Reason(
        "half precision",
        "The test computes in half precision and allows a relative error of 1e-3; ours accumulates in float32 and "
        "rounds once, which is nearer to the exact value and up to three units of bfloat16 away from the test's.",
        Stage.MISMATCH,
        ("Attention",),
        case="bf16|fp16",
    ),
    Reason(
        "rounding of the transform",
        "Zeros of an inverse transform come out as 2e-7: a sum in float32, where the test allows 1e-7.",
        Stage.MISMATCH,
        ("DFT",),
        case="inverse",
    ),
    Reason(
        "TopK of uint64",
        "TVM's sort has no uint64.",
        Stage.RUN,
        ("TopK",),
        error="Unsupported input dtype: uint64",
    ),
)


def find_reason(case: NodeCase, outcome: Outcome) -> Reason | None:
    """Return the first reason that explains a failure, None where no one does."""
    return next((reason for reason in REASONS if reason.fits(case, outcome)), None)
