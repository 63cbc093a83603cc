"""From what a user names to what can be tuned or compiled: model, target, passes and tasks, in one value."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from pathlib import Path

from relaxtune.models import OnnxModel, load_model
from relaxtune.models.axis_profile import AxisProfile, check_profile
from relaxtune.models.buckets import Bucket, bucket_shapes, make_buckets
from relaxtune.models.decoder_files import DecoderFiles, find_files, read_prompt
from relaxtune.models.hub.folder import model_path
from relaxtune.models.loading import open_axes
from relaxtune.models.shapes import Shapes
from relaxtune.models.size_histogram import SizePoint
from relaxtune.pipeline.environment import UNKNOWN_DEVICE, detect_environment
from relaxtune.pipeline.errors import UsageError
from relaxtune.pipeline.importer import ImportedGraph, import_model
from relaxtune.pipeline.onnx_runtime.prompts import takes_prompts
from relaxtune.pipeline.passes import lower
from relaxtune.pipeline.passes.generation.entries import generation_graphs
from relaxtune.pipeline.passes.module import LoweredModule, LoweringOptions
from relaxtune.pipeline.spans import span
from relaxtune.pipeline.tasks.extract import UntunableKernel, extract_tasks, list_untunable
from relaxtune.pipeline.tasks.routes import DEFAULT_ROUTES
from relaxtune.pipeline.tasks.sizes_of_tables import TunedSizes, tasks_of_tables, tuned_sizes
from relaxtune.pipeline.tasks.task import TuningTask
from relaxtune.schedules.targets import ResolvedTarget, resolve_target
from relaxtune.tuning_db.records import Environment, Route

logger = logging.getLogger(__name__)

_stage_s: ContextVar[dict[str, float] | None] = ContextVar("stage_s", default=None)

# Passes whose kernels are for templates: the fallback makes them of many parts, slower than without the pass.
TEMPLATE_PASSES = frozenset({"recognise_attention", "append_in_attention", "interleave_gates", "fuse_norms"})
# Of these, passes whose kernels a vendor's library makes too.
LIBRARY_PASSES = frozenset({"recognise_attention"})


@dataclass(frozen=True)
class ModelRequest:
    """A model to compile, as a user describes it."""

    source: str | Path  # Path of an `.onnx` file or a folder, `hf:ORG/NAME`, or a zoo name.
    # Input name -> shape that replaces the model's own; a name instead of a size stays symbolic.
    shapes: Mapping[str, Sequence[int | str]] = field(default_factory=dict)
    target: str = "auto"  # Text for `schedules.targets.resolve_target`.
    # Precision, passes switched off, IR dump, whether weights are embedded.
    lowering: LoweringOptions = field(default_factory=LoweringOptions)
    seed: int = 0  # Seed of the zoo's weights.
    routes: frozenset[Route] = DEFAULT_ROUTES  # Who may make kernels; the fallback always may.
    # Symbolic axis -> sizes that the artifact gets code of its own for, each combination of several axes' sizes.
    buckets: Mapping[str, Sequence[int]] = field(default_factory=dict)
    # Symbolic axis -> the sizes that it takes in calls.
    profile: Mapping[str, AxisProfile] = field(default_factory=dict)
    lengths: Sequence[SizePoint] = ()  # The sizes of real calls, counted; `profile` is then of them.
    portable: bool = False  # Whether PTX is kept beside the machine code, so that newer GPUs run it too.
    generate: bool = False  # Whether the artifact owns the caches of a decoder and generates tokens.
    max_length: int | None = None  # Of a sequence that is generated; None takes what the model allows, 2,048 at most.


@dataclass(frozen=True)
class PreparedBucket:
    """A model lowered for one shape bucket."""

    bucket: Bucket
    lowered: LoweredModule


@dataclass(frozen=True)
class PreparedModel:
    """A model lowered for its target, with its tuning tasks and the environment that measurements are true for.

    `buckets` are the same model in other shapes; `tasks` and `untunable` are of them all. Where axes are free, kernels
    are tuned and the model is timed at `sizes`.
    """

    request: ModelRequest
    model: OnnxModel
    target: ResolvedTarget
    environment: Environment
    lowered: LoweredModule
    tasks: tuple[TuningTask, ...]
    untunable: tuple[UntunableKernel, ...]
    buckets: tuple[PreparedBucket, ...] = ()
    sizes: tuple[TunedSizes, ...] = ()
    encoder: OnnxModel | None = None  # Whose outputs a decoder's steps take.

    @property
    def can_measure(self) -> bool:
        """Whether code for the target can be measured on this machine."""
        return self.environment.device_name != UNKNOWN_DEVICE

    def of_bucket(self, bucket: PreparedBucket) -> PreparedModel:
        """Return one of the buckets as a model of its own."""
        lowered = bucket.lowered
        name = lowered.graph.name
        tasks = tuple(
            replace(
                task,
                functions={name: task.functions[name]},
                weight=sum(len(lowered.kernels[function]) for function in task.functions[name]),
            )
            for task in self.tasks
            if name in task.functions
        )
        untunable = tuple(one for one in self.untunable if one.model == name)
        return replace(
            self, model=lowered.graph.model, lowered=lowered, tasks=tasks, untunable=untunable, buckets=(), sizes=()
        )


@dataclass(frozen=True)
class Imported:
    """A model of a request in Relax, before its target and its precision matter, and the buckets it is wanted in."""

    model: OnnxModel
    graph: ImportedGraph
    wanted: tuple[Bucket, ...]
    encoder: OnnxModel | None = None
    start: int | None = None  # The token that a decoder behind an encoder begins with.


def import_request(request: ModelRequest) -> Imported:
    """Return the model of a request, loaded and imported.

    Raises `ModelError`, `PipelineError`: it cannot be had; see `pipeline.errors`.
    """
    with stage("load"):
        free = ("batch", "sequence", "past_sequence") if request.generate else (*request.buckets, *request.profile)
        shapes = open_axes(request.source, free, request.shapes)
        files = find_files(model_path(request.source)) if request.generate else None
        if files is None:
            model, encoder = load_model(request.source, shapes=shapes or None, seed=request.seed), None
        else:
            model, encoder = _load_decoder(files, shapes)
        check_profile(request.profile, model)
        wanted = make_buckets(request.buckets, model.inputs) if request.buckets and not request.generate else ()
    with stage("import"):
        return Imported(model, import_model(model), tuple(wanted), encoder, files.start if files else None)


def _load_decoder(files: DecoderFiles, shapes: Shapes) -> tuple[OnnxModel, OnnxModel | None]:
    """Return a decoder's step, and the encoder in front of it; lengths that files know are numbers in the step."""
    model = load_model(files.step, shapes=shapes or None)
    encoder = None if files.encoder is None else load_model(files.encoder.parent)
    # An encoder of sound knows its length.
    known = {} if encoder is None else {one.name: one.shape for one in encoder.outputs}
    lengths = {
        axis: (size,)
        for one in model.inputs
        for axis, size in zip(one.shape, known.get(one.name, one.shape), strict=True)
        if isinstance(axis, str) and isinstance(size, int)
    }
    _, new = next((one.shape for one in model.inputs if "input_ids" in one.name and len(one.shape) == 2), (1, 1))
    prompt = read_prompt(files) if isinstance(new, str) else None
    if prompt is not None and not takes_prompts(model, prompt):
        logger.info("%s takes one token at a time: for more, it differs from the decoder without past", model.name)
        lengths[str(new)] = (1,)
    return (load_model(files.step, shapes={**shapes, **lengths}) if lengths else model), encoder


