# SPDX-License-Identifier: Apache-2.0
"""Runs of one training by several seeds lie in one folder, each an ordinary run:

OUT/seeds.json    the seeds, and the configuration that all of them share
OUT/seed-3        the run of seed 3
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Self

from ooc.errors import RunError, as_error
from ooc.storage.array import make_folders, replace_file
from ooc.suggestions import did_you_mean_path
from ooc.train.runs.run import SEEDS, Config, RunFolder, holds_run, read_config, remove_empty


class SeedRuns:
    """The folder of such runs. Make one by `create` or `open`; neither writes anything. ``start`` writes down what is
    to be trained; ``discard`` takes that back where no run has come to a checkpoint."""

    def __init__(self, path: Path, seeds: Sequence[int], config: Config) -> None:
        self.path = path
        self.seeds = tuple(seeds)
        self.config = config
        self._made: list[Path] = []

    @classmethod
    def create(cls, path: Path, seeds: Sequence[int], config: Mapping[str, object]) -> Self:
        """New runs below ``path``. RunError where something is there already."""
        if (path / SEEDS).exists():
            hint = "go on with them by resume=True, or give another folder"
            raise RunError(f"{path} holds runs of several seeds; {hint}")
        RunFolder.create(path, {})  # which refuses a folder that is in use
        return cls(path, seeds, dict(config))

    @classmethod
    def open(cls, path: Path, seeds: Sequence[int] | None = None) -> Self:
        """The runs begun at ``path``; ``seeds`` asked for now may add to those begun with."""
        file = path / SEEDS
        if holds_run(path):
            raise RunError(f"{path} is the run of one seed; give several a folder of their own")
        if not file.exists():
            raise RunError(f"there are no runs of several seeds at {path}{did_you_mean_path(path)}")
        content = read_config(file)
        try:
            begun, config = [int(seed) for seed in content["seeds"]], dict(content["config"])
        except (ValueError, KeyError, TypeError) as error:
            raise RunError(f"{file} is damaged: {error}") from error
        if seeds is not None and (dropped := sorted(set(begun) - set(seeds))):
            raise RunError(f"{path} was begun with seed {dropped[0]}, too; seeds may be added, not left out")
        return cls(path, begun if seeds is None else seeds, config)

    def run_path(self, seed: int) -> Path:
        """Where the run of ``seed`` is."""
        return self.path / f"seed-{seed}"

    @property
    def begun(self) -> list[Path]:
        """The runs that are there."""
        return [path for path in map(self.run_path, self.seeds) if holds_run(path)]

    def start(self) -> None:
        """Write down what is to be trained."""
        text = json.dumps({"seeds": list(self.seeds), "config": self.config}, indent=2, allow_nan=False) + "\n"
        with as_error(RunError, self.path):
            self._made.extend(make_folders(self.path))
            replace_file(self.path / SEEDS, text.encode())

    def discard(self) -> None:
        """Take back what ``start`` made, unless there is a run to go on with."""
        if self.begun or not self._made:
            return
        (self.path / SEEDS).unlink(missing_ok=True)
        remove_empty(self._made)


def holds_seeds(path: Path) -> bool:
    """Whether runs of several seeds were begun at ``path``."""
    return (path / SEEDS).is_file()
