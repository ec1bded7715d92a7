# SPDX-License-Identifier: Apache-2.0
"""The folder of a training run: all that is needed to look at the run afterwards and to resume it.

    RUN/config.json      every option that decides the results, and some that do not
    RUN/config.toml      the same for ``ooc train --config``, which repeats the run (only for runs begun by it)
    RUN/plan.json        what the plan promised (``ooc plan --compare``)
    RUN/planned.json     one epoch as planned, in the form of timeline.json
    RUN/timeline.json    one epoch as measured (``ooc report``)
    RUN/starts.jsonl     one object per start: the command, the machine, the versions
    RUN/metrics.jsonl    one object per epoch (`EpochRecord`)
    RUN/checkpoint.pt    the state after the last finished epoch, with the lines of metrics.jsonl before it
    RUN/best.pt          the weights of the epoch with the best validation score
    RUN/embedding/       versions of a trained embedding; the two states name theirs
    RUN/optimizer/       versions of optimizer state that is kept on the SSD; the checkpoint names its own

Every file except the metrics and those in folders is replaced as a whole (temporary file, fsync, rename). A process
killed at any moment therefore leaves the previous version. The metrics are appended to; after a kill they may end in a
torn line, or have fewer or more lines than the checkpoint knows of. `RunFolder.load` repairs that from the checkpoint's
copy, which has everything but the passes. The states are zip files, whose checksums are verified when they are read.

Not thread-safe: one thread owns a run folder, and a lock keeps other processes out of it.
"""

import contextlib
import copy
import fcntl
import io
import json
import os
import shutil
import zipfile
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Self
from zlib import crc32

from ooc.engine.record import EpochRecord
from ooc.errors import RunError, as_error
from ooc.storage.array import TEMPORARY_SUFFIX, flush, lock_folder, lock_holder, make_folders, replace_file
from ooc.suggestions import did_you_mean_path

if TYPE_CHECKING:
    from ooc.storage.store import Store

CONFIG = "config.json"
REPEATED_BY = "config.toml"
METRICS = "metrics.jsonl"
CHECKPOINT = "checkpoint.pt"
BEST = "best.pt"
FORECAST = "plan.json"
PLANNED = "planned.json"
TIMELINE = "timeline.json"
STARTS = "starts.jsonl"
EMBEDDING = "embedding"
OPTIMIZER = "optimizer"
SEEDS = "seeds.json"
"""The file, in the folder around the runs of several seeds, that has the seeds and the common options
(``SeedRuns``)."""
_MOST_STARTS = 50
_HISTORY = "history"
"""The key, in a checkpoint, of the earlier epochs' records, from which lost lines of the metrics are written again."""

Config = dict[str, Any]
State = dict[str, Any]


