"""The tokenizer of a model, and the tokens that end its texts; both are files that an artifact may carry."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from relaxtune.models.spec import GENERATION_FILE, TOKENIZER_FILE
from relaxtune.pipeline.errors import UsageError


def artifact_tokenizer(directory: Path, otherwise: str = "") -> Any:
    """Return the tokenizer that an artifact carries; `otherwise` is a remedy more where it carries none.

    Raises `UsageError`: it carries none, or it cannot be read.
    """
    path = directory / TOKENIZER_FILE
    if not path.is_file():
        raise UsageError(
            f"the artifact {directory} carries no {TOKENIZER_FILE}; put the model's beside its .onnx file and compile "
            f"it again, or compile the model's folder{otherwise}"
        )
    return read_tokenizer(path)


def read_tokenizer(path: Path) -> Any:
    """Return the `tokenizers.Tokenizer` of a tokenizer.json.

    Raises `UsageError`: the package tokenizers is not installed, or the file is none.
    """
    try:
        from tokenizers import Tokenizer
    except ImportError as e:
        raise UsageError(f"{path} needs the package tokenizers: pip install 'relaxtune[tokenizer]'") from e
    try:
        return Tokenizer.from_file(str(path))
    except Exception as e:  # the library raises no class of its own
        raise UsageError(f"{path} cannot be read as a {TOKENIZER_FILE}: {e}") from e


def end_tokens(directory: Path) -> list[int]:
    """Return the tokens that end a text, as the generation_config.json of an artifact names them; none without one."""
    path = directory / GENERATION_FILE
    if not path.is_file():
        return []
    try:
        ends = json.loads(path.read_text(encoding="utf-8")).get("eos_token_id")
    except (OSError, ValueError, AttributeError) as e:
        raise UsageError(f"{path} cannot be read: {e}; name the tokens that end a text with --stop") from e
    return ends if isinstance(ends, list) else [] if ends is None else [ends]
