"""Print the requirements of `pyproject.toml` without their upper bounds, for `make latest`; exact pins stay."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text(encoding="utf-8"))["project"]
extras = project["optional-dependencies"]
for requirement in (*project["dependencies"], *extras["dev"], *extras["cuda"]):
    print(re.sub(r",?<[^,;]*", "", requirement))