class RunFolder:
    """The folder of one training run. Make one by `create` or `open`; neither writes anything.

    `start` writes the configuration and takes the lock. Saving and appending call it too, but calling it before
    training finds an unwritable folder while nothing is lost; `discard` undoes it. `close` releases the lock; the
    object is also a context manager. With ``written`` false, another process of the same training writes the folder,
    and this one changes nothing.
    """

    def __init__(self, path: Path, config: Config, *, resumed: bool, written: bool = True) -> None:
        self.path = path
        self._written = written
        self.config = config
        self.resumed = resumed
        self._lock: int | None = None
        self.repeated_by: str | None = None
        """The content of ``config.toml``."""
        self.started = False
        """Whether this object has written to the folder."""
        self._history: dict[int, dict[str, Any]] = {}
        self._made: list[Path] = []

    @classmethod
    def create(cls, path: str | Path, config: Mapping[str, Any]) -> Self:
        """Return a new run at ``path``; raise RunError when something is there already."""
        path = Path(path)
        if holds_run(path):
            raise RunError(f"{path} holds a run already; go on with it by resume=True, or give another folder")
        if _is_occupied(path):
            raise RunError(f"{path} exists and is no run; give another folder")
        return cls(path, dict(config), resumed=False)

    @classmethod
    def open(
        cls,
        path: str | Path,
        *,
        given: Mapping[str, Any] | None = None,
        changeable: Collection[str] = (),
        defaults: Mapping[str, Any] | None = None,
    ) -> Self:
        """Return the run begun at ``path``, to be resumed.

        ``given`` are the options asked for now. One that differs from the run's raises RunError naming it, unless it is
        ``changeable``; then it replaces the run's from now on. ``defaults`` hold where the run's configuration has no
        value.
        """
        path = Path(path)
        if not holds_run(path):
            seeds = sorted(path.glob("seed-*")) if holds_seeds(path) else []
            hint = f"; it holds those of several seeds, such as {seeds[0]}" if seeds else did_you_mean_path(path)
            raise RunError(f"there is no run at {path}{hint}")
        config = {**(defaults or {}), **read_config(path / CONFIG)}
        return cls(path, updated_config(path, config, given or {}, changeable), resumed=True)

    def followed(self) -> "RunFolder":
        """Return this run for a process that only reads it, while another process of the training writes it."""
        return RunFolder(self.path, self.config, resumed=self.resumed, written=False)

    @property
    def has_checkpoint(self) -> bool:
        """Whether an epoch of the run was finished."""
        return (self.path / CHECKPOINT).exists()

    @property
    def changed_s(self) -> float:
        """The time of the last change to the run, in seconds since 1970."""
        files = (self.path / name for name in (CONFIG, METRICS, CHECKPOINT))
        return max(file.stat().st_mtime for file in files if file.exists())

    def start(self) -> None:
        """Make the folder, lock it and write its configuration; do nothing if it is locked by this object already.

        Raises RunError when the folder cannot be written or another process is using it.
        """
        if self._lock is not None or not self._written:
            return
        with as_error(RunError, self.path):
            self._made.extend(make_folders(self.path))
            try:
                self._lock = lock_folder(self.path)
            except BlockingIOError:
                where = f"{lock_holder(self.path)} is using the run at {self.path}"
                raise RunError(f"another process{where}; give another folder") from None
        try:
            if not (self.resumed or self.started) and holds_run(self.path):  # another process has made it meanwhile
                raise RunError(f"{self.path} holds a run already; give resume=True to go on with it")
            self.started = True
            torn = self.path / f"{TIMELINE}{TEMPORARY_SUFFIX}"  # left by a killed process, perhaps in its last epoch
            torn.unlink(missing_ok=True)
            self.write(CONFIG, self.config)
            if self.repeated_by is not None:
                self._replace(REPEATED_BY, self.repeated_by.encode(errors="surrogateescape"))
        except BaseException:
            self.close()
            raise

    def check_store(self, store: "Store") -> None:
        """Record which store the run uses; raise RunError if it was begun on another one.

        In a process that writes no run, the store is compared with the first process's.
        """
        if not self._written:
            return
        names = ("num_nodes", "num_edges", "num_features", "num_classes", "source", "created")
        identity = {name: store.attributes[name] for name in names}
        others = {"num_edge_features": store.num_edge_features, "num_graphs": store.num_graphs}
        identity |= {name: number for name, number in others.items() if number}
        if store.types is not None:
            identity |= store.types.attributes()
        if self.config.setdefault("store_facts", identity) != identity:
            raise RunError(f"{self.path} was trained on another store than {store.path}")

    def check_contents(self, store: "Store") -> None:
        """Record what the training's store holds; raise RunError if the run was begun on other contents."""
        if not self._written:
            return
        contents = crc32(json.dumps(store.fingerprint(), sort_keys=True).encode())
        if self.config.setdefault("contents", contents) != contents:
            raise RunError(f"{self.path} was trained on another store than {store.path}, or on it as it was before")

    def discard(self) -> None:
        """Undo `start`, unless there is a checkpoint to resume from.

        Where files cannot be removed, the run stays without an epoch and may be resumed.
        """
        if self.resumed or self.has_checkpoint or not self._written:
            return
        if self.started:
            for folder in (self.path / EMBEDDING, self.path / OPTIMIZER):
                shutil.rmtree(folder, ignore_errors=True)
                if folder.exists():
                    return self.close()
            for name in (BEST, METRICS, FORECAST, PLANNED, TIMELINE, STARTS, REPEATED_BY, CONFIG):
                (self.path / name).unlink(missing_ok=True)
        remove_empty_folders(self._made)
        self.close()

    def save(self, state: State) -> None:
        """Replace the checkpoint by ``state``: tensors, numbers, strings, and lists and dicts of them.

        ``state["epoch"]`` and ``state["record"]`` (an EpochRecord as dict) must be those of the epoch just finished;
        `load` uses them to repair the metrics.
        """
        before = [values for epoch, values in self._history.items() if epoch < state["epoch"]]
        self._replace(CHECKPOINT, lambda file: _write_state(file, {**state, _HISTORY: before}))

    def save_best(self, state: State) -> None:
        """Replace the weights of the best epoch."""
        self._replace(BEST, lambda file: _write_state(file, state))

    def write(self, name: str, content: Mapping[str, Any]) -> None:
        """Replace one of the files `FORECAST`, `PLANNED` and `TIMELINE` by plain data."""
        form: dict[str, Any] = {"separators": (",", ":")} if name in (PLANNED, TIMELINE) else {"indent": 2}
        self._replace(name, (json.dumps(content, allow_nan=False, **form) + "\n").encode())

    def read(self, name: str) -> dict[str, Any] | None:
        """Return what was last written to one of these files; None if nothing was."""
        path = self.path / name
        return read_config(path) if path.exists() else None

    def add_start(self, start: Mapping[str, Any]) -> None:
        """Record how the training was started or resumed, as plain data; the first start and the latest ones are
        kept."""
        known = self.starts()
        kept = [*known[:1], *known[1:][2 - _MOST_STARTS :], start]
        text = "".join(json.dumps(one, allow_nan=False) + "\n" for one in kept)
        self._replace(STARTS, text.encode())

    def starts(self) -> list[dict[str, Any]]:
        """Return what `add_start` has recorded; empty for a run that was trained from Python."""
        path = self.path / STARTS
        if not path.exists():
            return []
        with as_error(RunError, path):
            lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
        try:
            found = [json.loads(line) for line in lines]
        except ValueError as error:
            raise RunError(f"{path} is damaged: {error}") from error
        return [one for one in found if isinstance(one, dict)]

    def append(self, record: EpochRecord) -> None:
        """Append an epoch's line to the metrics."""
        self.start()
        if not self._written:
            return
        path = self.path / METRICS
        with as_error(RunError, path), path.open("a", encoding="utf-8") as file:
            file.write(record.to_line())
        self._remember(record)

    def load(self, check: Callable[[State], None] = lambda state: None) -> State | None:
        """Return the last checkpoint, None before the first; cut or complete the metrics to match it.

        ``check`` may refuse the checkpoint before anything is changed.
        """
        self.start()
        state = self.last()
        if state is not None:
            check(state)
        if not self._written:
            return state
        kept = [] if state is None else self._repaired_records(state)
        self._history.clear()
        for record in kept:
            self._remember(record)
        if kept or (self.path / METRICS).exists():
            self._replace(METRICS, "".join(record.to_line() for record in kept).encode())
        return state

    def last(self) -> State | None:
        """Return the last checkpoint, None before the first, without a lock and without changing anything."""
        return _read_state(self.path / CHECKPOINT)

    def load_best(self) -> State | None:
        """Return the weights of the best epoch, None when nothing was evaluated yet."""
        return _read_state(self.path / BEST)

    def records(self) -> list[EpochRecord]:
        """Return the records of the epochs so far, without a torn last line; raise RunError if an earlier line is
        damaged."""
        records, damaged = self._read_metrics()
        if damaged is not None:  # a kill cannot cause that, and stopping here would drop later lines
            raise _damaged_line(self.path / METRICS, damaged)
        return records

    def _repaired_records(self, state: State) -> list[EpochRecord]:
        """Return the records up to the checkpoint's epoch, from the metrics and, where missing there, from the
        checkpoint."""
        records, damaged = self._read_metrics()
        try:
            last = EpochRecord.from_dict(state["record"])
            found = {record.epoch: record for record in map(EpochRecord.from_dict, state.get(_HISTORY, ()))}
            found |= {record.epoch: record for record in records}
            kept = [found[epoch] for epoch in sorted(found) if epoch < state["epoch"]]
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise RunError(f"{self.path / CHECKPOINT} is no checkpoint of a training") from error
        if damaged is not None and len(kept) < state["epoch"] - 1:
            raise _damaged_line(self.path / METRICS, damaged)
        return [*kept, last]

    def _read_metrics(self) -> tuple[list[EpochRecord], int | None]:
        """Return the readable lines and the number of the first unreadable one; a torn last line is no error."""
        path = self.path / METRICS
        records: list[EpochRecord] = []
        if not path.exists():
            return records, None
        with as_error(RunError, path):
            lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
        torn: list[int] = []
        for number, line in enumerate(lines, start=1):
            try:
                records.append(EpochRecord.from_line(line))
            except ValueError:
                torn.append(number)
        followed = bool(torn) and len(lines) - torn[0] >= len(torn)
        return records, torn[0] if followed else None

    def _remember(self, record: EpochRecord) -> None:
        self._history[record.epoch] = {name: value for name, value in record.as_dict().items() if name != "passes"}

    def close(self) -> None:
        """Release the lock, after making the appended metrics durable."""
        if self._lock is not None:
            with contextlib.suppress(OSError):  # the checkpoint contains it, too
                flush(self.path / METRICS)
            os.close(self._lock)
            self._lock = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()

    def _replace(self, name: str, data: bytes | Callable[[BinaryIO], None]) -> None:
        self.start()
        if self._written:
            with as_error(RunError, self.path / name):
                replace_file(self.path / name, data)


