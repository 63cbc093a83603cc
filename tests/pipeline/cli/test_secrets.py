"""A planted password is looked for in all that commands write: stdout, stderr, files and rows of the database."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import psycopg
import pytest
from onnx import TensorProto, helper, numpy_helper

from relaxtune.pipeline.cli.app import main
from tests.tuning_db.postgres_server import running_server

SECRETS = ("pl4nted-one", "pl4nted-two")


@pytest.fixture(scope="module")
def server():
    with running_server() as url:
        yield url


def save_matmul(path: Path) -> None:
    weight = numpy_helper.from_array(np.ones((16, 16), np.float32), "w")
    info = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [8, 16]) for name in ("x", "y")]
    graph = helper.make_graph([helper.make_node("MatMul", ["x", "w"], ["y"])], "g", info[:1], info[1:], [weight])
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9), path)


def run(*arguments: object) -> None:
    with pytest.raises(SystemExit) as ended:
        main([str(argument) for argument in arguments])
    assert ended.value.code == 0, arguments


def test_no_output_holds_a_password_of_a_database(server, tmp_path, capfd):
    save_matmul(tmp_path / "m.onnx")
    # The server of the tests asks for no password, so any is right.
    url = server.replace("postgres@", f"postgres:{SECRETS[0]}@") + f"&password={SECRETS[1]}"
    run("tune", tmp_path / "m.onnx", "--target", "llvm", "--db", url, "--trials", 2, "--no-bench", "--verbose",
        "--out", tmp_path / "a")  # fmt: skip
    run("validate", tmp_path / "a", "--db", url)
    run("report", tmp_path / "a", "--db", url, "--out", tmp_path / "report.html")
    for form in ("table", "json"):
        for words in (["init"], ["info"], ["upgrade"], ["query"], ["jobs"], ["failures"]):
            run("db", *words, "--db", url, "--format", form)
        run("db", "merge", url, "--db", tmp_path / "own.db", "--format", form)
    run("db", "merge", tmp_path / "own.db", "--db", url)
    run("db", "export", tmp_path / "x.archive", "--db", url)
    run("db", "init", "--db", tmp_path / "none.db")
    run("compile", tmp_path / "m.onnx", "--target", "llvm", "--db", tmp_path / "none.db", "--shared-db", url,
        "--verbose", "--out", tmp_path / "b")  # fmt: skip
    captured = capfd.readouterr()
    with psycopg.connect(server) as connection:
        tables = connection.execute("SELECT tablename FROM pg_tables WHERE schemaname = 'public'").fetchall()
        rows = [connection.execute(f'SELECT * FROM "{table}"').fetchall() for (table,) in tables]
    written = {str(path): path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    assert "postgresql" in written[str(tmp_path / "b" / "manifest.json")].decode()
    everything = {"stdout": captured.out.encode(), "stderr": captured.err.encode(), "rows": repr(rows).encode()}
    found = [
        (where, secret)
        for where, content in (everything | written).items()
        for secret in SECRETS
        if secret.encode() in content
    ]
    assert found == []
