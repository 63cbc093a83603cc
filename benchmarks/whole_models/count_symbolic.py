"""Count the kernels of models with symbolic axes beside those of the same models with static ones; nothing is run.

    python -m benchmarks.whole_models.count_symbolic [MODEL ...] [--exports DIR] [--target llvm] [--kernels]
        [--sizes 64x128] [--known-images] [--jobs 2] [--json FILE.json]

Each model of the zoo has two layers. `--exports` takes the files with symbolic axes that `python -m tests.export.matrix
--export-only` leaves, each beside itself with all axes given sizes (`--sizes`, batch and length), instead; with
`--known-images`, height and width of images are known, and only their number is symbolic. `kernels` counts calls of
kernels in one inference, `launches` what a GPU is given for them. The graphs are lowered, and their kernels made by the
defaults of templates and fallback schedules.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from multiprocessing import get_context
from pathlib import Path

from benchmarks.whole_models.count_launches import BUILDERS
from relaxtune.models import OnnxModel, load_model
from relaxtune.models.errors import ModelError
from relaxtune.models.inference import check_and_infer
from relaxtune.models.loading import make_model
from relaxtune.models.zoo.graph import Dim, Precision
from relaxtune.models.zoo.presets import get_preset
from relaxtune.pipeline.artifact.compile import apply_choices
from relaxtune.pipeline.choose.selection import select_kernels
from relaxtune.pipeline.environment import detect_environment
from relaxtune.pipeline.errors import PipelineError
from relaxtune.pipeline.importer import import_model
from relaxtune.pipeline.passes import LoweringOptions, lower
from relaxtune.pipeline.tasks.extract import extract_tasks
from relaxtune.pipeline.tasks.routes import DEFAULT_ROUTES
from relaxtune.schedules.fallback import fallback_with_rules
from relaxtune.schedules.gpu.binding import count_launches
from relaxtune.schedules.targets import resolve_target
from tests.export.matrix import environment, head_commit
from tests.export.matrix_worker import PINNED_SIZE, sized_shapes

_SIZES: Mapping[str, int] = {"batch": 2, "sequence": 16, "past_sequence": 15}
MODELS: Mapping[str, tuple[str, ...]] = {
    "bert-tiny": ("batch", "sequence"),
    "gpt2-tiny": ("batch", "sequence"),
    "gpt2-tiny-decode": ("batch", "past_sequence"),
    "llama-tiny": ("batch", "sequence"),
    "llama-tiny-decode": ("batch", "past_sequence"),
    "vit-tiny": ("batch",),
    "t5-tiny": ("batch", "sequence"),
}


@dataclass(frozen=True)
class Count:
    """What one inference is made of: calls of kernels, launches, and how many kernels each route or rule made."""

    kernels: int
    launches: int
    makers: Mapping[str, int]
    names: tuple[str, ...]

    @property
    def text(self) -> str:
        """The makers, most kernels first."""
        return ", ".join(f"{count} {maker}" for maker, count in sorted(self.makers.items(), key=lambda item: -item[1]))


@dataclass(frozen=True)
class Known:
    """Sizes of an export without symbolic axes; `images`: those of images are known in the other form, too."""

    batch: int
    length: int
    images: bool


def zoo_model(name: str, dims: Mapping[str, Dim], layers: int = 2) -> OnnxModel:
    """Return a model of the zoo with some layers."""
    config = replace(get_preset(name).config, layers=layers)  # type: ignore[type-var]
    options = {"decode": True} if "decode" in name else {}
    proto = BUILDERS[name.split("-")[0]](name, config, dict(dims), Precision.FP32, 0, **options)
    check_and_infer(proto)
    return make_model(name, proto, path=None, data_dir=None, seed=0)


def count(model: OnnxModel, target_name: str, precision: str | None) -> Count:
    """Return what a model compiles to."""
    target = resolve_target(target_name)
    lowered = lower(import_model(model), target.target, LoweringOptions(precision=precision))
    choices = select_kernels(
        lowered,
        extract_tasks([lowered]),
        database=None,
        target=target,
        environment=detect_environment(target),
        routes=DEFAULT_ROUTES,
    )
    chosen = apply_choices(lowered.mod, choices)
    mod, rules = fallback_with_rules(chosen, target.target)
    makers: Counter[str] = Counter()
    for name, calls in lowered.kernels.items():
        makers[rules.get(name, "template")] += len(calls)
    launches = sum(count_launches(mod[name]) * len(calls) for name, calls in lowered.kernels.items())
    names = tuple(f"{name} x{len(calls)}" for name, calls in lowered.kernels.items())
    return Count(sum(map(len, lowered.kernels.values())), launches, makers, names)


def exported_models(path: Path, known: Known) -> tuple[OnnxModel, OnnxModel]:
    """Return the model of a file, with a batch and a length for all axes and with its own."""
    symbolic = load_model(path)
    sized = sized_shapes(symbolic, known.batch, known.length)
    if known.images:
        images = [spec for spec in symbolic.inputs if len(spec.shape) == 4 and spec.name == "pixel_values"]
        symbolic = load_model(path, shapes={one.name: (one.shape[0], *sized[one.name][1:]) for one in images})
    return load_model(path, shapes=sized), symbolic


def count_forms(
    name: str, path: Path | None, target: str, known: Known
) -> tuple[str, str, Count, Count] | tuple[str, str, str]:
    """Return a model's name and target, and its counts with sizes and without, or why there are none."""
    precision = "fp16" if target.startswith("cuda") else None
    try:
        if path is not None:
            forms = exported_models(path, known)
        else:
            sizes = {axis: _SIZES[axis] for axis in MODELS[name]}
            forms = zoo_model(name, sizes), zoo_model(name, {axis: axis for axis in sizes})
        return name, target, count(forms[0], target, precision), count(forms[1], target, precision)
    except (ModelError, PipelineError) as e:
        return name, target, str(e)


