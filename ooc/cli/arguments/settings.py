# SPDX-License-Identifier: Apache-2.0
"""The options of ``ooc train``, declared once: type, default, help, and the values ``config.json`` may have.

The command line, its help and the check of a run's configuration all derive from the fields of `TrainSettings`.
"""

from collections.abc import Iterable, Mapping
from dataclasses import MISSING, Field, dataclass, field, fields
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any, Self

import click
from click.core import ParameterSource

from ooc.cli.arguments.options import (
    ASSIGNMENT,
    COLUMNS,
    COUNT,
    COUNT_OR_ZERO,
    EDGE_TYPE,
    FANOUTS,
    FRACTION,
    HIGHEST_SEED,
    NON_NEGATIVE,
    PATHS,
    POSITIVE,
    PROBABILITY,
    PROPER_FRACTION,
    SIZE,
    SIZE_OR_ZERO,
    WIDTH,
    ChoiceType,
    Option,
    WholeType,
    class_weights,
    hits,
)
from ooc.errors import OptionError, RunError

RESOURCES, GPU, RUN = "Resources, which never change results", "With a GPU", "The run"
SAMPLING, LINKS = "Mini-batches", "Link prediction"

MODEL_NAMES = {
    "gcn": "GCN",
    "sage": "GraphSAGE",
    "gin": "GIN",
    "gat": "GAT",
    "gatv2": "GATv2",
    "transformer": "graph transformer",
    "rgcn": "R-GCN",
    "hgt": "HGT",
    "han": "HAN",
}
"""The names of the models for people."""
_MODELS_WITH_WEIGHTS = ("gcn",)
"""Models whose convolutions accept edge weights."""
METRICS = ("accuracy", "micro-f1", "macro-f1", "roc-auc", "average-precision", "mae", "rmse", "r2")
DECODERS = ("dot", "distmult", "complex", "bilinear", "mlp")
LOSSES = {"bce": "BCEWithLogitsLoss", "mse": "MSELoss", "l1": "L1Loss", "smooth-l1": "SmoothL1Loss"}
"""torch's losses besides cross-entropy, which has options of its own."""
OPTIMIZERS = (
    *("adam", "adamw", "sgd", "Adadelta", "Adafactor", "Adagrad", "Adamax", "ASGD", "NAdam", "RAdam", "RMSprop"),
    "Rprop",
)
"""torch's optimizers; the first three have their traditional lower-case names."""
EMBEDDING_OPTIMIZERS = ("adam", "adamw", "sparseadam", "adagrad", "sgd")
NO_OPTIMIZERS = {
    "LBFGS": "evaluates the loss several times a step, and there is one pass over the graph a step",
    "SparseAdam": "takes sparse gradients only, these are dense; use Adam",
    "Muon": "takes matrices only, and models have vectors, too",
}
SCHEDULES = (
    *("ConstantLR", "CosineAnnealingLR", "CosineAnnealingWarmRestarts", "CyclicLR", "ExponentialLR", "LinearLR"),
    *("MultiStepLR", "OneCycleLR", "PolynomialLR", "ReduceLROnPlateau", "StepLR"),
)
"""torch's schedulers besides the schedules that have options of their own."""
NO_SCHEDULES = {
    **dict.fromkeys(("LambdaLR", "MultiplicativeLR"), "takes a function; from Python: Trainer(scheduler=…)"),
    **dict.fromkeys(("SequentialLR", "ChainedScheduler"), "takes schedulers; from Python: Trainer(scheduler=…)"),
}
SCHEDULES_OVER_EPOCHS = ("cosine", "CosineAnnealingLR", "OneCycleLR")
"""Schedules that end after a fixed number of epochs."""
_ALWAYS_RECORDED = (
    "store model layers hidden dropout input_dropout norm optimizer lr weight_decay epochs seed metric eval_every "
    "patience gpu_budget host_budget device threads spill_dir block_rows slab_columns"
)
"""Options that every run has; runs begun by earlier versions may lack the others, and resume with their defaults."""


