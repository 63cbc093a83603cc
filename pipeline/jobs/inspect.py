"""`inspect_model`: what a model needs and would become, or everything that keeps it from being imported."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace

import onnx
from onnx import helper

from relaxtune.models import OnnxModel, TensorSpec, load_model
from relaxtune.models.inputs import InputKind, describe_inputs
from relaxtune.models.onnx_model import element_type_name, is_numeric, tensor_bytes
from relaxtune.models.spec import numpy_dtype
from relaxtune.pipeline.artifact.compile import check_plan, compile_module
from relaxtune.pipeline.choose.selection import select_kernels
from relaxtune.pipeline.importer.unsupported import ImportSurvey, UnsupportedNode, find_unsupported
from relaxtune.pipeline.prepare import ModelRequest, PreparedModel, prepare_model
from relaxtune.pipeline.tasks.extract import list_untunable


@dataclass(frozen=True)
class ParameterCount:
    """Weights of one dtype: tensors, numbers, bytes."""

    dtype: str
    tensors: int
    count: int
    bytes: int


@dataclass(frozen=True)
class CacheSize:
    """The KV cache that a model takes as inputs."""

    inputs: tuple[str, ...]  # Names of the inputs that hold past keys and values.
    length: int | str  # Tokens they hold as the shapes are now; a name where that is symbolic.
    # Of one token of one sequence, over all layers; None where a size of a head is symbolic.
    bytes_per_token: int | None
    bytes: int | None  # Of all inputs as the shapes are now; None where a size is symbolic.


@dataclass(frozen=True)
class TaskCost:
    """A tuning task the model would have; `flops` and `bytes` are of one run of it, `weight` its runs an inference."""

    name: str
    family: str
    signature: Mapping[str, object]
    weight: int
    flops: float
    bytes: float
    onnx_nodes: tuple[str, ...]


@dataclass(frozen=True)
class Inspection:
    """Answer of `relaxtune inspect`."""

    #: Name, content hash, version by domain, nodes of the main graph.
    model: str
    sha256: str
    opsets: Mapping[str, int]
    nodes: int
    #: The signature, and the weights by dtype.
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    parameters: tuple[ParameterCount, ...]
    relations: tuple[str, ...]  #: The graph's limits on the symbolic axes of the inputs, as text.
    cache: CacheSize | None  #: The KV cache among the inputs, None where there is none.
    survey: ImportSurvey  #: Nodes that stop the import.
    #: The target of the tasks; None, as are tasks, flops and bytes, where the import is stopped.
    target: str | None = None
    #: The tasks; kernels that none can be made of, with the reason.
    tasks: tuple[TaskCost, ...] = ()
    without_task: Mapping[str, str] = field(default_factory=dict)
    #: Of one inference, over all tasks.
    flops: float | None = None
    bytes: float | None = None
    code: bool = False  #: Whether the code of the kernels was generated.

    @property
    def unsupported(self) -> tuple[UnsupportedNode, ...]:
        """The nodes that cannot be imported."""
        return self.survey.unsupported

    def to_json(self) -> dict[str, object]:
        """Return the inspection as plain values."""
        data = asdict(self)
        survey = data.pop("survey")
        return {**data, "unsupported": survey["unsupported"], "not_looked_at": survey["not_looked_at"]}


def inspect_model(request: ModelRequest, *, code: bool = False) -> Inspection:
    """Return what a model needs and would become.

    `code` generates the code of the kernels too, as `compile` does, which may still refuse a model.

    Raises `ModelError` or `ScheduleError` or `PipelineError`: the file, the target or the lowering cannot be had, or
    memory cannot be planned; see `pipeline.errors`. A node that cannot be imported is no error here but part of the
    answer. Without `code`, the code of kernels is not tried.
    """
    model = load_model(request.source, shapes=request.shapes or None, seed=request.seed, any_operator=True)
    survey = find_unsupported(model)
    facts = Inspection(
        model=model.name,
        sha256=model.sha256,
        opsets={entry.domain or "ai.onnx": int(entry.version) for entry in model.proto.opset_import},
        nodes=len(model.proto.graph.node),
        inputs=model.inputs,
        outputs=model.outputs,
        parameters=count_parameters(model.proto.graph.initializer),
        relations=tuple(map(str, model.relations)),
        cache=measure_cache(model),
        survey=survey,
    )
    if survey.unsupported:
        return facts
    prepared = prepare_model(request)
    for lowered in (prepared.lowered, *(bucket.lowered for bucket in prepared.buckets)):
        check_plan(lowered, prepared.target)
        if code:
            choices = select_kernels(
                lowered, prepared.tasks, database=None, target=prepared.target, environment=prepared.environment
            )
            compile_module(lowered, choices, prepared.target)
    return _with_tasks(replace(facts, code=code), prepared)


def count_parameters(weights: Sequence[onnx.TensorProto]) -> tuple[ParameterCount, ...]:
    """Return the weights by dtype, those with the most bytes first."""
    by_type: dict[int, list[onnx.TensorProto]] = {}
    for tensor in weights:
        if is_numeric(tensor.data_type):
            by_type.setdefault(int(tensor.data_type), []).append(tensor)
    counts = [
        ParameterCount(
            dtype=numpy_name
            if (numpy_name := str(helper.tensor_dtype_to_np_dtype(element_type))) != "object"
            else element_type_name(element_type),
            tensors=len(tensors),
            count=sum(math.prod(tensor.dims) for tensor in tensors),
            bytes=sum(tensor_bytes(tensor) for tensor in tensors),
        )
        for element_type, tensors in by_type.items()
    ]
    return tuple(sorted(counts, key=lambda item: -item.bytes))


def measure_cache(model: OnnxModel) -> CacheSize | None:
    """Return the size of the KV cache among the inputs, recognised as `models.inputs` does; None without one.

    Keys and values are (B, N, P, H), or (2, B, N, P, H) together: the length P is the last axis but one.
    """
    kinds = {rule.name: rule.kind for rule in describe_inputs(model)}
    caches = [spec for spec in model.inputs if kinds[spec.name] is InputKind.CACHE and len(spec.shape) in (4, 5)]
    if not caches:
        return None
    length = caches[0].shape[-2]
    # B and P are 1.
    one_token = [replace(one, shape=(*one.shape[:-4], 1, one.shape[-3], 1, one.shape[-1])) for one in caches]
    return CacheSize(
        inputs=tuple(spec.name for spec in caches),
        length=length,
        bytes_per_token=_sum_bytes(one_token),
        bytes=_sum_bytes(caches),
    )


def _sum_bytes(specs: Iterable[TensorSpec]) -> int | None:
    total = 0
    for spec in specs:
        if not spec.is_static:
            return None
        total += math.prod(map(int, spec.shape)) * numpy_dtype(spec.dtype).itemsize
    return total


def _with_tasks(facts: Inspection, prepared: PreparedModel) -> Inspection:
    modules = [prepared.lowered, *(bucket.lowered for bucket in prepared.buckets)]
    tasks = tuple(
        TaskCost(
            task.name, task.family, json.loads(task.signature), task.weight, task.flops, task.bytes, task.onnx_nodes
        )
        for task in prepared.tasks
        if not task.tables
    )
    return replace(
        facts,
        target=f"{prepared.target.kind} {prepared.target.arch}",
        tasks=tasks,
        without_task={kernel.name: kernel.reason for kernel in list_untunable(modules)},
        flops=sum(task.weight * task.flops for task in tasks),
        bytes=sum(task.weight * task.bytes for task in tasks),
    )
