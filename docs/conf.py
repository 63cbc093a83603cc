"""The documentation as a site: `make docs`. Its pages are the Markdown files; the reference is made from the code."""

from __future__ import annotations

import inspect
from pathlib import Path

from sphinx.application import Sphinx
from typer.cli import get_docs_for_click
from typer.main import get_command

import relaxtune
from relaxtune.pipeline.cli.app import app as command_line
from relaxtune.pipeline.passes.order import lowering_steps

project = "relaxtune"
author = "The relaxtune authors"
release = relaxtune.__version__
extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
# The root of the project is the source: links between its folders are links of the site.
include_patterns = ["*.md", "docs/**", "notebooks/*.ipynb", "benchmarks/README.md", "benchmarks/results/*.md"]
exclude_patterns = [".*", "out", "build"]
root_doc = "docs/site"
html_theme = "furo"
nb_execution_mode = "off"  # the tests execute the notebooks
myst_heading_anchors = 4
autodoc_typehints = "none"  # the signature has them
autodoc_preserve_defaults = True
napoleon_google_docstring = False


def _commands() -> str:
    command = get_command(command_line)
    with command.make_context("relaxtune", [], resilient_parsing=True) as context:
        return get_docs_for_click(obj=command, ctx=context, name="relaxtune", title="Commands and options")


def _api() -> str:
    lines = ["# Python API", "", "```{eval-rst}"]
    for name in relaxtune.__all__:
        one = getattr(relaxtune, name)
        kind = "autoclass" if inspect.isclass(one) else "autofunction" if callable(one) else "autodata"
        lines += [f".. {kind}:: relaxtune.{name}", *([] if kind != "autoclass" else ["   :members:"]), ""]
    return "\n".join([*lines, "```", ""])


def _passes() -> str:
    rows = []
    for step in lowering_steps():
        words = (inspect.getdoc(step.run) or "").split("\n\n")[0].replace("\n", " ").replace("|", "\\|")
        what = "of TVM" if words.startswith(("Return a pass", "Run")) or not words else words
        switch = f"required: {step.required}" if step.required else "yes"
        rows.append(f"| {step.phase.value} | `{step.name}` | {what} | {switch} |")
    head = "# Passes\n\nIn the order in which they run. `--set disable-pass=NAME` switches one off.\n\n"
    return head + "| phase | name | what it does | off switch |\n|---|---|---|---|\n" + "\n".join(rows) + "\n"


def _write_reference(app: Sphinx) -> None:
    folder = Path(app.srcdir) / "docs" / "reference"
    folder.mkdir(exist_ok=True)
    for name, text in (("commands", _commands()), ("api", _api()), ("passes", _passes())):
        page = folder / f"{name}.md"
        if not page.exists() or page.read_text() != text:
            page.write_text(text)


def setup(app: Sphinx) -> None:
    """Write the pages of the reference before the others are read."""
    app.connect("builder-inited", _write_reference)
