# SPDX-License-Identifier: Apache-2.0
"""The options of ``ooc train`` as one value, and what follows from them where they were left out."""

from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Self, get_args

import click

from ooc.errors import OptionError, RunError

CHANGEABLE = frozenset(
    (
        "store",
        "epochs",
        "gpu_budget",
        "host_budget",
        "device",
        "spill_dir",
        "threads",
        "block_rows",
        "slab_columns",
        "max_ssd_writes",
        "log",
        "allow_nonfinite",
    )
)
"""What a resumed run may be given anew: none of it changes what an epoch computes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainSettings:
    """One field an option, by its name; None where the machine or the store decides. ``config.json`` holds them all.

    What has a default here may be missing there: runs begun before there was such an option go on as they were.
    """

    store: str
    model: str
    layers: int
    hidden: int
    dropout: float
    input_dropout: float
    norm: str
    optimizer: str
    lr: float
    weight_decay: float
    epochs: int
    eval_every: int
    patience: int
    metric: str | None
    seed: int
    gpu_budget: int | None
    host_budget: int | None
    device: str
    spill_dir: str | None
    threads: int | None
    block_rows: int | None
    slab_columns: int | None
    spill_dtype: str = "float32"
    dtype: str = "float32"
    max_ssd_writes: int | None = None
    heads: int = 1
    aggr: str = "auto"
    residual: bool = False
    ignore_edge_data: str = "none"
    jk: str = "none"
    loss: str = "auto"
    label_smoothing: float = 0.0
    class_weights: str = "none"
    clip: float | None = None
    schedule: str = "none"
    schedule_epochs: int | None = None
    warmup: int = 0
    step_every: int = 30
    lr_factor: float = 0.1
    plateau_patience: int = 10
    average: str = "none"
    average_from: int = 1
    average_decay: float = 0.99
    log: list[str] = field(default_factory=list)
    allow_nonfinite: bool = False

    @classmethod
    def from_config(cls, config: Mapping[str, Any], where: Path) -> Self:
        """The settings in a run's configuration, which holds other things too."""
        kinds = {option.name: option.type for option in fields(cls)}
        names = list(kinds)
        missing = [name for name in names if name not in config and name not in cls.defaults()]
        if missing:
            raise RunError(f"{where} was not begun by ooc train: its configuration lacks {', '.join(missing)}")
        for name in names:
            if name in config and not (config[name] is None and type(None) in get_args(kinds[name])):
                _check_value(name, config[name], where)
        return cls(**{name: config[name] for name in names if name in config})

    @classmethod
    def defaults(cls) -> dict[str, Any]:
        """The options that a configuration may lack, as they were before there were such."""
        found: dict[str, Any] = {o.name: o.default for o in fields(cls) if o.default is not MISSING}
        return found | {o.name: o.default_factory() for o in fields(cls) if o.default_factory is not MISSING}

    def as_config(self) -> dict[str, Any]:
        """Plain data, for ``config.json``."""
        return asdict(self)


def _check_value(name: str, value: Any, where: Path) -> None:
    """RunError for a value that ``ooc train`` could not have written: not what its option makes of it."""
    from ooc.cli.train import command

    option = next(parameter for parameter in command.params if parameter.name == name)
    is_list = isinstance(value, list)
    items = value if is_list else [value]
    try:
        sound = is_list == getattr(option, "multiple", False)
        if isinstance(option.type, click.Path):  # which lets numbers pass
            sound = sound and isinstance(value, str)
        sound = sound and all(_is_same(option.type.convert(item, None, None), item) for item in items)
        reason = ""
    except click.ClickException as error:
        sound, reason = False, f": {error.format_message()}"
    except (TypeError, ValueError, AttributeError, OverflowError):
        sound, reason = False, ""
    if not sound:
        raise RunError(f"{where}/config.json is damaged: {name} cannot be {value!r}{reason}")


def _is_same(converted: object, value: object) -> bool:
    """Whether ``value`` is what it was converted to; JSON may have a whole number for a fraction."""
    alike = type(converted) is type(value) or (isinstance(converted, float) and type(value) is int)
    return alike and converted == value


def only_store(folder: Path) -> Path:
    """The one ``*.ooc`` in the folder. Raises OptionError when there are none or several."""
    stores = sorted(path for path in folder.glob("*.ooc") if path.is_dir())
    match stores:
        case [store]:
            return store
        case []:
            raise OptionError("STORE is not given and no *.ooc is in the current folder")
        case _:
            names = ", ".join(store.name for store in stores)
            raise OptionError(f"STORE is not given and the current folder holds several: {names}")


def next_run(runs: Path, store: str, model: str) -> Path:
    """A folder for a run that was not given one: ``runs/STORE-MODEL-NUMBER``, the first that is free."""
    stem = f"{Path(store).stem}-{model}"
    number = 1
    while (runs / f"{stem}-{number}").exists():
        number += 1
    return runs / f"{stem}-{number}"


def budgets(settings: TrainSettings, device: str, free_gpu_bytes: int) -> tuple[int, int]:
    """Device and host budget in bytes: as given, otherwise a share of what is free now.

    ``device`` is ``"cpu"`` or ``"cuda"``, ``free_gpu_bytes`` matters for the latter only.
    """
    from ooc.memory import default_budgets

    gpu, host = settings.gpu_budget, settings.host_budget
    if gpu is None or host is None:
        usual = default_budgets(None if device == "cpu" else free_gpu_bytes)
        gpu, host = (default if given is None else given for given, default in zip((gpu, host), usual, strict=True))
    return gpu, host


def find_device(name: str) -> tuple[str, int]:
    """The device that ``name`` means here, and its free bytes where it has memory of its own.

    ``auto`` is the CPU. OptionError where there is no such device.
    """
    if name != "cuda":
        return "cpu", 0
    import torch

    if not torch.cuda.is_available():
        raise OptionError("--device cuda: torch finds no usable CUDA device")
    return name, int(torch.cuda.mem_get_info()[0])