def updated_config(path: Path, config: Config, given: Mapping[str, Any], changeable: Collection[str]) -> Config:
    """Return the configuration at ``path`` with options given now; raise RunError for one that may not change."""
    for name, value in given.items():
        if name in config and config[name] != value and name not in changeable:
            option = "--" + name.replace("_", "-")
            begun = f"{path} was begun with {option} {config[name]}"
            raise RunError(f"{begun}, not {value}; leave the option out to go on with it")
    return {**config, **given}


def holds_run(path: Path) -> bool:
    """Return whether a run was begun at ``path``."""
    return (path / CONFIG).is_file()


def remove_empty_folders(folders: Sequence[Path]) -> None:
    """Remove ``folders``, the inner ones last in the list, except those that are not empty."""
    for folder in reversed(folders):
        with contextlib.suppress(OSError):
            folder.rmdir()


def _damaged_line(path: Path, number: int) -> RunError:
    return RunError(f"{path}, line {number} is damaged; remove it to go on without that epoch's record")


def _is_occupied(path: Path) -> bool:
    """Return whether ``path`` holds something other than an empty folder or the remains of an interrupted start."""
    if not path.exists():
        return path.is_symlink()
    if not path.is_dir():
        return True
    with as_error(RunError, path):
        return any(not entry.name.endswith(TEMPORARY_SUFFIX) for entry in path.iterdir())