def _option(
    group: str, kind: "click.ParamType[Any]", help: str, default: Any = MISSING, *, also: str = "", **more: Any
) -> Any:
    """Return a dataclass field that is an option under the heading ``group``. ``also`` is a second flag; ``more`` goes
    to click. The default is a choice's first name, False for a flag, and otherwise None."""
    if default is MISSING:
        default = kind.choices[0] if isinstance(kind, ChoiceType) else False if kind is click.BOOL else None
    more |= {"is_flag": True} if default is False else {"multiple": True} if default == [] else {}
    metadata = {"group": group, "type": kind, "help": help, "also": [also] if also else [], "more": more}
    if isinstance(default, list):
        return field(default_factory=lambda: list(default), metadata=metadata)
    return field(default=default, metadata=metadata)


_MODEL = partial(_option, "Model")
_EMBEDDING = partial(_option, "An embedding of the nodes")
_STEPS = partial(_option, "Loss and optimizer")
_SAMPLING = partial(_option, SAMPLING)
_LINKS = partial(_option, LINKS)
_RATE = partial(_option, "Learning rate")
_AVERAGE = partial(_option, "Averaged weights")
_EVALUATION = partial(_option, "Evaluation")
_RESOURCES = partial(_option, RESOURCES)
_GPU = partial(_option, GPU)
_RUN = partial(_option, RUN)


def user_model_of(model: str) -> tuple[Path, str] | None:
    """Return file and name of a model of the user's own, ``FILE.py:NAME``; None for a model that comes with ooc."""
    file, colon, name = model.rpartition(":")
    return (Path(file), name) if colon and file.endswith(".py") else None


def model_name(model: str) -> str:
    """Return the model's name for people."""
    own = user_model_of(model)
    return MODEL_NAMES[model] if own is None else own[1]


def _resolved_model(model: str) -> str | None:
    """Return a model of the user's own with the absolute path of its file, ``sage`` for ``graphsage``, else None."""
    own = user_model_of(model)
    if own is not None:
        return f"{own[0].resolve()}:{own[1]}"
    return "sage" if model.lower() == "graphsage" else None


