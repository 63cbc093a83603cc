"""`SentenceEncoder`: an artifact as a module of sentence-transformers. Needs sentence-transformers 6."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

try:
    import torch
    from sentence_transformers.base.modules import InputModule
except ImportError as e:
    raise ImportError("SentenceEncoder needs sentence-transformers: pip install 'sentence-transformers>=6'") from e

from relaxtune.loading import load
from relaxtune.pipeline.artifact.directory import copy_artifact


class SentenceEncoder(InputModule):  # type: ignore[misc]  # no type information
    """Runs an artifact inside `SentenceTransformer(modules=[SentenceEncoder(DIR)])`; it cannot be trained."""

    save_in_root = False

    def __init__(self, directory: str | Path, threads: int | None = None) -> None:
        """Load the artifact; `threads` and errors are those of `relaxtune.load` and `Module.embed`."""
        super().__init__()
        self.directory, self.threads = Path(directory), threads
        self._embedder = load(directory, threads=threads).embedder

    @property
    def max_seq_length(self) -> int | None:
        """The most tokens of a text."""
        return self._embedder.max_tokens

    def get_embedding_dimension(self) -> int:
        """Return the length of a vector."""
        return self._embedder.width

    def preprocess(self, inputs: Sequence[str], prompt: str | None = None, **_: Any) -> dict[str, torch.Tensor]:
        """Return token ids, mask and types of texts, each with `prompt` in front."""
        arrays = self._embedder.tokenise([(prompt or "") + text for text in inputs])
        return {name: torch.from_numpy(array) for name, array in arrays.items()}

    def forward(self, features: dict[str, Any], **_: Any) -> dict[str, Any]:
        """Return the features with `sentence_embedding` added."""
        arrays = {name: tensor.cpu().numpy() for name, tensor in features.items() if isinstance(tensor, torch.Tensor)}
        vectors = torch.from_numpy(self._embedder.run(arrays))
        return {**features, "sentence_embedding": vectors.to(features["input_ids"].device)}

    def save(self, output_path: str, *_: Any, **__: Any) -> None:
        """Copy the artifact."""
        copy_artifact(self.directory, Path(output_path))

    @classmethod
    def load(cls, model_name_or_path: str, subfolder: str = "", **_: Any) -> Self:
        """Return the encoder that `save` wrote."""
        return cls(Path(model_name_or_path) / subfolder)

    def __reduce__(self) -> tuple[type[Self], tuple[Path, int | None]]:
        """Load again in another process: code cannot be copied there."""
        return type(self), (self.directory, self.threads)
