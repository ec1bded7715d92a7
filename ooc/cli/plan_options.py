# SPDX-License-Identifier: Apache-2.0
"""Text that says what to plan for: ``--graph``, the budgets of ``--sweep``, and ``--hardware``'s names and files."""

import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import replace
from importlib.resources import files
from pathlib import Path
from typing import Any

from ooc.errors import HardwareError, OptionError
from ooc.plan import Hardware
from ooc.plan.graphs import KNOWN, GraphStatistics, known_graph
from ooc.sizes import parse_size

_COUNTS = ("nodes", "edges", "features", "classes")
_ENTRIES = (*_COUNTS, "labelled", "undirected", "dtype")
_DTYPES = ("float16", "float32", "float64")
_SCALES = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "b": 10**9}
_MOST = 2**40
"""Nodes, edges, features or classes: beyond all graphs there are."""
_AXES = ("gpu", "host")
_SUFFIX = ".json"


def parse_graph(text: str) -> GraphStatistics:
    """The statistics in ``text``: ``NAME``, ``NAME,labelled=…`` or ``nodes=…,edges=…,features=…,classes=…``.

    ``labelled`` up to 1 is a fraction of the nodes, above it a count; without it all nodes are. OptionError names
    what is wrong.
    """
    parts = [part.strip() for part in text.split(",")]
    known = None
    if "=" not in parts[0]:
        name = parts.pop(0)
        known = known_graph(name)
        if known is None:
            raise OptionError(
                f"--graph {name}: no such graph; known are {', '.join(KNOWN)}; "
                "or give nodes=…,edges=…,features=…,classes=…"
            )
    given: dict[str, str] = {}
    for part in parts:
        name, separator, value = part.partition("=")
        if name not in _ENTRIES or not separator:
            raise OptionError(f"--graph: {part!r} is none of {', '.join(f'{entry}=' for entry in _ENTRIES)}")
        if name in given:
            raise OptionError(f"--graph: {name} is given twice")
        given[name] = value
    missing = [name for name in _COUNTS if name not in given and known is None]
    if missing:
        raise OptionError(f"--graph: {', '.join(missing)} missing")
    changes: dict[str, Any] = {name: _count(name, given[name]) for name in _COUNTS if name in given}
    if "dtype" in given:
        changes["feature_dtype"] = given["dtype"]
        if given["dtype"] not in _DTYPES:
            raise OptionError(f"--graph: dtype={given['dtype']} is not one of {', '.join(_DTYPES)}")
    if "undirected" in given:
        changes["undirected"] = given["undirected"] == "1"
        if given["undirected"] not in ("0", "1"):
            raise OptionError(f"--graph: undirected={given['undirected']} is neither 0 nor 1")
    nodes = changes["nodes"] if "nodes" in changes or known is None else known.nodes
    if "labelled" in given:
        changes["labelled"] = _labelled(given["labelled"], nodes)
    elif "nodes" in changes:
        changes["labelled"] = nodes
    if known is None:
        return GraphStatistics(**changes, name="given", source="as given")
    if given:
        changes["source"] = f"{known.source}; given otherwise: {', '.join(given)}"
    return replace(known, **changes)


def _count(name: str, text: str) -> int:
    number = _number(text)
    if number is None or number != int(number) or not 1 <= number <= _MOST:
        raise OptionError(f"--graph: {name}={text} is no count")
    return int(number)


def _labelled(text: str, nodes: int) -> int:
    number = _number(text)
    if number is None or number <= 0 or (number > 1 and number != int(number)):
        raise OptionError(f"--graph: labelled={text} is neither a fraction up to 1 nor a count")
    labelled = max(1, int(number * nodes)) if number <= 1 else int(number)
    if labelled > nodes:
        raise OptionError(f"--graph: labelled={text} is more than the {nodes:,} nodes")
    return labelled


def _number(text: str) -> float | None:
    """``1e9``, ``1_000``, ``1.5M`` or ``0.014``."""
    match = re.fullmatch(r"(\d[\d_]*(?:\.\d+)?(?:e\d+)?)([kmgb]?)", text.lower())
    if match is None:
        return None
    plain = match[1].replace("_", "")
    scale = _SCALES[match[2]]
    return int(plain) * scale if plain.isdigit() else round(float(plain) * scale, 9)


# ---- budgets to go through --------------------------------------------------------------------------------------


def is_axis(text: str) -> bool:
    """Whether ``text`` is budgets to go through, as in ``host=64G,128G``."""
    return text.partition("=")[0] in _AXES and "=" in text


def parse_axes(texts: Iterable[str]) -> dict[str, list[int]]:
    """The budgets of ``gpu=8G,16G`` and ``host=64G,…``, in bytes, ascending; OptionError for anything else."""
    axes: dict[str, list[int]] = {}
    for text in texts:
        if not is_axis(text):
            raise OptionError(f"--sweep {text}: give gpu=8G,16G,… or host=64G,128G,…")
        axis, _, budgets = text.partition("=")
        if axis in axes:
            raise OptionError(f"--sweep: {axis}= is given twice")
        axes[axis] = sorted({parse_size(budget, name=f"--sweep {axis}") for budget in budgets.split(",")})
    return axes


# ---- machines ---------------------------------------------------------------------------------------------------


def shipped_names() -> list[str]:
    """The machines that come with ooc."""
    return sorted(file.name.removesuffix(_SUFFIX) for file in _folder() if file.name.endswith(_SUFFIX))


def load_hardware(name: str) -> Hardware:
    """The machine called ``name``, or the one that the file ``name`` describes.

    OptionError where there is neither, HardwareError naming the file and the entry that is wrong.
    """
    for file in _folder():
        if file.name == name.lower() + _SUFFIX:
            return _described(file.read_text(encoding="utf-8"), file.name)
    path = Path(name)
    if not (path.suffix or path.exists()):
        known = ", ".join(shipped_names())
        raise OptionError(f"--hardware {name}: no such machine; there are {known}; or give a file, NAME.json")
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else "it is no text"
        raise OptionError(f"--hardware {name}: {reason}") from error
    return _described(text, name)


def _described(text: str, where: str) -> Hardware:
    try:
        data = json.loads(text)
    except ValueError as error:
        raise HardwareError(f"{where}: no JSON: {error}") from error
    if not isinstance(data, dict):
        raise HardwareError(f"{where}: it holds no JSON object")
    if isinstance(data.get("hardware"), dict):  # what ooc profile --json prints
        data = data["hardware"]
    return Hardware.from_dict(data, where=where)


def _folder() -> Iterator[Any]:
    return files("ooc").joinpath("hardware").iterdir()