MODEL = ChoiceType(*MODEL_NAMES, also=_resolved_model)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainSettings:
    """The options of a training, one field each; None lets the machine or the store decide. ``config.json`` has all."""

    store: str = field(metadata={"type": click.Path()})
    model: str = _MODEL(
        MODEL, "GCN, GraphSAGE, GIN, GAT, GATv2 or graph transformer; or one of your own, FILE.py:NAME."
    )
    heads: int = _MODEL(
        COUNT, "Attention heads of gat, gatv2 and transformer; --hidden is that of all of them together.", 1
    )
    aggr: str = _MODEL(
        ChoiceType("auto", "mean", "sum", "max"), "How sage (auto: mean) and gin (auto: sum) take neighbours together."
    )
    residual: bool = _MODEL(click.BOOL, "Layers add to their input, between two linear maps; norms go first.")
    ignore_edge_data: str = _MODEL(
        ChoiceType("auto", "none", "weight", "features", "all"),
        "What to leave out of what the store's edges carry (auto: weights where the model takes none); a model that "
        "does not take the rest is refused.",
    )
    pool: str = _MODEL(
        ChoiceType("add", "mean", "max"),
        "Of many graphs: how the rows of a graph become one, before the output.",
        "mean",
    )
    paths: int = _MODEL(
        PATHS, "Of many graphs: send messages along all paths of 2 or 3 edges, too; 0: along edges alone.", 0
    )
    hops: int = _MODEL(
        PATHS,
        "Of many graphs: send messages to all nodes within 2 or 3 hops, too; 0: along edges alone.",
        0,
        metavar="HOPS",
    )
    layers: int = _MODEL(COUNT, "Convolutions.", 3)
    hidden: int = _MODEL(WIDTH, "Width of the hidden layers.", 128)
    dropout: float = _MODEL(PROBABILITY, "On every hidden layer.", 0.5)
    input_dropout: float = _MODEL(PROBABILITY, "On the features.", 0.0)
    norm: str = _MODEL(
        ChoiceType("none", "layer", "batch", "graph"),
        "After every convolution but the last (with --jk after that, too): LayerNorm of each node by itself, "
        "BatchNorm, GraphNorm. The latter two take statistics of all nodes: an epoch then computes all rows, and takes "
        "more passes.",
    )
    jk: str = _MODEL(ChoiceType("none", "last", "cat", "max"), "Jumping knowledge.")
    dtype: str = _MODEL(
        ChoiceType("float32", "bfloat16"),
        "What rows and weights are rounded to where they are multiplied; their sums and all else stay float32.",
        also="--amp",
    )
    spill_dtype: str = _MODEL(
        ChoiceType("float32", "bfloat16"),
        "What intermediates are rounded to between passes; bfloat16 moves half the bytes. Sums stay float32.",
    )
    embedding: int | str = _EMBEDDING(
        COLUMNS,
        "Train so many numbers for every node, the model's input, behind the features if there are such; of a graph "
        "with types for types without features, or as TYPE=COLUMNS,… says; 0: none.",
        0,
        metavar="COLUMNS",
    )
    embedding_optimizer: str = _EMBEDDING(
        ChoiceType(*EMBEDDING_OPTIMIZERS),
        "What steps it, as torch.optim steps a dense matrix; sparseadam as one of which all rows were looked up.",
    )
    embedding_lr: float | None = _EMBEDDING(
        POSITIVE, "Its learning rate. [default: --lr, as its schedule changes that]"
    )
    embedding_option: list[str] = _EMBEDDING(  # noqa: RUF009
        ASSIGNMENT,
        "An argument that torch has for its optimizer, as weight_decay=0.01, or std=0.1: how far apart its first rows "
        "lie. May be given several times.",
        [],
    )
    loss: str = _STEPS(
        ChoiceType("auto", "cross-entropy", *LOSSES),
        "By default cross-entropy for classes, bce (with logits) for several labels a node, mse for values.",
    )
    label_smoothing: float = _STEPS(FRACTION, "Of cross-entropy.", 0.0)
    class_weights: str = _STEPS(
        ChoiceType("none", "balanced", also=class_weights),
        "Of cross-entropy: balanced, by which every class counts alike however many training nodes it has, or one "
        "number a class.",
        metavar="W0,W1,…",
    )
    optimizer: str = _STEPS(
        ChoiceType(*OPTIMIZERS, refused=NO_OPTIMIZERS),
        "adam, adamw, sgd (with momentum 0.9), or another of torch.optim's, as NAdam or RMSprop.",
        metavar="NAME",
    )
    optimizer_option: list[str] = _STEPS(  # noqa: RUF009
        ASSIGNMENT, "An argument that torch has for it, as betas=0.9,0.99. May be given several times.", []
    )
    lr: float = _STEPS(POSITIVE, "Learning rate.", 0.01)
    weight_decay: float = _STEPS(NON_NEGATIVE, "On all parameters.", 0.0)
    clip: float | None = _STEPS(POSITIVE, "Scale gradients down to this norm, all together.", metavar="NORM")
    epochs: int = _STEPS(COUNT, "Epochs in all, those before --resume included.", 100)
    seed: int = _STEPS(WholeType(0, HIGHEST_SEED), "Of weights and dropout.", 0)
    sampler: str = _SAMPLING(
        ChoiceType("none", "neighbor"),
        "none: every step is of the full graph; neighbor: of a batch of training nodes and neighbours that are drawn. "
        "Scores are the full graph's either way.",
    )
    fanouts: str | None = _SAMPLING(
        FANOUTS,
        "The most neighbours that are drawn of a node, hop by hop; -1: all. [default: 10 a layer]",
        metavar="N,N,…",
    )
    batch_size: int | None = _SAMPLING(
        COUNT, "Training nodes of a batch, of many graphs these. [default: 1024 nodes, 32 graphs]"
    )
    batch_nodes: int | None = _SAMPLING(COUNT, "Of many graphs: nodes of a batch, at most.")
    batch_edges: int | None = _SAMPLING(COUNT, "Of many graphs: edges of a batch, at most.")
    batch_paths: int | None = _SAMPLING(COUNT, "Of many graphs: paths of a batch, at most.")
    accumulate: int = _SAMPLING(COUNT, "Batches of a step, of all processes together.", 1)
    links: str | None = _LINKS(
        click.Path(),
        "Train and score the links in this .npz file, or split folder of OGB's, instead of nodes.",
        metavar="FILE",
    )
    decoder: str = _LINKS(ChoiceType(*DECODERS), "What makes a score of two embeddings, which are --hidden wide.")
    link_type: str | None = _LINKS(
        EDGE_TYPE,
        "Of a graph with types: the type of edges that links are of; heads are its sources.",
        metavar="SOURCE,RELATION,TARGET",
    )
    filtered: bool = _LINKS(click.BOOL, "Draw no pairs that are linked, neither to train on nor to rank against.")
    ranked: int = _LINKS(COUNT_OR_ZERO, "Tails that each link is ranked against, where the file has none; 0: all.", 100)
    negatives: int = _LINKS(COUNT, "Pairs that are no links for each that is one: its head, tails drawn evenly.", 1)
    link_steps: int = _LINKS(COUNT, "Steps of an epoch, each with a part of the links and the whole graph.", 1)
    schedule: str = _RATE(
        ChoiceType("none", "cosine", "step", "plateau", *SCHEDULES, refused=NO_SCHEDULES),
        "How the learning rate changes from epoch to epoch: none, cosine, step, plateau (by the validation score), or "
        "one of torch's, as ExponentialLR.",
        metavar="NAME",
    )
    schedule_option: list[str] = _RATE(  # noqa: RUF009
        ASSIGNMENT, "An argument that torch has for its own, as gamma=0.95. May be given several times.", []
    )
    warmup: int = _RATE(COUNT_OR_ZERO, "Let it rise linearly first.", 0, metavar="EPOCHS")
    schedule_epochs: int | None = _RATE(
        COUNT, "That cosine, CosineAnnealingLR and OneCycleLR take. [default: --epochs as given first]"
    )
    step_every: int = _RATE(COUNT, "Between the steps of step.", 30, metavar="EPOCHS")
    lr_factor: float = _RATE(PROPER_FRACTION, "What step and plateau multiply it by.", 0.1)
    plateau_patience: int = _RATE(COUNT_OR_ZERO, "Evaluations without a better score that plateau waits for.", 10)
    average: str = _AVERAGE(
        ChoiceType("none", "ema", "swa"),
        "Score and keep an average of the weights: exponential (ema) or of all epochs alike (swa).",
    )
    average_from: int = _AVERAGE(COUNT, "The first epoch that is averaged.", 1, metavar="EPOCH")
    average_decay: float = _AVERAGE(PROPER_FRACTION, "What ema keeps of the average an epoch.", 0.99)
    metric: str | None = _EVALUATION(
        ChoiceType(*METRICS, "mrr", also=hits),
        "What evaluation measures: accuracy, micro-f1, macro-f1, mae, rmse, r2; roc-auc and average-precision for two "
        "classes or several labels a node; of links mrr, hits@K, roc-auc or average-precision. "
        "[default: accuracy, for several labels roc-auc, for values mae, for links mrr]",
        default=None,
        metavar="NAME",
    )
    eval_every: int = _EVALUATION(COUNT_OR_ZERO, "Evaluate every N epochs; 0: never.", 1)
    patience: int = _EVALUATION(
        COUNT_OR_ZERO, "Stop when the validation score has not improved in this many evaluations; 0: never.", 0
    )
    memory: int | None = _RESOURCES(
        SIZE, "RAM to work in; what does not fit waits on the disk. [default: 3/4 of what is free]"
    )
    threads: int | None = _RESOURCES(WholeType(min=1, max=1024), "Compute threads. [default: torch's choice]")
    spill_dir: str | None = _RESOURCES(click.Path(), "Where scratch files go. [default: the disk of RUN]")
    max_ssd_writes: int | None = _RESOURCES(
        SIZE_OR_ZERO, "What training may write to the SSD an epoch, at most; 0: nothing. [default: any amount]"
    )
    optimizer_state: str = _RESOURCES(
        ChoiceType("auto", "memory", "ssd"),
        "Where what the optimizer keeps of large parameters is: in memory, on the SSD, or there only if it must.",
    )
    block_rows: int | None = _RESOURCES(COUNT, "Rows of a block; by default as memory allows.")
    slab_columns: int | None = _RESOURCES(COUNT, "Columns of a slab; by default as memory allows.")
    exchange: str = _RESOURCES(
        ChoiceType("auto", "halo", "columns"),
        "What several processes send each other for a pull: rows that are wanted, some columns of all rows where these "
        "can be sharded, or whichever takes less time.",
    )
    exchange_by: str = _RESOURCES(
        ChoiceType("auto", "host", "device"),
        "How that goes from GPU to GPU: by way of the host's memory, directly by NCCL, or whichever is faster.",
    )
    link: int | None = _RESOURCES(
        SIZE, "Bytes a second that each of several processes receives. [default: measured; for ooc plan 1G]"
    )
    device: str = _GPU(ChoiceType("auto", "cpu", "cuda"), "Where to compute; auto is the CPU.")
    gpu_budget: int | None = _GPU(
        SIZE,
        "Memory of the GPU to work in; on the CPU the part of --memory that is computed in. "
        "[default: 9/10 of the free GPU memory]",
    )
    host_budget: int | None = _GPU(
        SIZE, "RAM to work in beside it; on the CPU the rest of --memory. [default: half of the free memory]"
    )
    log: list[str] = _RUN(  # noqa: RUF009  (it makes a field)
        ChoiceType("csv", "tensorboard"),
        "Write every epoch to RUN/metrics.csv or for TensorBoard to RUN/tensorboard, too. May be given twice.",
        [],
    )
    allow_nonfinite: bool = _RUN(click.BOOL, "Go on when the loss or the weights are no finite numbers.")

    @property
    def drawn(self) -> tuple[int, ...]:
        """``fanouts`` as numbers: neighbours drawn at each hop."""
        return (10,) * self.layers if self.fanouts is None else tuple(map(int, self.fanouts.split(",")))

    @property
    def edge_data_left_out(self) -> str:
        """The edge data the model is not given, with ``"auto"`` resolved."""
        if self.ignore_edge_data != "auto":
            return self.ignore_edge_data
        return "none" if self.model in _MODELS_WITH_WEIGHTS or user_model_of(self.model) else "weight"

    @classmethod
    def from_config(cls, config: Mapping[str, Any], where: Path) -> Self:
        """Return the settings in a run's configuration, which has other entries too; RunError for a wrong setting."""
        missing = [one.name for one in fields(cls) if one.name in _ALWAYS_RECORDED.split() and one.name not in config]
        if missing:
            raise RunError(f"{where} was not begun by ooc train: its configuration lacks {', '.join(missing)}")
        given = [one for one in fields(cls) if one.name in config]
        for one in given:
            _check_value(one, config[one.name], where)
        return cls(**{one.name: config[one.name] for one in given})

    @classmethod
    def defaults(cls) -> dict[str, Any]:
        """Return the options that a configuration may lack, with the defaults that keep earlier versions' behaviour."""
        return {one.name: _default(one) for one in fields(cls) if one.name not in _ALWAYS_RECORDED.split()}