def _batch_and_length(text: str) -> tuple[int, int]:
    parts = text.split("x")
    if len(parts) != 2 or not all(part.isdecimal() and int(part) for part in parts):
        raise argparse.ArgumentTypeError(f"{text!r}: expected a batch and a length, such as 64x128")
    return int(parts[0]), int(parts[1])


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("models", nargs="*", help=f"of {', '.join(MODELS)}; by default all, or none with --exports")
    parser.add_argument("--exports", type=Path, help="a folder of the matrix's files")
    parser.add_argument("--target", nargs="+", default=["llvm", "cuda:sm_90a"])
    parser.add_argument(
        "--sizes", type=_batch_and_length, default=PINNED_SIZE, help="known batch and length of exports (2x11)"
    )
    parser.add_argument("--known-images", action="store_true", help="images have sizes, their number is symbolic")
    parser.add_argument("--kernels", action="store_true", help="list the kernels that only one of the two forms has")
    parser.add_argument("--jobs", type=int, default=2, help="models at a time, a process each")
    parser.add_argument("--json", type=Path, help="where the counts go")
    args = parser.parse_args()
    files = {path.stem: path for path in sorted(args.exports.glob("*-dynamic.onnx"))} if args.exports else {}
    if args.exports and not files:
        parser.error(f"no *-dynamic.onnx in {args.exports}: `python -m tests.export.matrix --export-only` makes them")
    if unknown := sorted(set(args.models) - set(MODELS)):
        parser.error(f"no model {', '.join(unknown)}: expected some of {', '.join(MODELS)}")
    names = [*(args.models or ([] if files else MODELS)), *files]
    batch, length = args.sizes
    rows, known = [], Known(batch, length, args.known_images)
    with ProcessPoolExecutor(args.jobs, mp_context=get_context("spawn")) as pool:
        waiting = [pool.submit(count_forms, name, files.get(name), one, known) for one in args.target for name in names]
        for future in waiting:
            name, target, *found = future.result()
            if isinstance(found[0], str):
                print(f"{target:12} {name:34} not counted: {found[0].splitlines()[0][:200]}", flush=True)
                rows.append({"model": name, "target": target, "why": found[0]})
                continue
            static, symbolic = found
            print(f"{target:12} {name:34} kernels {static.kernels:3} -> {symbolic.kernels:3}", end="")
            print(f"  launches {static.launches:3} -> {symbolic.launches:3}", flush=True)
            print(f"    static:   {static.text}\n    symbolic: {symbolic.text}", flush=True)
            if args.kernels:
                for form, own, other in (("static", static, symbolic), ("symbolic", symbolic, static)):
                    print(f"    only {form}: {', '.join(sorted(set(own.names) - set(other.names)))}")
            counts = {
                form: {"kernels": one.kernels, "launches": one.launches, "made_by": dict(one.makers)}
                for form, one in (("static", static), ("symbolic", symbolic))
            }
            rows.append({"model": name, "target": target, **counts})
    if args.json:
        args.json.write_text(json.dumps({**environment(head_commit()), "models": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
