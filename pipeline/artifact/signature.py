"""Signatures of artifacts: Ed25519, over the manifest, which holds the sha256 of every other file.

::

    openssl genpkey -algorithm ed25519 -out key.pem     the key that signs; keep it
    openssl pkey -in key.pem -pubout -out key.pub       the key that verifies; hand it out

The signature lies beside the manifest, in `manifest.sig`. It covers all of the manifest but the result of the
validation, which `relaxtune validate` writes anew.
"""

from __future__ import annotations

import base64
import binascii
import json
from pathlib import Path
from typing import TYPE_CHECKING

from relaxtune.pipeline.artifact.manifest import MANIFEST_FILE, SIGNATURE_FILE
from relaxtune.pipeline.errors import ArtifactError, UsageError

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

_INSTALL = "pip install 'relaxtune[sign]'"
# Written after signing.
_NOT_SIGNED = frozenset({"validation", "manifest_sha256"})


def read_signing_key(path: Path) -> Ed25519PrivateKey:
    """Return the private key of a PEM file.

    Raises `UsageError`: the file is no such key, or the library `cryptography` is missing.
    """
    data = _read_key(path, "--sign")
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    from cryptography.hazmat.primitives.serialization import load_pem_private_key

    try:
        key = load_pem_private_key(data, None)
    except (ValueError, TypeError, UnsupportedAlgorithm):
        # Without its cause, which may quote the file.
        raise UsageError(f"--sign {path} is not a private key in PEM without a passphrase") from None
    if not isinstance(key, Ed25519PrivateKey):
        raise UsageError(f"--sign {path} is not an Ed25519 key; make one: openssl genpkey -algorithm ed25519 -out KEY")
    return key


def read_verify_key(path: Path) -> Ed25519PublicKey:
    """Return the public key of a PEM file; see `read_signing_key`."""
    data = _read_key(path, "--verify-key")
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
    from cryptography.hazmat.primitives.serialization import load_pem_public_key

    try:
        key = load_pem_public_key(data)
    except (ValueError, UnsupportedAlgorithm) as e:
        raise UsageError(f"--verify-key {path} is not a public key in PEM, as `openssl pkey -pubout` writes it") from e
    if not isinstance(key, Ed25519PublicKey):
        raise UsageError(f"--verify-key {path} is not an Ed25519 key")
    return key


def sign_artifact(directory: Path, key: Ed25519PrivateKey) -> None:
    """Write the signature of an artifact, in place of an earlier one.

    Raises `ArtifactError`: it cannot be written.
    """
    signature = key.sign(_signed(directory))
    try:
        (directory / SIGNATURE_FILE).write_text(base64.b64encode(signature).decode() + "\n", encoding="ascii")
    except OSError as e:
        raise ArtifactError(f"{directory / SIGNATURE_FILE} cannot be written: {e.strerror or e}") from e


def require_signature(directory: Path, verify_key: Path) -> None:
    """Check that the owner of a key signed an artifact's manifest.

    Raises `ArtifactError`: the artifact is not signed, or by another key, or was changed since; `UsageError`:
    `verify_key` is no public key.
    """
    from cryptography.exceptions import InvalidSignature

    key = read_verify_key(verify_key)
    content = _signed(directory)
    try:
        signature = base64.b64decode((directory / SIGNATURE_FILE).read_text(encoding="ascii").strip(), validate=True)
    except FileNotFoundError as e:
        raise ArtifactError(
            f"artifact {directory} is not signed (it has no {SIGNATURE_FILE}), and a signature of {verify_key} is "
            "required; compile it again with `--sign KEY`"
        ) from e
    except (OSError, UnicodeDecodeError, binascii.Error) as e:
        raise ArtifactError(f"{directory / SIGNATURE_FILE} is no signature ({e}); copy the artifact again") from e
    try:
        key.verify(signature, content)
    except InvalidSignature as e:
        raise ArtifactError(
            f"the signature of artifact {directory} is not one of {verify_key}: the artifact was changed after it was "
            "signed, or another key signed it. Do not load it; ask its author for the artifact or the key"
        ) from e


def _read_key(path: Path, option: str) -> bytes:
    """Return a key's file, for a library that is there."""
    try:
        import cryptography  # noqa: F401

        return path.read_bytes()
    except ModuleNotFoundError as e:
        raise UsageError(f"{option} {path} needs the library cryptography: {_INSTALL}") from e
    except OSError as e:
        raise UsageError(f"{option} {path} cannot be read: {e.strerror or e}") from e


def _signed(directory: Path) -> bytes:
    """Return what is signed of a manifest: its data in one spelling, whatever the file's."""
    path = directory / MANIFEST_FILE
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        kept = {name: value for name, value in data.items() if name not in _NOT_SIGNED}
        return json.dumps(kept, sort_keys=True, separators=(",", ":"), ensure_ascii=True).encode()
    except (OSError, ValueError, AttributeError, RecursionError) as e:
        raise ArtifactError(f"{path} cannot be read ({e}); the artifact is damaged, compile it again") from e