CHANGEABLE = frozenset(
    one.name
    for one in fields(TrainSettings)
    if one.name in ("store", "epochs") or one.metadata["group"] in (RESOURCES, GPU, RUN)
)
"""Options that a resumed run may be given anew, because none of them changes what an epoch computes."""


def train_options() -> list[Option]:
    """Return the command line's options, in the order of the help; each sets the field of its name."""
    return [
        Option(
            [f"--{one.name.replace('_', '-')}", *one.metadata["also"]],
            type=one.metadata["type"],
            default=_default(one),
            help=one.metadata["help"],
            group=one.metadata["group"],
            **one.metadata["more"],
        )
        for one in fields(TrainSettings)
        if "group" in one.metadata
    ]


def with_one_memory(given: dict[str, Any]) -> dict[str, Any]:
    """Return the options ``given`` anew to a run; ``memory`` clears the two budgets, and a budget clears memory."""
    two = ("gpu_budget", "host_budget")
    if given.get("memory") is not None:
        return dict.fromkeys(two) | given
    return {"memory": None, **given} if any(given.get(name) is not None for name in two) else given


_SOURCES = (ParameterSource.COMMANDLINE, ParameterSource.ENVIRONMENT, ParameterSource.DEFAULT_MAP)


def settle_memory(context: click.Context, options: dict[str, Any]) -> None:
    """Of ``memory`` and the two budgets, keep those from the nearest source: command line, environment, then file.
    Those from the same source all stay, and are refused where they are used."""
    kinds = (("memory",), ("gpu_budget", "host_budget"))
    one, two = (_precedence(context, options, names) for names in kinds)
    if one != two:
        options.update(dict.fromkeys(kinds[one < two]))


