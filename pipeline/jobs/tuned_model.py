"""Searches the graph of a model, tunes its tasks, and tries its kernels inside the whole model.

`tune_prepared` measures; `select_as_measured` picks from records alone, as the newest record of the whole model says.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

from relaxtune.pipeline.artifact.compile import CompiledModule
from relaxtune.pipeline.artifact.kernel_choice import KernelChoice
from relaxtune.pipeline.bench.measure import OWN_ARM
from relaxtune.pipeline.choose.graph_search import GraphReport, relowered, search_graph
from relaxtune.pipeline.choose.model_records import MeasuredModel, ModelDecision, measured_model
from relaxtune.pipeline.choose.record_lookup import still_true_in
from relaxtune.pipeline.choose.rerank import RerankReport, rerank
from relaxtune.pipeline.choose.selection import NO_DATABASE, select_kernels
from relaxtune.pipeline.choose.shipping import Shipping
from relaxtune.pipeline.environment import code_version, target_key
from relaxtune.pipeline.errors import InterruptedEarlyError, NothingMeasuredError
from relaxtune.pipeline.passes.graph_decisions import with_decisions
from relaxtune.pipeline.prepare import PreparedModel, stage
from relaxtune.pipeline.tasks.task import TuningTask
from relaxtune.pipeline.tuning.admission import TaskFeed
from relaxtune.pipeline.tuning.measure.stop import StopSignal
from relaxtune.pipeline.tuning.options import TuningOptions, TuningSummary
from relaxtune.pipeline.tuning.progress import OnCandidate
from relaxtune.pipeline.tuning.session import OpenMachine, require_valid, tune
from relaxtune.pipeline.tuning.task_start import template_candidates
from relaxtune.schedules.targets import ResolvedTarget
from relaxtune.tuning_db.records import Environment, Route, utc_now
from relaxtune.tuning_db.store import TuningDatabase
from relaxtune.tuning_db.winner import left_aside

# The note on the kernels of a model that ships without its records.
UNTUNED = "untuned: the model is not surely faster with tuned kernels"


@dataclass(frozen=True)
class TuningJob:
    """The identity of a tuning run: the next run of the same one goes on where this one broke off."""

    # Its name in `relaxtune db jobs`, and the difference from others of that name.
    model: str
    model_sha256: str
    # The target of the code, and the machine that measures.
    target: ResolvedTarget
    environment: Environment
    request: Mapping[str, object]  # The request without the tuning options, as plain JSON data.


@dataclass(frozen=True)
class TunedModel:
    """A tuning run, and the form of the model that was the fastest, with its choices.

    `graph` and `rerank` are what was found in the compiled model, None where nothing was looked for.
    """

    job_id: str
    summary: TuningSummary
    prepared: PreparedModel
    choices: tuple[KernelChoice, ...]
    graph: GraphReport | None = None
    rerank: RerankReport | None = None
    # The decision of a model whose tables keep untuned kernels at some sizes.
    with_untuned: ModelDecision | None = None


def tune_prepared(
    prepared: PreparedModel,
    tuning: TuningOptions,
    database: TuningDatabase,
    progress: OnCandidate | None,
    untuned: CompiledModule | None = None,
) -> TunedModel:
    """Search the graph of a model, tune its kernels, and look inside where the options say so; all is recorded.

    `untuned` is the model compiled without records, where that was made already.

    Raises `NothingMeasuredError`: not one candidate nor fallback was measured validly, and the database knew none; the
    failures are recorded; `InterruptedEarlyError`: Ctrl-C or SIGTERM came before that.
    """
    model = measured_model(prepared)
    decision = model.find(database)
    prepared = _as_decided(prepared, decision)
    graph: GraphReport | None = None

    def choose(form: PreparedModel) -> tuple[KernelChoice, ...]:
        return choose_kernels(form, database, decision=decision)

    if tuning.graph_s > 0:
        with stage("graph search"):
            found, graph = search_graph(prepared, model, database, choose, tuning, untuned)
        if found is not prepared:
            prepared, latencies_ms = found, graph.latencies_ms
            decided = _decision(prepared, choose(prepared))
            model.record(database, decided, seed=tuning.seed, job_id=None, latencies_ms=latencies_ms)
        tuning = dataclasses.replace(tuning, graph_spent_s=graph.seconds)
    job_id, summary = _tune(prepared, tuning, database, progress)
    return _reranked(TunedModel(job_id, summary, prepared, choose(prepared), graph), model, tuning, database)


def select_tuned(
    prepared: PreparedModel,
    tuning: TuningOptions,
    database: TuningDatabase,
    job_id: str,
    summary: TuningSummary,
    lock: AbstractContextManager[object] | None = None,
) -> TunedModel:
    """Return a model with the kernels that a run of `tune_tasks` found for its tasks, re-ranked if the options say so.

    The run may have tuned the tasks of other models too. `lock` is as in `rerank`.
    """
    model = measured_model(prepared)
    decision = model.find(database)
    prepared = _as_decided(prepared, decision)
    tuned = TunedModel(job_id, summary, prepared, choose_kernels(prepared, database, decision=decision))
    return _reranked(tuned, model, tuning, database, lock)


def with_untuned_sizes(tuned: TunedModel, sizes: Collection[str], database: TuningDatabase) -> TunedModel:
    """Return a tuned model whose tables keep their untuned kernels at some of its tuned sizes."""
    prepared = tuned.prepared
    own = {
        task.workload_hash: (Route.TEMPLATE, template_candidates(task, prepared.target)[0].decision)
        for task in prepared.tasks
        if any(point in sizes for of in task.tables for point in of.points)
    }
    before = _decision(prepared, tuned.choices)
    decision = dataclasses.replace(before, kernels={**before.kernels, **own}, made_at=utc_now())
    return dataclasses.replace(
        tuned, choices=choose_kernels(prepared, database, decision=decision), with_untuned=decision
    )


def _reranked(
    tuned: TunedModel,
    model: MeasuredModel,
    tuning: TuningOptions,
    database: TuningDatabase,
    lock: AbstractContextManager[object] | None = None,
) -> TunedModel:
    if not tuning.rerank or tuned.summary.interrupted:
        return tuned
    choices, report = rerank_prepared(
        tuned.prepared, tuned.choices, database, tuning, model=model, job_id=tuned.job_id, lock=lock
    )
    return dataclasses.replace(tuned, choices=choices, rerank=report)


def rerank_prepared(
    prepared: PreparedModel,
    choices: Sequence[KernelChoice],
    database: TuningDatabase,
    tuning: TuningOptions,
    *,
    model: MeasuredModel,
    job_id: str | None = None,
    lock: AbstractContextManager[object] | None = None,
) -> tuple[tuple[KernelChoice, ...], RerankReport]:
    """Look inside a model for kernels that suit it better, as `tuning.rerank` says, and record what was found.

    The record is of `model`, as its request says, whatever form `prepared` has. `lock` is as in `rerank`.
    """
    with stage("re-rank"):
        choices, report = rerank(prepared, choices, database, tasks=tuning.rerank, lock=lock)
    if report.trials:
        decision = _decision(prepared, choices)
        model.record(database, decision, seed=tuning.seed, job_id=job_id, latencies_ms=report.latencies_ms)
    return choices, report


def record_shipped(
    requested: PreparedModel,
    prepared: PreparedModel,
    shipping: Shipping,
    database: TuningDatabase,
    *,
    with_untuned: ModelDecision | None = None,
    tuning: TuningOptions,
    job_id: str | None,
) -> None:
    """Record whether a model, as its request says, ships untuned, where its newest record does not say so already."""
    model = measured_model(requested)
    before, untuned = model.find(database), not shipping.tuned
    if untuned == (before is not None and before.untuned) and (untuned or with_untuned is None):
        return
    decision = (
        with_untuned
        if with_untuned is not None and not untuned
        else (ModelDecision(untuned=True) if untuned else _decision(prepared, shipping.compiled.choices))
    )
    latencies_ms = shipping.report.arm(OWN_ARM).latencies_ms
    model.record(database, decision, seed=tuning.seed, job_id=job_id, latencies_ms=latencies_ms)


def select_as_measured(
    prepared: PreparedModel, database: TuningDatabase, *, explain: bool = False
) -> tuple[PreparedModel, tuple[KernelChoice, ...]]:
    """Return the model in the form that its newest record says, and its kernels, of records alone.

    `explain` is as in `select_kernels`.
    """
    decision = measured_model(prepared).find(database)
    prepared = _as_decided(prepared, decision)
    return prepared, _as_it_ships(prepared, database, decision, explain)


def bucket_kernels(
    bucket: PreparedModel, database: TuningDatabase | None, *, explain: bool = False
) -> tuple[KernelChoice, ...]:
    """Return the kernels of a shape bucket, from records unless it was no faster with them; nothing is measured."""
    decision = None if database is None else measured_model(bucket).find(database)
    untuned = decision if decision is not None and decision.untuned else None
    return _as_it_ships(bucket, database, untuned, explain)


def _as_it_ships(
    prepared: PreparedModel, database: TuningDatabase | None, decision: ModelDecision | None, explain: bool
) -> tuple[KernelChoice, ...]:
    """Return the kernels of a model; where it ships untuned, those it has without records."""
    if decision is None or not decision.untuned:
        return choose_kernels(prepared, database, decision=decision, explain=explain)
    untuned = untuned_kernels(prepared)
    if not explain:
        return untuned
    tuned = {choice.function: choice for choice in choose_kernels(prepared, database, explain=True)}
    return tuple(
        dataclasses.replace(choice, trace=left_aside(tuned[choice.function].trace, UNTUNED)) for choice in untuned
    )


def _as_decided(prepared: PreparedModel, decision: ModelDecision | None) -> PreparedModel:
    if decision is None:
        return prepared
    return relowered(prepared, with_decisions(prepared.lowered.options, decision.graph))


def _decision(prepared: PreparedModel, choices: Sequence[KernelChoice]) -> ModelDecision:
    hashes = {task.name: task.workload_hash for task in prepared.tasks}
    kernels = {
        hashes[choice.task]: (choice.route, choice.decision or "")
        for choice in choices
        if choice.task is not None and choice.within_model
    }
    return ModelDecision(prepared.lowered.options.decided, kernels)


def _tune(
    prepared: PreparedModel, tuning: TuningOptions, database: TuningDatabase, progress: OnCandidate | None
) -> tuple[str, TuningSummary]:
    job = TuningJob(
        model=prepared.model.name,
        model_sha256=prepared.lowered.graph.source_sha256,
        target=prepared.target,
        environment=prepared.environment,
        request={"source": str(prepared.request.source), "target": prepared.request.target},
    )
    tuning = dataclasses.replace(tuning, routes=tuning.routes & prepared.request.routes)
    return tune_tasks(job, prepared.tasks, tuning, database, progress)


def tune_tasks(
    of: TuningJob,
    tasks: Sequence[TuningTask],
    tuning: TuningOptions,
    database: TuningDatabase,
    progress: OnCandidate | None,
    *,
    machine: OpenMachine | None = None,
    feed: TaskFeed | None = None,
    stop: StopSignal | None = None,
    on_job: Callable[[str], None] | None = None,
) -> tuple[str, TuningSummary]:
    """Tune tasks as a job of the database; return the job's id and its summary.

    `machine`, `feed` and `stop` are as in `tune`; `on_job` is called with the job's id first.

    Raises `NothingMeasuredError` or `InterruptedEarlyError`: as `tune_prepared`; the job says so too.
    """
    options = {**of.request, **plain_options(tuning)}
    job = database.start_job(
        model=of.model,
        model_sha256=of.model_sha256,
        target=target_key(of.target),
        options=json.dumps(options, default=str),
        code_version=code_version(),
    )
    try:
        if on_job is not None:
            on_job(job.id)
        summary = tune(
            tasks,
            target=of.target,
            database=database,
            environment=of.environment,
            options=tuning,
            job_id=job.id,
            progress=progress,
            still_true=still_true_in(database, of.target, of.environment),
            machine=machine,
            feed=feed,
            stop=stop,
        )
        require_kept(summary)
    except NothingMeasuredError:
        database.finish_job(job.id, "nothing measured")
        raise
    except (KeyboardInterrupt, InterruptedEarlyError):
        database.finish_job(job.id, "interrupted")
        raise
    except BaseException as error:
        database.finish_job(job.id, f"failed: {type(error).__name__}")
        raise
    database.finish_job(job.id, "interrupted" if summary.interrupted else "done")
    return job.id, summary


def choose_kernels(
    prepared: PreparedModel,
    database: TuningDatabase | None,
    decision: ModelDecision | None = None,
    *,
    why: str = NO_DATABASE,
    explain: bool = False,
) -> tuple[KernelChoice, ...]:
    """Return how each kernel of a model gets its schedule; see `select_kernels`."""
    return select_kernels(
        prepared.lowered,
        prepared.tasks,
        database=database,
        target=prepared.target,
        environment=prepared.environment,
        routes=prepared.request.routes | {Route.FALLBACK},
        decision=decision,
        why=why,
        explain=explain,
    )


def untuned_kernels(prepared: PreparedModel) -> tuple[KernelChoice, ...]:
    """Return the kernels that a model ships with if tuned ones are no faster in it."""
    return choose_kernels(prepared, None, why=UNTUNED)


def plain_options(options: TuningOptions) -> dict[str, object]:
    """Return options as the database keeps them with a job."""
    return {**dataclasses.asdict(options), "mode": options.mode.value, "routes": sorted(options.routes)}


def require_kept(summary: TuningSummary) -> None:
    """Check that a run left something to compile from.

    Raises `NothingMeasuredError` or `InterruptedEarlyError`: it measured nothing valid; it was interrupted before that.
    """
    if not summary.interrupted:
        require_valid(summary)
    elif summary.tasks and all(task.after_us is None for task in summary.tasks):
        raise InterruptedEarlyError(
            "interrupted before anything was measured; no artifact was written. Run the same command again, or "
            "`relaxtune compile`, which measures nothing"
        )
