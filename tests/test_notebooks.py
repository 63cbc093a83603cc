"""Every notebook runs from its first cell to its last, and draws something; one kernel runs them all."""

from __future__ import annotations

import ast
import gc
from collections.abc import Iterator
from pathlib import Path

import jupyter_client.launcher
import nbformat
import pytest
from jupyter_client.manager import KernelManager
from nbclient import NotebookClient

from tests import warm_python

FOLDER = Path(__file__).parent.parent / "notebooks"
# The others go on with what the first one makes.
NAMES = ("quickstart", "database", "gate", "deploy", "batch")


@pytest.fixture(scope="module")
def kernel(tmp_path_factory: pytest.TempPathFactory) -> Iterator[KernelManager]:
    manager = KernelManager()
    with pytest.MonkeyPatch.context() as patch:
        # It has imported what the notebooks import, and so have the processes that they start.
        patch.setattr(jupyter_client.launcher, "Popen", warm_python.Popen)
        manager.start_kernel(cwd=str(tmp_path_factory.mktemp("notebooks")))
    yield manager
    manager.shutdown_kernel(now=True)
    del manager
    gc.collect()


def test_every_notebook_is_tested() -> None:
    assert {path.stem for path in FOLDER.glob("*.ipynb")} == set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_what_a_notebook_imports_is_there(name: str) -> None:
    cells = nbformat.read(FOLDER / f"{name}.ipynb", as_version=4).cells
    code = "\n".join(line for cell in cells if cell.cell_type == "code" for line in cell.source.splitlines())
    for node in ast.walk(ast.parse("\n".join(line for line in code.splitlines() if not line.startswith(("%", "!"))))):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            exec(ast.unparse(node), {})


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
# nbclient and pyzmq leave sockets to the garbage collector.
@pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning")
def test_notebook_runs(name: str, kernel: KernelManager) -> None:
    notebook = nbformat.read(FOLDER / f"{name}.ipynb", as_version=4)
    # No name of the notebook before is there.
    notebook.cells.insert(0, nbformat.v4.new_code_cell("%reset -f"))
    client = NotebookClient(notebook, km=kernel, timeout=300)
    client.execute()
    if client.kc is not None:
        client.kc.stop_channels()
    del client
    # In reach of the filter above.
    gc.collect()
    outputs = [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
    assert not [output for output in outputs if output.output_type == "error"]
    assert [output for output in outputs if "image/png" in output.get("data", {})]
    assert "True" in notebook.cells[2].outputs[-1]["data"]["text/plain"]


def test_notebooks_are_stored_without_outputs() -> None:
    for path in FOLDER.glob("*.ipynb"):
        cells = nbformat.read(path, as_version=4).cells
        assert all(not cell.outputs for cell in cells if cell.cell_type == "code"), path