def settle_seeds(
    context: click.Context, options: Mapping[str, Any], seeds: tuple[int, ...] | None
) -> tuple[int, ...] | None:
    """Return ``seeds``, or None where ``--seed`` has a nearer source; OptionError where both have the same source."""
    if seeds is None:
        return None
    one, several = (_precedence(context, {**options, "seeds": seeds}, (name,)) for name in ("seed", "seeds"))
    if one == several:
        raise OptionError("--seed is of one training, --seeds of several; give one of them")
    return seeds if several < one else None


def _precedence(context: click.Context, options: Mapping[str, Any], names: tuple[str, ...]) -> int:
    """Return the distance of the nearest source of these options: 0 is the command line; unset options are farthest."""
    sources = [context.get_parameter_source(name) for name in names if options[name] is not None]
    return min((_SOURCES.index(source) for source in sources if source in _SOURCES), default=len(_SOURCES))


def _default(one: "Field[Any]") -> Any:
    return one.default if one.default_factory is MISSING else one.default_factory()


def _check_value(one: "Field[Any]", value: Any, where: Path) -> None:
    """Raise RunError for a ``value`` that ``ooc train`` cannot have written: its option would have converted it."""
    if value is None and one.default is None:
        return
    kind, is_list, reason = one.metadata["type"], isinstance(value, list), ""
    items = value if is_list else [value]
    valid = is_list == (one.default_factory is not MISSING)
    try:  # each item as written on the command line
        valid = valid and all(_is_same(kind.convert(str(item), None, None), item) for item in items)
    except click.ClickException as error:
        valid, reason = False, f": {error.format_message()}"
    if not valid:
        raise RunError(f"{where}/config.json is damaged: {one.name} cannot be {value!r}{reason}")


