"""Signed artifacts: what the owner of a key signed loads, anything else is an `ArtifactError`."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat

from relaxtune.pipeline.artifact.directory import hash_file, load_manifest, record_validation
from relaxtune.pipeline.artifact.manifest import MANIFEST_FILE, MODULE_FILE, SIGNATURE_FILE
from relaxtune.pipeline.artifact.module import Module
from relaxtune.pipeline.artifact.signature import read_signing_key, read_verify_key, require_signature, sign_artifact
from relaxtune.pipeline.cli.app import main
from relaxtune.pipeline.errors import ArtifactError, UsageError


def private(path: Path, key: Ed25519PrivateKey | ec.EllipticCurvePrivateKey) -> Path:
    path.write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    return path


def public(path: Path, key: Ed25519PrivateKey) -> Path:
    path.write_bytes(key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo))
    return path


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Path]:
    """Return the key that signs, its public key, and the public key of another."""
    folder, key = tmp_path_factory.mktemp("keys"), Ed25519PrivateKey.generate()
    other = public(folder / "other.pub", Ed25519PrivateKey.generate())
    return private(folder / "key.pem", key), public(folder / "key.pub", key), other


@pytest.fixture
def signed(artifact: Path, tmp_path: Path, keys) -> Path:
    copy = tmp_path / "signed"
    shutil.copytree(artifact, copy)
    sign_artifact(copy, read_signing_key(keys[0]))
    return copy


def test_a_signed_artifact_loads_also_after_a_validation(signed, keys) -> None:
    record_validation(signed, {"passed": True})
    assert Module.load(signed, verify_key=keys[1]).manifest.validation == {"passed": True}
    assert Module.load(signed).manifest == load_manifest(signed)


def _unsigned(folder: Path) -> None:
    (folder / SIGNATURE_FILE).unlink()


def _damaged(folder: Path) -> None:
    (folder / SIGNATURE_FILE).write_text("no base64!")


def _short(folder: Path) -> None:
    (folder / SIGNATURE_FILE).write_text("AAAA")


def _manifest(folder: Path) -> None:
    """Write another manifest, with a hash of its own that is right."""
    from dataclasses import replace

    (folder / MANIFEST_FILE).write_text(replace(load_manifest(folder), model="another").to_json())


def _code(folder: Path) -> None:
    """Put other code in, and its hash into the manifest."""
    (folder / MODULE_FILE).write_bytes(b"other code")
    data = load_manifest(folder)
    (folder / MANIFEST_FILE).write_text(
        data.with_files({**data.files, MODULE_FILE: hash_file(folder / MODULE_FILE)}).to_json()
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_unsigned, "is not signed"),
        (_damaged, "is no signature"),
        (_short, "is not one of"),
        (_manifest, "was changed after it was signed"),
        (_code, "was changed after it was signed"),
        (lambda folder: (folder / MANIFEST_FILE).write_text("[]"), "cannot be read"),
    ],
)
def test_a_missing_or_wrong_signature_is_refused_before_anything_runs(
    signed, keys, change: Callable[[Path], None], message, monkeypatch
) -> None:
    change(signed)
    monkeypatch.setattr(
        "relaxtune.pipeline.artifact.module.load_machine", lambda *_: pytest.fail("its code was loaded")
    )
    with pytest.raises(ArtifactError, match=message):
        Module.load(signed, verify_key=keys[1])


def test_changed_code_under_a_right_signature_is_refused_though_hashes_need_not_be_checked(signed, keys) -> None:
    (signed / MODULE_FILE).write_bytes(b"other code")
    with pytest.raises(ArtifactError, match="was changed after it was written"):
        Module.load(signed, verify_key=keys[1], verify=False)


def test_a_foreign_signature_is_refused(signed, keys) -> None:
    with pytest.raises(ArtifactError, match="another key signed it"):
        require_signature(signed, keys[2])


def test_what_is_no_key_is_a_usage_error(tmp_path, keys) -> None:
    text = tmp_path / "text.pem"
    text.write_text("secret words")
    curve = private(tmp_path / "curve.pem", ec.generate_private_key(ec.SECP256R1()))
    for path, message in ((text, "is not a private key"), (curve, "is not an Ed25519 key"), (keys[1], "not a private")):
        with pytest.raises(UsageError, match=message) as raised:
            read_signing_key(path)
        assert "secret" not in str(raised.value)
    for path, message in ((keys[0], "is not a public key"), (tmp_path / "gone", "cannot be read")):
        with pytest.raises(UsageError, match=message):
            read_verify_key(path)


def test_a_missing_library_is_told(keys, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "cryptography", None)
    with pytest.raises(UsageError, match=r"needs the library cryptography: pip install 'relaxtune\[sign\]'"):
        read_signing_key(keys[0])


def run(*words: object) -> int:
    with pytest.raises(SystemExit) as ended:
        main([str(word) for word in words])
    return int(ended.value.code or 0)


def test_commands_sign_and_verify(tmp_path, keys, monkeypatch, capsys) -> None:
    model, out, inputs = tmp_path / "m.onnx", tmp_path / "out", tmp_path / "x.npz"
    text = '<ir_version: 10, opset_import: ["" : 20]> g (float[4] x) => (float[4] y) { y = Relu(x) }'
    onnx.save(onnx.parser.parse_model(text), model)
    np.savez(inputs, x=np.ones(4, np.float32))
    assert run("compile", model, "--target", "llvm", "--out", out, "--sign", keys[1]) == 2
    assert not out.exists()
    signing = ["--sign", keys[0], "--samples", 1, "--db", tmp_path / "own.db", "--record"]
    assert run("db", "init", "--db", tmp_path / "own.db") == 0
    assert run("--verbose", "compile", model, "--target", "llvm", "--out", out, *signing) == 0
    told, secret = capsys.readouterr(), keys[0].read_text().splitlines()[1]
    written = b"".join(path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())
    assert secret not in told.out + told.err
    assert secret.encode() not in written
    assert json.loads((out / MANIFEST_FILE).read_text())["validation"]["passed"]
    words = ["run", out, "--inputs", inputs, "--outputs", tmp_path / "y.npz"]
    assert run(*words, "--verify-key", keys[1]) == 0
    loading = [words, ["validate", out], ["bench", out, "--runs", 1], ["compare", out, out], ["report", out]]
    monkeypatch.setenv("RELAXTUNE_VERIFY_KEY", str(keys[2]))
    for command in loading:
        capsys.readouterr()
        assert run(*command) == 1
        assert "another key signed it" in " ".join(capsys.readouterr().err.split())
