"""Greedy decoding by ONNX Runtime with the caches in and out: what an artifact that generates has to give."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnxruntime as ort


def greedy(model: Path | bytes, prompts: Sequence[Sequence[int]], count: int) -> list[list[int]]:
    """Return the next tokens of each prompt, all with padding on the left."""
    session = ort.InferenceSession(model)
    inputs = {one.name: one for one in session.get_inputs()}
    length = max(map(len, prompts))
    ids, mask = (np.zeros((len(prompts), length), np.int64) for _ in range(2))
    for row, prompt in enumerate(prompts):
        ids[row, length - len(prompt) :] = prompt
        mask[row, length - len(prompt) :] = 1
    caches = {
        name: np.zeros((len(prompts), one.shape[1], 0, one.shape[3]), np.float32)
        for name, one in inputs.items()
        if name.startswith("past_key_values")
    }
    found = []
    for _ in range(count):
        positions = np.maximum(mask.cumsum(1) - 1, 0)[:, -ids.shape[1] :]
        given = {"input_ids": ids, "attention_mask": mask, "position_ids": positions}
        logits, *grown = session.run(None, {**{name: given[name] for name in given if name in inputs}, **caches})
        caches = dict(zip(caches, grown, strict=True))
        ids = logits[:, -1].argmax(-1)[:, None]
        mask = np.concatenate([mask, np.ones_like(ids)], 1)
        found.append(ids[:, 0])
    return np.stack(found, 1).tolist()
