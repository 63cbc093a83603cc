"""`relaxtune artifact`: a store of artifacts by content, with tags that move and what is known of each move."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from relaxtune.pipeline.cli.gate import CallsOption, LimitOptions, read_calls
from relaxtune.pipeline.cli.groups import option, takes_groups
from relaxtune.pipeline.cli.options import (
    DEFAULT_DATABASE,
    DEFAULT_STORE,
    DatabaseOption,
    FormatOption,
    ReferenceOption,
    SeedOption,
    SharedDatabasesOption,
    StoreOption,
    ToleranceOptions,
    VerifyKeyOption,
    optional_database,
    require_signed,
)
from relaxtune.pipeline.cli.output import OutputFormat, emit, print_json, stdout_console
from relaxtune.pipeline.errors import UsageError
from relaxtune.pipeline.printed_tables import TableView
from relaxtune.tuning_db.urls import DatabaseUrl

if TYPE_CHECKING:
    from relaxtune.pipeline.gate.gate import GateReport
    from relaxtune.pipeline.registry.registry import Registry, StoredArtifact
    from relaxtune.tuning_db.tags import TagMove

app = typer.Typer(
    help="Keep artifacts in a store, under tags such as prod; rebuild them, change their weights.", no_args_is_help=True
)

_KEY_DIGITS = 12

ArtifactName = Annotated[str, typer.Argument(metavar="ARTIFACT", help="A directory, a tag, or the start of a key.")]
WhyOption = Annotated[str, typer.Option("--why", help="The reason, for the history.")]
TagName = Annotated[str, typer.Argument(metavar="TAG", help="Such as prod or canary.")]


@dataclass(frozen=True)
class RegistryOptions:
    """Where artifacts and the history of tags are kept, and how a command writes its result."""

    store: StoreOption = DEFAULT_STORE
    db: DatabaseOption = DEFAULT_DATABASE
    output_format: FormatOption = OutputFormat.TABLE

    @contextmanager
    def open(self) -> Iterator[Registry]:
        """Give the registry; the database is made if it is not there."""
        from relaxtune.pipeline.registry.registry import Registry
        from relaxtune.tuning_db.store import TuningDatabase

        with TuningDatabase.open(self.db) as database:
            yield Registry(self.store, database)

    def emit_move(self, move: TagMove) -> None:
        """Write where a tag stands now."""
        self.emit_moves(f"{move.tag} stands at {(move.artifact_key or 'no artifact')[:_KEY_DIGITS]}", [move])

    def emit_moves(self, title: str, moves: list[TagMove]) -> None:
        """Write moves of tags."""
        columns = {
            "tag": lambda one: one.tag,
            "move": lambda one: one.number,
            "what": lambda one: one.kind.value,
            "artifact": lambda one: (one.artifact_key or "")[:_KEY_DIGITS],
            "by": lambda one: one.by,
            "when (UTC)": lambda one: f"{one.created_at:%Y-%m-%d %H:%M:%S}",
            "why": lambda one: one.why,
        }
        emit(self.output_format, [asdict(move) for move in moves], TableView.of(title, moves, columns))


@app.command(name="list")
@takes_groups()
def list_command(registry: RegistryOptions) -> None:
    """List the artifacts of the store, the newest first, with their tags."""
    with registry.open() as opened:
        found = opened.artifacts()
    _emit_artifacts(registry, f"artifacts in {opened.store.name}", list(found))


@app.command()
@takes_groups()
def show(name: ArtifactName, registry: RegistryOptions) -> None:
    """Show an artifact; for a tag, also its history."""
    with registry.open() as opened:
        moves = list(opened.history(name))
        found = opened.find(name) if not moves or name in opened.tags() else None
    if registry.output_format is OutputFormat.JSON:
        shown = None if found is None else asdict(found)
        print_json({"artifact": shown, "history": [asdict(move) for move in moves]})
        return
    if found is not None:
        _emit_artifacts(registry, found.place, [found])
    if moves:
        registry.emit_moves(f"history of {name}", moves)


@app.command()
@takes_groups()
def tag(
    tag: TagName,
    registry: RegistryOptions,
    why: WhyOption = "",
    artifact: str | None = option(None, "A directory, a tag, or the start of a key.", "--to", metavar="ARTIFACT"),
    remove: bool = option(False, "Remove the tag.", "--remove"),
) -> None:
    """Set a tag to an artifact without a gate. The artifact is copied into the store."""
    if remove == (artifact is not None):
        raise UsageError("artifact tag needs --to ARTIFACT, or --remove")
    with registry.open() as opened:
        move = opened.remove_tag(tag, why) if artifact is None else opened.tag(artifact, tag, why)
    registry.emit_move(move)


@app.command()
@takes_groups()
def promote(
    artifact: ArtifactName,
    tag: TagName,
    registry: RegistryOptions,
    limits: LimitOptions,
    tolerance: ToleranceOptions,
    why: WhyOption = "",
    model: ReferenceOption = None,
    inputs: CallsOption = None,
    force: Annotated[bool, typer.Option("--force", help="Move the tag even if the gate refuses.")] = False,
    verify_key: VerifyKeyOption = None,
) -> None:
    """Move a tag to an artifact if the gate accepts it. Exits 5 if the gate refuses."""
    from relaxtune.pipeline.gate.report import render
    from relaxtune.pipeline.registry.registry import find_artifact, open_store

    require_signed(verify_key, find_artifact(artifact, open_store(registry.store)))

    def show_gate(report: GateReport) -> None:
        if registry.output_format is OutputFormat.TABLE:
            stdout_console().print(render(report))
        elif not report.passed and not force:
            print_json(report.to_json())

    accepted = limits.limits(tolerance)
    with registry.open() as opened:
        done = opened.promote(
            artifact, tag, why, accepted, model=model, inputs=read_calls(inputs), force=force, on_gate=show_gate
        )
    registry.emit_move(done.move)


@app.command()
@takes_groups()
def rollback(tag: TagName, registry: RegistryOptions, why: WhyOption = "") -> None:
    """Move a tag back to its previous artifact."""
    with registry.open() as opened:
        move = opened.rollback(tag, why)
    registry.emit_move(move)


@app.command()
@takes_groups()
def gc(
    registry: RegistryOptions,
    steps: int = option(5, "Roll-backs of each tag that stay possible.", min=0),
    older_than: float = option(24.0, "Keep artifacts younger than this many hours.", min=0.0),
) -> None:
    """Remove artifacts that no tag, and no roll-back of a tag, needs."""
    with registry.open() as opened:
        gone = opened.collect(steps=steps, older_than_s=older_than * 3600)
    view = TableView(f"{len(gone)} artifacts removed", ("artifact",), tuple((key[:_KEY_DIGITS],) for key in gone))
    emit(registry.output_format, {"removed": list(gone)}, view)


@app.command()
@takes_groups()
def rebuild(
    artifact: ArtifactName,
    store: StoreOption = DEFAULT_STORE,
    out: Path | None = option(None, "Keep the new artifact here. Default: delete it.", metavar="DIR"),
    db: Annotated[DatabaseUrl | None, optional_database("Database with the records of its kernels.")] = None,
    shared_db: SharedDatabasesOption = None,
    model: ReferenceOption = None,
    output_format: FormatOption = OutputFormat.TABLE,
) -> None:
    """Build an artifact again from its manifest and records, and check that it is the same, bit for bit.

    Without the artifact's device, only hashes of kernels and weights are compared. Exits 1 and names the differences.
    """
    from relaxtune.pipeline.registry.rebuild import rebuild_artifact
    from relaxtune.pipeline.registry.registry import find_artifact, open_store
    from relaxtune.pipeline.temporary import temporary_folder

    place = find_artifact(artifact, open_store(store))
    with temporary_folder() as folder:
        again = rebuild_artifact(place, out or folder / "again", database=db, shared=shared_db or (), source=model)
    outputs = "not run: the device is not here" if again.outputs is None else f"{len(again.outputs)} compared"
    facts = {
        "kernels": f"{again.kernels} compiled again",
        "outputs": outputs,
        "files with other bytes": ", ".join(name for name, same in again.same_files.items() if not same) or "none",
        **{f"{one.subject}: {one.field}": f"{one.a} -> {one.b}" for one in (*again.changed, *again.noted)},
    }
    emit(
        output_format,
        again.to_json(),
        TableView.facts(f"{place}: {'the same' if again.same else 'ANOTHER'}", facts.items()),
    )
    again.raise_if_changed()


@app.command()
@takes_groups()
def fetch(
    artifact: ArtifactName,
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="The new directory.")],
    store: StoreOption = DEFAULT_STORE,
    verify_key: VerifyKeyOption = None,
    output_format: FormatOption = OutputFormat.TABLE,
) -> None:
    """Copy an artifact of the store to a directory, and check its files."""
    from relaxtune.pipeline.artifact.directory import copy_artifact
    from relaxtune.pipeline.registry.registry import find_artifact, open_store

    place = find_artifact(artifact, open_store(store))
    require_signed(verify_key, place)
    manifest = copy_artifact(place, out)
    size = sum(entry.bytes for entry in manifest.files.values())
    row = (manifest.model, str(len(manifest.files)), f"{size / 1e6:.1f}")
    view = TableView(str(out), ("model", "files", "MB"), (row,))
    emit(output_format, {"artifact": str(out), "model": manifest.model, "bytes": size}, view)


@app.command(name="export-ep")
@takes_groups()
def export_ep(
    artifact: ArtifactName,
    out: Annotated[
        Path, typer.Argument(metavar="OUT", help="Folder for model_ctx.onnx, the provider and the artifact.")
    ],
    store: StoreOption = DEFAULT_STORE,
    verify_key: VerifyKeyOption = None,
    output_format: FormatOption = OutputFormat.TABLE,
) -> None:
    """Write an artifact as a model that ONNX Runtime runs, with the execution provider for it.

    Prints the lines of Python that open it. The first export compiles the provider, which needs cmake and g++.
    """
    from relaxtune.pipeline.artifact.provider import export_for_onnx_runtime
    from relaxtune.pipeline.registry.registry import find_artifact, open_store

    place = find_artifact(artifact, open_store(store))
    require_signed(verify_key, place)
    written = export_for_onnx_runtime(place, out)
    if output_format is OutputFormat.JSON:
        print_json({"model": str(written.model), "library": str(written.library), "python": written.python})
    else:
        typer.echo(written.python, nl=False)


def _emit_artifacts(registry: RegistryOptions, title: str, found: list[StoredArtifact]) -> None:
    words = {None: "never", True: "passed", False: "FAILED"}
    columns = {
        "artifact": lambda one: one.key[:_KEY_DIGITS],
        "tags": lambda one: ", ".join(one.tags),
        "before": lambda one: ", ".join(one.before),
        "model": lambda one: one.model,
        "target": lambda one: one.target,
        "precision": lambda one: one.precision or "graph",
        "MB": lambda one: f"{one.bytes / 1e6:.1f}",
        "validated": lambda one: words[one.validated],
        "added": lambda one: f"{one.added_at:%Y-%m-%d %H:%M}",
    }
    emit(registry.output_format, [asdict(one) for one in found], TableView.of(title, found, columns))


@app.command()
@takes_groups()
def refit(
    artifact: ArtifactName,
    weights: str | None = option(None, "The same graph with other weights, or a zoo name.", metavar="NEW.onnx"),
    lora: Path | None = option(
        None, "A LoRA adapter (a folder or file of PEFT) to merge into the weights.", metavar="ADAPTER"
    ),
    out: Path | None = option(None, "Directory of the new artifact. Default: replace the old one.", metavar="DIR"),
    seed: SeedOption = 0,
    samples: int = option(3, "Random inputs to validate with; 0 skips the validation.", min=0),
    sign: Path | None = option(None, "Sign the artifact with this Ed25519 private key (PEM).", metavar="KEY"),
    store: StoreOption = DEFAULT_STORE,
    output_format: FormatOption = OutputFormat.TABLE,
) -> None:
    """Change the weights of an artifact without compiling or tuning.

    With --lora alone, the adapter is merged into the artifact's source model.

    Exits 1 if the weights do not fit (another graph, a weight inside the code). Exits 3 if the validation fails; the
    new artifact is then in DIR.rejected.
    """
    from relaxtune.pipeline.registry.refit import refit_artifact
    from relaxtune.pipeline.registry.registry import find_artifact, open_store

    place = find_artifact(artifact, open_store(store))
    if out is None and place != Path(artifact):
        raise UsageError(f"{artifact} is in the store {store}, where no artifact changes; name a place with --out DIR")
    done = refit_artifact(place, weights, out, lora=lora, seed=seed, samples=samples, sign=sign)
    report = done.validation
    passed = None if report is None else report.passed
    facts = {
        "weights": f"{len(done.changed)} changed, {len(done.same)} the same",
        "seconds": f"{done.seconds:.2f}",
        "validation": "not run" if report is None else "passed" if passed else "FAILED",
    }
    data = {
        "artifact": str(done.directory),
        "model": done.manifest.model,
        "changed": list(done.changed),
        "same": list(done.same),
        "seconds": done.seconds,
        "validation_passed": passed,
    }
    emit(
        output_format,
        data,
        TableView.facts(f"{done.directory} with the weights of {done.manifest.source}", facts.items()),
    )
    if report is not None:
        report.raise_if_failed()