def _is_same(converted: object, value: object) -> bool:
    """Whether ``value`` equals what it was ``converted`` to; JSON may have a whole number for a fraction."""
    alike = type(converted) is type(value) or (isinstance(converted, float) and type(value) is int)
    return alike and converted == value


_FULL_GRAPH_ONLY = {
    "embedding": "its rows are stepped all together",
    "spill_dtype": "batches are not spilled",
    "max_ssd_writes": "batches write nothing",
    "optimizer_state": "batches keep it in memory",
    "block_rows": "batches have no blocks",
    "slab_columns": "batches have no slabs",
    "exchange": "batches are pulled by one process each",
    "exchange_by": "batches are pulled by one process each",
    "link": "batches are pulled by one process each",
    "gpu_budget": "give --memory",
    "host_budget": "give --memory",
}
"""Options of full-graph training that batches do not have, with the reasons."""
_MANY_GRAPHS_OPTIONS = ("pool", "paths", "hops", "batch_nodes", "batch_edges", "batch_paths")
_NEIGHBOUR_OPTIONS = ("fanouts", "sampler")
_BATCH_OPTIONS = ("fanouts", "batch_size")
_LINK_OPTIONS = ("decoder", "link_type", "filtered", "ranked", "negatives", "link_steps")
_NODES_ONLY = {
    "sampler": "links are trained on the whole graph",
    "loss": "the loss of links is binary cross-entropy",
    "label_smoothing": "it is of classes",
    "class_weights": "they are of classes",
}


