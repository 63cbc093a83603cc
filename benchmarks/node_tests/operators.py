"""The operators that are tested: those of the main ONNX domain that occur in exports of transformers."""

from __future__ import annotations

from collections.abc import Mapping

# By what brings them into a graph. "Quantised" are those of ONNX Runtime's quantiser.
OPERATOR_GROUPS: Mapping[str, tuple[str, ...]] = {
    "matmuls and attention": ("Attention", "Einsum", "Gemm", "MatMul", "RotaryEmbedding", "TensorScatter"),
    "norms": (
        *("BatchNormalization", "GroupNormalization", "InstanceNormalization", "LayerNormalization"),
        *("LpNormalization", "RMSNormalization"),
    ),
    "activations": (
        *("Elu", "Gelu", "HardSigmoid", "HardSwish", "LeakyRelu", "LogSoftmax", "Mish", "PRelu", "Relu", "Selu"),
        *("Sigmoid", "Softmax", "Softplus", "Softsign", "Swish", "Tanh"),
    ),
    "arithmetic": (
        *("Abs", "Add", "Ceil", "Clip", "Cos", "Div", "Erf", "Exp", "Floor", "Log", "Max", "Mean", "Min", "Mod"),
        *("Mul", "Neg", "Pow", "Reciprocal", "Round", "Sign", "Sin", "Sqrt", "Sub", "Sum", "Tan"),
    ),
    "logic": (
        *("And", "BitwiseAnd", "BitwiseNot", "BitwiseOr", "BitwiseXor", "Equal", "Greater", "GreaterOrEqual"),
        *("IsInf", "IsNaN", "Less", "LessOrEqual", "Not", "Or", "Where", "Xor"),
    ),
    "reductions": (
        *("ArgMax", "ArgMin", "CumSum", "ReduceL1", "ReduceL2", "ReduceLogSum", "ReduceLogSumExp", "ReduceMax"),
        *("ReduceMean", "ReduceMin", "ReduceProd", "ReduceSum", "ReduceSumSquare", "TopK"),
    ),
    "shapes": (
        *("Concat", "Constant", "ConstantOfShape", "Expand", "EyeLike", "Flatten", "Pad", "Range", "Reshape"),
        *("Shape", "Size", "Slice", "Split", "Squeeze", "Tile", "Transpose", "Trilu", "Unsqueeze"),
    ),
    "gathers": (
        *("Compress", "Gather", "GatherElements", "GatherND", "NonZero", "OneHot", "ScatterElements", "ScatterND"),
    ),
    "images and sound": (
        *("AveragePool", "Conv", "ConvTranspose", "DFT", "DepthToSpace", "GlobalAveragePool", "GlobalMaxPool"),
        *("GridSample", "MaxPool", "Resize", "STFT", "SpaceToDepth"),
    ),
    "quantised": (
        *("ConvInteger", "DequantizeLinear", "DynamicQuantizeLinear", "MatMulInteger", "QLinearConv"),
        *("QLinearMatMul", "QuantizeLinear"),
    ),
    "types and control": ("Cast", "CastLike", "Dropout", "Identity", "If", "Loop"),
}

OPERATORS: tuple[str, ...] = tuple(sorted(name for group in OPERATOR_GROUPS.values() for name in group))

# Operator -> inputs that exports give as constants: shapes, axes, bounds. The tests feed them at run time, which makes
# the output's shape unknown to a compiler.
CONSTANT_OPERANDS: Mapping[str, tuple[int, ...]] = {
    "ConstantOfShape": (0,),
    "CumSum": (1,),
    "DFT": (1, 2),
    # Weights, and their zero points.
    "DequantizeLinear": (0, 2),
    "Dropout": (1, 2),
    "Expand": (1,),
    "OneHot": (1,),
    "Pad": (1, 2, 3),
    "Range": (0, 1, 2),
    "Reshape": (1,),
    "Resize": (1, 2, 3),
    "STFT": (1, 3),
    "Slice": (1, 2, 3, 4),
    "Split": (1,),
    "Squeeze": (1,),
    "Tile": (1,),
    "TopK": (1,),
    "Trilu": (1,),
    "Unsqueeze": (1,),
    **{
        f"Reduce{name}": (1,)
        for name in ("L1", "L2", "LogSum", "LogSumExp", "Max", "Mean", "Min", "Prod", "Sum", "SumSquare")
    },
}
