# SPDX-License-Identifier: Apache-2.0
"""A hook of mkdocs: pages of the documentation site that are written elsewhere in the checkout.

README.md is the first page and CHANGELOG.md one of its own, with links as they are from docs/; the scripts in
examples/ and what Python programs call (docstrings) have a page each.
"""

import json
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

import ooc

CHECKOUT = Path(__file__).parents[1]
_LINK = re.compile(r"\]\((?!\w+:)([^)#]+)(#[^)]*)?\)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages."""
    pages = {
        "index.md": _from_the_checkout("README.md"),
        "changelog.md": _from_the_checkout("CHANGELOG.md"),
        "examples.md": _examples(),
        "reference.md": _reference(),
    }
    for name, text in pages.items():
        files.append(File.generated(config, name, content=text))
    return files


def _from_the_checkout(name: str) -> str:
    """A page whose links are as seen from the checkout's root."""

    def link(found: re.Match[str]) -> str:
        target, heading = found[1], found[2] or ""
        moved = {"CHANGELOG.md": "changelog.md", "README.md": "index.md"}.get(target, target.removeprefix("docs/"))
        return f"]({'examples.md' if target.startswith('examples') else moved}{heading})"

    return _LINK.sub(link, (CHECKOUT / name).read_text(encoding="utf-8"))


def _examples() -> str:
    parts = ["# Examples\n"]
    for path in sorted((CHECKOUT / "examples").glob("*.py")):
        parts.append(f"## {path.name}\n\n```python\n{path.read_text(encoding='utf-8')}```\n")
    for path in sorted((CHECKOUT / "examples").glob("*.ipynb")):
        parts.append(f"## {path.name}\n")
        for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
            source = "".join(cell["source"])
            # A notebook's own headings stand below that of its name.
            plain = cell["cell_type"] == "markdown"
            parts.append(f"{re.sub('^#', '###', source)}\n" if plain else f"```python\n{source}\n```\n")
    return "\n".join(parts)


def _reference() -> str:
    """What ``dir(ooc)`` shows, under the names of the modules that hold it."""
    parts = ["# Reference for Python\n", "What `import ooc` gives, under the modules that hold it.\n"]
    for name in sorted(dir(ooc), key=lambda name: (name.endswith("Error"), name)):
        home = getattr(ooc, name)
        if not name.startswith("_"):
            parts.append(f"::: {home.__module__}.{home.__qualname__}\n")
    return "\n".join(parts)
