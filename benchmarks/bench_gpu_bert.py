"""A compiled BERT artifact beside torch eager in a CUDA graph, on one GPU, in one run.

    python benchmarks/bench_gpu_bert.py ARTIFACT [ARTIFACT ...] [--runs 200] [--out benchmarks/results/NAME.json]

Both arms run the same architecture, batch and sequence in float16 compute; both are timed with the host clock around
one inference plus a synchronise, alternating, after a warm-up. The artifacts are validated by `relaxtune validate`;
here only speed is compared. Needs torch and transformers beside the project.
"""

from __future__ import annotations

import argparse
import datetime
import json
import subprocess
from pathlib import Path

from models import load_model
from models.inputs import random_inputs
from pipeline.measure import OWN_ARM, Arm, measure, module_arm, run_conditions
from pipeline.runtime import Module

TORCH_ARM = "torch_graph"

# preset name -> transformers' BertConfig fields
PRESETS = {
    "bert-base": {"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12, "intermediate_size": 3072},
    "bert-large": {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 4096},
}


def torch_graph_arm(preset: str, batch: int, sequence: int) -> Arm:
    """Return a function that replays torch's eager float16 BERT (SDPA attention) captured in a CUDA graph."""
    import torch
    from transformers import BertConfig, BertModel

    torch.manual_seed(0)
    model = BertModel(BertConfig(**PRESETS[preset])).half().cuda().eval()
    ids = torch.randint(0, 30000, (batch, sequence), device="cuda")
    mask = torch.ones_like(ids)
    types = torch.zeros_like(ids)
    side = torch.cuda.Stream()
    with torch.inference_mode(), torch.cuda.stream(side):
        for _ in range(3):
            model(input_ids=ids, attention_mask=mask, token_type_ids=types)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.inference_mode(), torch.cuda.graph(graph):
        model(input_ids=ids, attention_mask=mask, token_type_ids=types)

    def run() -> None:
        graph.replay()
        torch.cuda.synchronize()

    return run


def main() -> None:
    """Time every artifact beside torch at the same shape and print medians and ratios."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("artifacts", nargs="+", type=Path)
    parser.add_argument("--preset", default="bert-base", choices=sorted(PRESETS))
    parser.add_argument("--runs", type=int, default=200)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/bench_gpu_bert.json"))
    arguments = parser.parse_args()

    results = []
    for directory in arguments.artifacts:
        module = Module.load(directory)
        batch, sequence = (int(size) for size in module.inputs[0].shape)
        shapes = {spec.name: spec.shape for spec in module.inputs}
        inputs = random_inputs(load_model(module.manifest.source, shapes=shapes), seed=0)
        arms = {
            OWN_ARM: module_arm(module, inputs),
            TORCH_ARM: torch_graph_arm(arguments.preset, batch, sequence),
        }
        report = measure(arms, runs=arguments.runs, warmup=20, conditions=run_conditions(module))
        medians = ", ".join(f"{arm.name} {arm.median_ms:.3f} ms (p95 {arm.p95_ms:.3f})" for arm in report.arms)
        print(f"{directory.name} {batch}x{sequence}: {medians}, ratio {report.ratio(TORCH_ARM):.2f}")
        results.append({"artifact": directory.name, "batch": batch, "sequence": sequence, "report": report.to_json()})

    query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    gpu = subprocess.run(query, capture_output=True, text=True, check=True).stdout.strip()
    import torch
    import tvm

    document = {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "gpu": gpu,
        "versions": {"tvm": tvm.__version__, "torch": torch.__version__, "cuda": torch.version.cuda},
        "results": results,
    }
    arguments.out.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