def refuse(settings: TrainSettings, names: Iterable[str], reason: str) -> None:
    """Raise OptionError, ``--NAME REASON``, for the first of the options ``names`` that differs from its default."""
    for one in fields(settings):
        if one.name in names and (getattr(settings, one.name) or None) != (_default(one) or None):
            raise OptionError(f"--{one.name.replace('_', '-')} {reason}")


def check_sampling(settings: TrainSettings, *, many_graphs: bool = False) -> None:
    """Raise OptionError for options of another kind of training: by full graph, sampled batches, or whole graphs."""
    if many_graphs:
        what = f"is of neighbours in one graph; {settings.store} holds many, whose batches are whole graphs"
        refuse(settings, _NEIGHBOUR_OPTIONS, what)
    else:
        refuse(settings, _MANY_GRAPHS_OPTIONS, f"is for a store of many graphs; {settings.store} is one")
    if settings.sampler == "none" and not many_graphs:
        one_step = "is for sampled mini-batches: an epoch of the full graph is one step, with nothing to accumulate"
        refuse(settings, ["accumulate"], one_step)
        refuse(settings, _BATCH_OPTIONS, "is of sampled mini-batches; give --sampler neighbor, too")
        return
    kind = "batches" if many_graphs else "--sampler"
    for name, reason in _FULL_GRAPH_ONLY.items():
        refuse(settings, (name,), f"is of full-graph training, not of {kind}: {reason}")
    if settings.device == "cuda":
        trained = "batches are trained" if many_graphs else "--sampler trains"
        raise OptionError(f"{trained} on the CPU; leave out --device cuda")
    if settings.norm == "graph" and not many_graphs:
        raise OptionError("--norm graph takes statistics of all nodes, which a batch has not; give another norm")
    if settings.norm == "graph" and settings.residual:
        what = "--norm graph with --residual would take statistics over several graphs"
        raise OptionError(f"{what}; leave out one of them")


def edge_type(settings: TrainSettings) -> tuple[str, str, str] | None:
    """Return the edge type of the links in a graph with types, else None."""
    if settings.link_type is None:
        return None
    source, relation, target = settings.link_type.split(",")
    return source, relation, target


def check_links(settings: TrainSettings) -> None:
    """Raise OptionError for options of links where nodes are trained, and the other way round."""
    if settings.links is None:
        refuse(settings, _LINK_OPTIONS, "is of link prediction; give --links FILE, too")
        if settings.metric is not None and settings.metric not in METRICS:
            raise OptionError(f"--metric {settings.metric} is of links; give --links FILE, too")
        return
    for name, reason in _NODES_ONLY.items():
        refuse(settings, (name,), f"is not for --links: {reason}")


def only_store(folder: Path) -> Path:
    """Return the only ``*.ooc`` folder in ``folder``; raise OptionError where there are none or several."""
    stores = sorted(path for path in folder.glob("*.ooc") if path.is_dir())
    if len(stores) == 1:
        return stores[0]
    several = f"the current folder holds several: {', '.join(store.name for store in stores)}"
    raise OptionError(f"STORE is not given and {several if stores else 'no *.ooc is in the current folder'}")


def next_run(runs: Path, store: str, model: str) -> Path:
    """Return the first free ``runs/STORE-MODEL-NUMBER``, as the folder of a run that was given none."""
    stem = f"{Path(store).stem}-{model if user_model_of(model) is None else model_name(model)}"
    return next(path for number in count(1) if not (path := runs / f"{stem}-{number}").exists())
