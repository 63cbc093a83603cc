"""Compare a compiled module with ONNX Runtime on the model as it was given.

Both run once on the same random inputs (`observe`). The outputs are then compared (`compare`) with any tolerance, any
number of times.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
from tvm.runtime import Tensor
from tvm.runtime.vm import VMInstrumentReturnKind

from relaxtune.models import OnnxModel, TensorSpec, axis_sizes, random_inputs
from relaxtune.models.axis_profile import sizes_within
from relaxtune.pipeline.artifact.module import Module
from relaxtune.pipeline.errors import ValidationFailedError
from relaxtune.pipeline.precision.graph_dtypes import compute_dtype
from relaxtune.pipeline.validate.array_comparison import (
    STILL,
    Movement,
    SampleComparison,
    compare_arrays,
    differing_bits,
)
from relaxtune.pipeline.validate.drift import inputs_source, measure_drift, measure_perplexity
from relaxtune.pipeline.validate.generation_steps import steps_of
from relaxtune.pipeline.validate.reference import Reference, longest_reduction
from relaxtune.pipeline.validate.report import (
    DataSource,
    DriftOptions,
    DriftReport,
    OutputReport,
    RepeatReport,
    ValidationReport,
)
from relaxtune.pipeline.validate.tolerances import Tolerance, model_tolerance, storage_roundoff


@contextmanager
def poisoned_kernels(module: Module) -> Iterator[None]:
    """Fill the last tensor of every kernel's arguments, its output, with NaN before each call.

    Raises `PipelineError`: the module runs as a CUDA graph.
    """
    kernels = {kernel.function for kernel in module.manifest.kernels}

    def instrument(_function: object, name: str, before: bool, _result: object, *arguments: object) -> int:
        if before and name in kernels:
            poison([argument for argument in arguments if isinstance(argument, Tensor)][-1])
        return int(VMInstrumentReturnKind.NO_OP)

    with module.instrumented(instrument):
        yield


def poison(tensor: Tensor) -> None:
    """Fill a tensor of floats with NaN; integers stay, since a wrong one may be an index out of bounds."""
    if "float" in str(tensor.dtype):
        array = tensor.numpy()
        tensor.copyfrom(np.full(array.shape, np.nan, array.dtype))


logger = logging.getLogger(__name__)

DEFAULT_SAMPLES = 3
DEFAULT_REPEATS = 2


@dataclass(frozen=True)
class Observation:
    """The outputs of the reference and of the module for one sample.

    `moves` is how far each output of the reference moves when it rounds otherwise (`Reference.moves`).
    """

    expected: Mapping[str, np.ndarray]
    got: Mapping[str, np.ndarray]
    inputs: Mapping[str, np.ndarray] = field(default_factory=dict)
    moves: Mapping[str, Movement] = field(default_factory=dict)


def validate(
    module: Module | Path | str,
    model: OnnxModel,
    *,
    rtol: float | None = None,
    atol: float | None = None,
    samples: int = DEFAULT_SAMPLES,
    seed: int = 0,
    dims: Mapping[str, int] | None = None,
    drift: DriftOptions | None = None,
    inputs: Sequence[Mapping[str, np.ndarray]] | None = None,
    repeats: int = DEFAULT_REPEATS,
    lock: AbstractContextManager[object] | None = None,
    reference: Reference | None = None,
) -> ValidationReport:
    """Return how the outputs of a module, or of an artifact directory, compare with ONNX Runtime's on the model.

    `model` is as it was given, before any rewriting. `rtol` and `atol` are by default from
    `pipeline.validate.tolerances`, by the model's dtype and the module's precision. There are `samples` random inputs
    of sizes `dims`, those not given small, or the caller's own `inputs` in place of all that. Each is run `repeats`
    times; from 2 on, all runs must give the same bits unless the manifest says that they may not. One of the further
    runs has the outputs of kernels filled with NaN first. `lock` is held while the module runs; the reference, which
    takes longer, runs without it. `reference` is of this model and the module's policy, where it was made before.

    Raises `ValidationFailedError`: the module and the model have no output in common. (A comparison that fails is a
    report, not an exception.)
    """
    loaded = module if isinstance(module, Module) else Module.load(module)
    tolerance = None
    if rtol is not None or atol is not None:
        default = default_tolerance(loaded, model)
        tolerance = Tolerance(default.rtol if rtol is None else rtol, default.atol if atol is None else atol)
    reference = reference or Reference(model, policy=loaded.manifest.policy)
    if loaded.manifest.generation is not None:
        logits = loaded.outputs[0]
        with lock or nullcontext():
            pairs = [
                Observation({logits.name: expected}, {logits.name: got})
                for expected, got in steps_of(loaded, model, reference, samples, seed)
            ]
        limit = tolerance or default_tolerance(loaded, model)
        return compare(pairs, [logits], limit, model=model.name, reference=reference.description, seed=seed)
    dims = sizes_within(model, loaded.manifest.maxima, dims)
    seen = observe(loaded, model, reference, samples=samples, seed=seed, dims=dims, inputs=inputs, lock=lock)
    report, observations = judge(loaded, model, reference, seen, loaded.outputs, tolerance=tolerance, seed=seed)
    distance = _drift_of(loaded, model, reference, observations, seed, dims, drift or DriftOptions())
    with lock or nullcontext():
        again = repeat_runs(loaded, observations, repeats) if repeats > 1 else None
    return replace(report, drift=distance, repeats=again)


def judge(
    module: Module,
    model: OnnxModel,
    reference: Reference,
    observations: Sequence[Observation],
    specs: Sequence[TensorSpec],
    *,
    tolerance: Tolerance | None = None,
    seed: int = 0,
) -> tuple[ValidationReport, Sequence[Observation]]:
    """Return the comparison of a module's outputs, or of a peer's in its place, with the reference's, and both.

    Without a `tolerance` it is the table's for the module, and an output that fails may be off by as much more as the
    reference itself moves when it rounds otherwise. Where an output fails because the reference's graph optimisations
    are wrong, its results are those without them.
    """
    limit = tolerance or default_tolerance(module, model)

    def compared(seen: Sequence[Observation]) -> ValidationReport:
        return compare(seen, specs, limit, model=model.name, reference=reference.description, seed=seed)

    report = compared(observations)
    if not report.passed and reference.drop_wrong_optimisations([seen.inputs for seen in observations], limit):
        observations = [
            replace(seen, expected=comparable(module, reference.run(seen.inputs), seen.inputs)) for seen in observations
        ]
        report = compared(observations)
    if report.passed or tolerance is not None:
        return report, observations
    roundoff = storage_roundoff(compute_dtype(model), module.manifest.precision)
    moved = [replace(seen, moves=reference.moves(seen.inputs, roundoff, limit)) for seen in observations]
    return compared(moved), moved


def default_tolerance(module: Module, model: OnnxModel) -> Tolerance:
    """Return what a module's outputs may differ from the model's: by dtypes, precision and the longest sum."""
    precision, policy = module.manifest.precision, module.manifest.policy
    if precision == "fp8" and policy is not None and not policy.float8:
        precision = "fp16"  # Where no matmul is in float8, fp8 is fp16.
    return model_tolerance(compute_dtype(model), precision, longest_reduction(model))


def repeat_runs(module: Module, observations: Sequence[Observation], runs: int) -> RepeatReport:
    """Return whether a module gives the same bits again; the samples alternate.

    `runs` is how often the module runs on each sample, the first time included.
    """
    differing: dict[str, int] = {}
    poisoned = not module.manifest.target.cuda_graph
    for run in range(1, runs):
        for seen in observations:
            with poisoned_kernels(module) if poisoned and run == 1 else nullcontext():
                again = module.run(seen.inputs)
            for name, array in again.items():
                count = differing_bits(seen.got[name], array)
                if count:
                    differing[name] = max(count, differing.get(name, 0))
    promised = module.manifest.deterministic
    return RepeatReport(runs, differing, poisoned, None if promised is None else promised.bitwise)


def sample_inputs(
    model: OnnxModel, *, samples: int, seed: int, dims: Mapping[str, int] | None = None
) -> list[dict[str, np.ndarray]]:
    """Return the random inputs that a model is validated with."""
    sizes = axis_sizes(model, dims)
    return [random_inputs(model, seed=seed, sample=sample, dims=sizes) for sample in range(samples)]


def observe(
    module: Module,
    model: OnnxModel,
    reference: Reference,
    *,
    samples: int,
    seed: int,
    dims: Mapping[str, int] | None = None,
    inputs: Sequence[Mapping[str, np.ndarray]] | None = None,
    lock: AbstractContextManager[object] | None = None,
) -> list[Observation]:
    """Return the outputs of both for each sample; arguments as of `validate`."""
    if inputs is None:
        inputs = sample_inputs(model, samples=samples, seed=seed, dims=dims)
    expected = [comparable(module, reference.run(sample), sample) for sample in inputs]
    with lock or nullcontext():
        got = [module.run(sample) for sample in inputs]
    return [Observation(*one) for one in zip(expected, got, inputs, strict=True)]


def comparable(
    module: Module, outputs: Mapping[str, np.ndarray], inputs: Mapping[str, np.ndarray]
) -> dict[str, np.ndarray]:
    """Return a model's outputs in the form of a module's: one that leaves padding out has zeros there."""
    unpadding = module.manifest.unpadding
    return dict(outputs) if unpadding is None else unpadding.without_padding(outputs, inputs)


def _drift_of(
    module: Module,
    model: OnnxModel,
    reference: Reference,
    observations: Sequence[Observation],
    seed: int,
    dims: Mapping[str, int],
    options: DriftOptions,
) -> DriftReport:
    """Return the distance from the model as given; its outputs are computed where the reference has other weights."""
    sizes = axis_sizes(model, dims)
    inputs = [seen.inputs for seen in observations]
    original = Reference(model) if reference.quantised else reference
    expected = (
        [seen.expected for seen in observations]
        if original is reference
        else [comparable(module, original.run(sample), sample) for sample in inputs]
    )
    outputs = measure_drift(model, expected, [seen.got for seen in observations], options.logits)
    data: list[DataSource] = [inputs_source(inputs, seed)]
    perplexity = None
    if options.tokens is not None:
        perplexity = measure_perplexity(model, original.run, module.run, options, sizes)
        data.append(perplexity.data)
    return DriftReport(module.manifest.precision, original.description, tuple(data), outputs, perplexity)


def compare(
    observations: Sequence[Observation],
    specs: Sequence[TensorSpec],
    tolerance: Tolerance,
    *,
    model: str,
    reference: str,
    seed: int,
) -> ValidationReport:
    """Return the comparison of observations.

    Raises `ValidationFailedError`: no output is common to both, or nothing was observed.
    """
    if not observations:
        raise ValidationFailedError(f"nothing was compared for {model}: samples must be at least 1")
    expected_names = set(observations[0].expected)
    got_names = [spec.name for spec in specs]
    if not expected_names & set(got_names):
        raise ValidationFailedError(
            f"{model} and its module have no output in common: the model has {', '.join(sorted(expected_names))}, the "
            f"module has {', '.join(got_names) or 'none'}. Is it the artifact of this model?"
        )
    outputs = [_compare_output(spec, observations, tolerance) for spec in specs]
    for name in sorted(expected_names - set(got_names)):
        lost = SampleComparison(0, False, "the module does not have this output")
        array = observations[0].expected[name]
        outputs.append(OutputReport(name, str(array.dtype), array.shape, (lost,)))
    return ValidationReport(model, reference, tolerance, len(observations), seed, tuple(outputs))


def _compare_output(spec: TensorSpec, observations: Sequence[Observation], tolerance: Tolerance) -> OutputReport:
    compared = []
    for sample, seen in enumerate(observations):
        got, expected = seen.got[spec.name], seen.expected.get(spec.name)
        if expected is None:
            compared.append(SampleComparison(sample, False, "the model does not have this output"))
        elif str(got.dtype) != spec.dtype:
            compared.append(SampleComparison(sample, False, f"expected dtype {spec.dtype}, got {got.dtype}"))
        else:
            compared.append(compare_arrays(expected, got, tolerance, sample, seen.moves.get(spec.name, STILL)))
    return OutputReport(spec.name, spec.dtype, observations[0].got[spec.name].shape, tuple(compared))
