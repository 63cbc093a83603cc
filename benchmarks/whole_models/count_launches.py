"""Count the GPU kernels that one inference launches, in each layer and outside the layers; nothing is run.

    python -m benchmarks.whole_models.count_launches [MODEL ...] [--target cuda:sm_90a]

Each model is lowered for the target with two and with three layers of its full width, its kernels made by defaults of
templates and fallback schedules. `before` is without the passes that `PASSES` names and without templates.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import onnx

from relaxtune.models import OnnxModel
from relaxtune.models.inference import check_and_infer
from relaxtune.models.loading import make_model
from relaxtune.models.zoo.bert import build_bert
from relaxtune.models.zoo.gpt2 import build_gpt2
from relaxtune.models.zoo.graph import Dim, Precision
from relaxtune.models.zoo.llama import build_llama
from relaxtune.models.zoo.presets import get_preset
from relaxtune.models.zoo.t5 import build_t5
from relaxtune.models.zoo.vit import build_vit
from relaxtune.pipeline.artifact.compile import apply_choices
from relaxtune.pipeline.choose.selection import select_kernels
from relaxtune.pipeline.environment import detect_environment
from relaxtune.pipeline.importer import import_model
from relaxtune.pipeline.passes import LoweringOptions, lower
from relaxtune.pipeline.tasks.extract import extract_tasks
from relaxtune.pipeline.tasks.routes import DEFAULT_ROUTES
from relaxtune.schedules.fallback import apply_fallback
from relaxtune.schedules.gpu.binding import count_launches
from relaxtune.schedules.targets import ResolvedTarget, resolve_target
from relaxtune.tuning_db.records import Route

PASSES = frozenset(
    {
        *("recognise_attention", "recognise_rotary", "append_in_attention", "append_caches", "unflatten_matmuls"),
        *("norms_of_half", "gather_rows", "interleave_gates", "rotate_in_matmul", "fuse_norms"),
    }
)
# A vocabulary is as wide as it is without changing a kernel's form; this one keeps the weights small.
VOCABULARY = 1024


@dataclass(frozen=True)
class Case:
    """A zoo model at one shape; `preset` gives its sizes."""

    preset: str
    dims: Mapping[str, Dim]
    precision: Precision

    def model(self, layers: int) -> OnnxModel:
        """Return it with some layers."""
        config = replace(get_preset(self.preset).config, layers=layers)  # type: ignore[type-var]
        if hasattr(config, "vocab"):
            config = replace(config, vocab=VOCABULARY)
        build, options = BUILDERS[self.preset.split("-")[0]], {"decode": True} if "decode" in self.preset else {}
        proto = build(self.preset, config, dict(self.dims), self.precision, 0, **options)
        check_and_infer(proto)
        return make_model(self.preset, proto, path=None, data_dir=None, seed=0)


BUILDERS: Mapping[str, Callable[..., onnx.ModelProto]] = {
    "bert": build_bert,
    "gpt2": build_gpt2,
    "llama": build_llama,
    "vit": build_vit,
    "t5": build_t5,
}

_PREFILL: Mapping[str, Dim] = {"batch": 1, "sequence": 128}
_DECODE: Mapping[str, Dim] = {"batch": 1, "past_sequence": 1023}

CASES = {
    "bert-base 1x128": Case("bert-base", _PREFILL, Precision.FP32),
    "gpt2-small 1x128": Case("gpt2-small", _PREFILL, Precision.FP32),
    "llama-1b 1x128": Case("llama-1b", _PREFILL, Precision.FP32),
    "vit-base 8x224": Case("vit-base", {"batch": 8}, Precision.FP32),
    "t5-small 1x128": Case("t5-small", _PREFILL, Precision.FP32),
    "gpt2-small fp16 graph": Case("gpt2-small", _PREFILL, Precision.FP16),
    "llama-1b fp16 graph": Case("llama-1b", _PREFILL, Precision.FP16),
    "gpt2-small decode fp16, cache 1024": Case("gpt2-small-decode", _DECODE, Precision.FP16),
    "llama-1b decode fp16, cache 1024": Case("llama-1b-decode", _DECODE, Precision.FP16),
}


def launches(model: OnnxModel, precision: str | None, target: ResolvedTarget, *, before: bool) -> int:
    """Return the kernels that one inference launches."""
    options = LoweringOptions(precision=precision, disabled_passes=PASSES if before else frozenset())
    lowered = lower(import_model(model), target.target, options)
    choices = select_kernels(
        lowered,
        extract_tasks([lowered]),
        database=None,
        target=target,
        environment=detect_environment(target),
        routes=DEFAULT_ROUTES - {Route.TEMPLATE} if before else DEFAULT_ROUTES,
    )
    mod = apply_fallback(apply_choices(lowered.mod, choices), target.target)
    return sum(count_launches(mod[name]) * len(calls) for name, calls in lowered.kernels.items())


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("models", nargs="*", default=list(CASES), help=f"of {', '.join(CASES)}")
    parser.add_argument("--target", default="cuda:sm_90a")
    args = parser.parse_args()
    target = resolve_target(args.target)
    print(f"{'model':36} {'a layer':>8} {'before':>8} {'outside':>8} {'before':>8}")
    for name in args.models:
        case = CASES[name]
        precision = "fp16" if case.precision is Precision.FP32 else None
        counts = {}
        for before in (False, True):
            two, three = (launches(case.model(layers), precision, target, before=before) for layers in (2, 3))
            counts[before] = (three - two, 3 * two - 2 * three)
        columns = (counts[False][0], counts[True][0], counts[False][1], counts[True][1])
        print(f"{name:36} {' '.join(f'{column:8}' for column in columns)}", flush=True)


if __name__ == "__main__":
    main()
