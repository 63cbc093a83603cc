"""Planted secrets are looked for in all that commands write: stdout, stderr, files and rows of the database.

They are everywhere a user can give one: in a URL (as userinfo, as an option, of a dialect that is unknown, of a server
that is not there), in a plan, in the environment, in a file that signs, and in one that should.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import psycopg
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from onnx import TensorProto, helper, numpy_helper

from relaxtune.pipeline.cli.app import main
from tests.tuning_db.postgres_server import running_server

SECRETS = ("pl4nted-one", "pl4nted-two", "pl4nted-three", "pl4nted-four")
PLAN = """
database = "{url}"
out = "{out}"
samples = 1
[budget]
candidates = 2
[[cells]]
models = ["m.onnx"]
targets = ["llvm"]
"""


@pytest.fixture(scope="module")
def server():
    with running_server() as url:
        yield url


def save_matmul(path: Path) -> None:
    weight = numpy_helper.from_array(np.ones((16, 16), np.float32), "w")
    info = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [8, 16]) for name in ("x", "y")]
    graph = helper.make_graph([helper.make_node("MatMul", ["x", "w"], ["y"])], "g", info[:1], info[1:], [weight])
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9), path)


def run(*arguments: object, code: int = 0) -> None:
    with pytest.raises(SystemExit) as ended:
        main([str(argument) for argument in arguments])
    assert int(ended.value.code or 0) == code, arguments


@pytest.mark.slow
def test_no_output_holds_a_secret(server, tmp_path, capfd, monkeypatch):
    given, out = tmp_path / "given", tmp_path / "out"
    given.mkdir()
    out.mkdir()
    model, key, no_key, plan = (given / name for name in ("m.onnx", "key.pem", "no-key.pem", "plan.toml"))
    save_matmul(model)
    made = Ed25519PrivateKey.generate()
    key.write_bytes(made.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    no_key.write_text(f"-----BEGIN PRIVATE KEY-----\n{SECRETS[3]}\n-----END PRIVATE KEY-----\n")
    monkeypatch.setenv("PGPASSWORD", SECRETS[2])
    # The server of the tests asks for no password, so any is right.
    url = server.replace("postgres@", f"postgres:{SECRETS[0]}@") + f"&password={SECRETS[1]}"
    run("tune", model, "--target", "llvm", "--db", url, "--trials", 2, "--no-bench", "--verbose", "--sign", key,
        "--out", out / "a")  # fmt: skip
    run("validate", out / "a", "--db", url)
    run("bench", out / "a", "--runs", 1, "--db", url)
    run("report", out / "a", "--db", url, "--out", out / "report.html")
    for form in ("table", "json"):
        for words in (["init"], ["info"], ["upgrade"], ["query"], ["jobs"], ["failures"], ["artifacts"], ["top"],
                      ["workloads"], ["batches"], ["coverage", "m"]):  # fmt: skip
            run("db", *words, "--db", url, "--format", form)
        run("db", "merge", url, "--db", out / "own.db", "--format", form)
        run("db", "explain", model, "--target", "llvm", "--db", url, "--format", form)
    run("db", "merge", out / "own.db", "--db", url)
    run("db", "export", out / "x.archive", "--db", url)
    run("db", "init", "--db", out / "none.db")
    run("compile", model, "--target", "llvm", "--db", out / "none.db", "--shared-db", url, "--verbose",
        "--out", out / "b")  # fmt: skip
    monkeypatch.chdir(out)
    monkeypatch.setattr("relaxtune.tuning_db.sql.transactions.START_WAIT_S", 0.0)
    plan.write_text(PLAN.format(url=url, out=out / "cells"))
    for words in (["plan"], ["run"], ["status"], ["resume"]):
        run("batch", *words, plan, "--format", "json")
    run("batch", "report", plan, "--out", out / "batch.html")
    for wrong in (
        f"mysql://me:{SECRETS[0]}@host/x?password={SECRETS[1]}",
        f"postgresql://me:{SECRETS[0]}@127.0.0.1:1/x",
    ):
        run("--debug", "db", "info", "--db", wrong, code=1)
        run("db", "merge", wrong, "--db", out / "own.db", code=1)
        run("db", "upgrade", "--db", wrong, code=1)
        plan.write_text(PLAN.format(url=wrong, out=out / "cells"))
        run("batch", "run", plan, code=1)
    run("--debug", "compile", model, "--target", "llvm", "--sign", no_key, "--out", out / "c", code=2)
    captured = capfd.readouterr()
    with psycopg.connect(server) as connection:
        tables = connection.execute("SELECT tablename FROM pg_tables WHERE schemaname = 'public'").fetchall()
        rows = [connection.execute(f'SELECT * FROM "{table}"').fetchall() for (table,) in tables]
    written = {str(path): path.read_bytes() for path in out.rglob("*") if path.is_file()}
    assert "postgresql" in written[str(out / "b" / "manifest.json")].decode()
    everything = {"stdout": captured.out.encode(), "stderr": captured.err.encode(), "rows": repr(rows).encode()}
    found = [
        (where, secret)
        for where, content in (everything | written).items()
        for secret in [*map(str.encode, SECRETS), *key.read_bytes().splitlines()[1:-1], made.private_bytes_raw()]
        if secret in content
    ]
    assert found == []