def read_config(path: Path) -> Config:
    try:
        with as_error(RunError, path):
            config = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise RunError(f"{path} is damaged: {error}") from error
    if not isinstance(config, dict):
        raise RunError(f"{path} is damaged: it holds no JSON object")
    return config


def is_locked(path: Path) -> bool:
    """Return whether another process has locked the folder."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    finally:
        os.close(descriptor)
    return False


# ---- runs of several seeds


class SeedRuns:
    """The folder of one training repeated with several seeds; the run of seed 3 is the ordinary run ``seed-3``.

    Make one by `create` or `open`; neither writes anything. ``start`` writes the seeds and the options; ``discard``
    undoes it where no run has a checkpoint.
    """

    def __init__(self, path: Path, seeds: Sequence[int], config: Config) -> None:
        self.path = path
        self.seeds = tuple(seeds)
        self.config = config
        self._made: list[Path] = []

    @classmethod
    def create(cls, path: Path, seeds: Sequence[int], config: Mapping[str, object]) -> Self:
        """Return new runs below ``path``; raise RunError where something is there already."""
        if (path / SEEDS).exists():
            hint = "go on with them by resume=True, or give another folder"
            raise RunError(f"{path} holds runs of several seeds; {hint}")
        RunFolder.create(path, {})  # refuses a folder that is in use
        return cls(path, seeds, dict(config))

    @classmethod
    def open(cls, path: Path, seeds: Sequence[int] | None = None) -> Self:
        """Return the runs begun at ``path``; ``seeds`` given now may add to the earlier ones."""
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
        """Return the path of the run of ``seed``."""
        return self.path / f"seed-{seed}"

    @property
    def begun(self) -> list[Path]:
        """The runs that exist."""
        return [path for path in map(self.run_path, self.seeds) if holds_run(path)]

    def start(self) -> None:
        """Write down the seeds and the options."""
        text = json.dumps({"seeds": list(self.seeds), "config": self.config}, indent=2, allow_nan=False) + "\n"
        with as_error(RunError, self.path):
            self._made.extend(make_folders(self.path))
            replace_file(self.path / SEEDS, text.encode())

    def discard(self) -> None:
        """Undo ``start``, unless there is a run to resume."""
        if self.begun or not self._made:
            return
        (self.path / SEEDS).unlink(missing_ok=True)
        remove_empty_folders(self._made)


def holds_seeds(path: Path) -> bool:
    """Return whether runs of several seeds were begun at ``path``."""
    return (path / SEEDS).is_file()


# ---- the states, as torch saves them: plain data, of which nothing is run, with checksums; on the CPU, whatever device
# they come from


def _write_state(file: BinaryIO, state: State) -> None:
    """Write ``state``: tensors, numbers, strings, and lists and dicts of them."""
    import torch

    noting: Any = _ErrorCapturingFile(file)  # torch needs no other methods
    summing = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(True)  # `_read_state` wants them, whatever the program around us does
    try:
        torch.save(_on_cpu(state), noting)
    finally:
        torch.serialization.set_crc32_options(summing)
    if noting.error is not None:
        raise noting.error


def _read_state(path: Path) -> State | None:
    """Return a checkpoint's content, None where there is no such file.

    Only plain data is read: a pickled program in its place is refused. torch itself verifies no checksum, so a flipped
    bit would silently become another weight.
    """
    if not path.exists():
        return None
    import torch

    with as_error(RunError, path):
        data = path.read_bytes()
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as members:
            wrong = members.testzip()
        if wrong is not None:
            raise zipfile.BadZipFile(wrong)
        state = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    except MemoryError:
        raise
    except Exception as error:  # damaged bytes make zipfile and pickle raise almost anything
        raise RunError(f"{path} is damaged and cannot be read") from error
    if not isinstance(state, dict) or "epoch" not in state:
        raise RunError(f"{path} is no checkpoint")
    return state


class _ErrorCapturingFile:
    """A file-like object that remembers the first error of writing ``file``.

    torch would report a full disk as an internal error without a cause.
    """

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.error: OSError | None = None

    def write(self, data: memoryview) -> int:
        if self.error is None:
            try:
                self._file.write(data)
            except OSError as error:
                self.error = error
        return len(data)

    def flush(self) -> None:
        """Do nothing: the code that opened the file flushes it."""


def _on_cpu(state: Any) -> Any:
    """Return ``state`` with its tensors on the CPU, since its reader may have no other device."""
    import torch

    match state:
        case torch.Tensor():
            return state.cpu()
        case dict():
            moved = copy.copy(state)  # with further attributes of a state_dict
            for name, value in state.items():  # update() would add to a Counter
                moved[name] = _on_cpu(value)
            return moved
        case list() | tuple():
            return type(state)(_on_cpu(value) for value in state)
        case _:
            return state
