# SPDX-License-Identifier: Apache-2.0
"""A picture of what ``ooc plan --what-if`` finds: seconds an epoch by memory, a line for every host memory and SSD."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

SUFFIXES = (".svg", ".png")
_DASHES = ("-", "--", ":", "-.")
_COLOURS = ("#1b6ca8", "#d1495b", "#2e8b57", "#8e6bbf", "#c98b1b", "#5b6770")
"""Told apart by people who see red and green alike, too; the last is the commonest."""


def draw(cells: Sequence[dict[str, Any]], path: Path, *, title: str) -> None:
    """Points of the Pareto front are ringed; what does not fit has a cross at the upper edge."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    across = "memory" if "memory" in cells[0] else "gpu"
    places = list(dict.fromkeys(cell[across] for cell in cells))
    hosts = list(dict.fromkeys(cell.get("host", "") for cell in cells))
    ssds = list(dict.fromkeys(cell["ssd"] for cell in cells))
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "ooc", "font.family": "sans-serif", "font.size": 10}):
        figure = Figure(figsize=(8, 4.8), layout="constrained")
        axes = figure.subplots()
        longest = max((cell["epoch_s"] for cell in cells if cell["feasible"]), default=1.0)
        for number, (host, ssd) in enumerate((host, ssd) for host in hosts for ssd in ssds):
            line = [cell for cell in cells if (cell.get("host", ""), cell["ssd"]) == (host, ssd)]
            colour = _COLOURS[hosts.index(host) % len(_COLOURS)]
            there = [cell for cell in line if cell["feasible"]]
            label = ", ".join(filter(None, (host, f"SSD {ssd}")))
            axes.plot(
                [places.index(cell[across]) for cell in there],
                [cell["epoch_s"] for cell in there],
                _DASHES[ssds.index(ssd) % len(_DASHES)],
                color=colour,
                marker="o",
                markersize=4,
                label=label,
                zorder=2 + number / 100,
            )
            best = [cell for cell in there if cell["pareto"]]
            at = [places.index(cell[across]) for cell in best]
            axes.scatter(at, [cell["epoch_s"] for cell in best], s=90, facecolors="none", edgecolors=colour, zorder=4)
            lacking = [places.index(cell[across]) for cell in line if not cell["feasible"]]
            axes.scatter(lacking, [1.12 * longest] * len(lacking), marker="x", color=colour, s=30, clip_on=False)
        axes.set_xticks(range(len(places)), places)
        axes.set_xlim(-0.4, len(places) - 0.6)
        axes.set_ylim(0, 1.18 * longest)
        axes.set_ylabel("seconds an epoch (forecast)")
        axes.set_xlabel("memory" if across == "memory" else "GPU")
        axes.set_title(title, loc="left", fontsize=11)
        axes.grid(axis="y", color="#d8dce0", linewidth=0.8)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False, fontsize=9, title="ringed: Pareto front; ×: too small", title_fontsize=9)
        # The same points give the same file.
        figure.savefig(path, dpi=150, metadata={"Date": None} if path.suffix == ".svg" else None)