def prepare_model(
    request: ModelRequest, importing: Callable[[ModelRequest], Imported] = import_request
) -> PreparedModel:
    """Return the model of a request, imported, lowered and cut into tuning tasks.

    `importing`: returns the imported model; what is imported serves all precisions and targets.
    Raises `ModelError`, `ScheduleError`, `PipelineError`: the model, the target, or the lowering cannot be had; see
    `pipeline.errors`.
    """
    if request.lowering.unpad and request.buckets:
        raise UsageError("--unpad leaves padding out, and --bucket pads to a size; leave one of them out")
    if request.generate and (request.lowering.unpad or request.profile):
        raise UsageError("--generate plans its own sizes; leave --unpad, --profile and --lengths out")
    if request.max_length is not None and not request.generate:
        raise UsageError("--max-length is of what --generate makes; add --generate, or leave it out")
    target = resolve_target(request.target, portable=request.portable)
    logger.info("target %s %s: %s", target.kind, target.arch, target.source)
    logger.debug("its limits: %s", target.limits)
    imported = importing(request)
    model, graph = imported.model, imported.graph
    if request.lowering.policy is not None and request.lowering.calibration is not None:
        request.lowering.calibration.require_graph(model)
    steps: list[tuple[Bucket, ImportedGraph]] = []
    if request.generate:
        policy = request.lowering.policy
        half = None if policy is None else policy.half
        batches = request.buckets
        graph, steps = generation_graphs(graph, request.max_length, half, batches, target, imported.encoder)
        assert graph.generation is not None
        graph = replace(graph, generation=replace(graph.generation, start=imported.start))
    with stage("lower"):
        lowered = lower(graph, target.target, _lowering_for(request))
    buckets: tuple[PreparedBucket, ...] = ()
    for bucket, step in [*((bucket, None) for bucket in imported.wanted), *steps]:
        with stage(f"bucket {bucket.name}"):
            if step is None:
                pinned = load_model(request.source, shapes=bucket_shapes(model.inputs, bucket), seed=request.seed)
                # Tasks and records tell the modules of a job apart by this name.
                step = import_model(replace(pinned, name=f"{model.name}[{bucket.name}]"))
            buckets += (PreparedBucket(bucket, lower(step, target.target, _lowering_for(request))),)
    modules = [lowered, *(bucket.lowered for bucket in buckets)]
    with stage("tasks"):
        sizes = () if buckets else tuned_sizes(model, request.profile, request.lengths, target.kind)
        tasks, untunable = list_tasks(modules, sizes, target)
    logger.info(
        "%s: %d ONNX nodes, %d kernels, %d tuning tasks, %d kernels that cannot be tuned",
        model.name,
        len(model.proto.graph.node),
        len(lowered.kernels),
        len(tasks),
        len(untunable),
    )
    for kernel in untunable:
        logger.debug("kernel %s of %s cannot be tuned: %s", kernel.name, kernel.model, kernel.reason)
    environment = detect_environment(target)
    return PreparedModel(
        *(request, model, target, environment, lowered, tasks, untunable, buckets, sizes), encoder=imported.encoder
    )


def list_tasks(
    modules: Sequence[LoweredModule], sizes: Sequence[TunedSizes], target: ResolvedTarget
) -> tuple[tuple[TuningTask, ...], tuple[UntunableKernel, ...]]:
    """Return the tasks of modules, those of the first one's tables of sizes behind, and the kernels without a task."""
    tabled = tasks_of_tables(modules[0], sizes, target)
    tuned = {(of.model, of.function) for task in tabled for of in task.tables}
    untunable = tuple(one for one in list_untunable(modules) if (one.model, one.name) not in tuned)
    return (*extract_tasks(modules), *tabled), untunable


def _lowering_for(request: ModelRequest) -> LoweringOptions:
    """Return a request's options without the passes that make what only a template makes, where templates are off."""
    maxima = {axis: profile.most for axis, profile in request.profile.items()}
    options = replace(request.lowering, maxima=maxima, one_packing=bool(request.buckets) or request.generate)
    if Route.TEMPLATE in request.routes:
        return options
    aside = TEMPLATE_PASSES - (LIBRARY_PASSES if Route.LIBRARY in request.routes else frozenset())
    logger.info("route template is switched off, and with it the passes %s", ", ".join(sorted(aside)))
    return replace(options, disabled_passes=options.disabled_passes | aside)


@contextmanager
def stage(name: str) -> Iterator[None]:
    """Log how long a stage of a job took."""
    started = time.perf_counter()
    with span(name):
        yield
    seconds = time.perf_counter() - started
    logger.info("%s: %.1f s", name, seconds)
    seconds_of = _stage_s.get()
    if seconds_of is not None:
        seconds_of[name] = seconds_of.get(name, 0.0) + seconds


@contextmanager
def timed_stages() -> Iterator[Mapping[str, float]]:
    """Give the seconds of each stage that ends within the context, as they come."""
    seconds_of: dict[str, float] = {}
    token = _stage_s.set(seconds_of)
    try:
        yield seconds_of
    finally:
        _stage_s.reset(token)
