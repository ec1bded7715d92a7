# SPDX-License-Identifier: Apache-2.0
"""Build what the options of ``ooc train`` describe: model, loss, optimizer, schedule, embedding and trainer.

For planning, the model's shape alone may do. Optimizers and learning rate schedules are torch's, by their names. PyG is
imported only when a model of it is made, because that takes longer than most plans do.
"""

import ast
import hashlib
import importlib.util
import inspect
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, fields, replace
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn
from torch.optim import lr_scheduler
from torch.optim.lr_scheduler import LinearLR, ReduceLROnPlateau
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from ooc.cli.arguments.settings import LOSSES, TrainSettings, edge_type, model_name, refuse, user_model_of
from ooc.errors import BudgetError, ModelError, OptionError, RunError
from ooc.memory import available_memory_bytes
from ooc.model.lowering.model_shape import GCN, GIN, SAGE, ModelShape, Shape
from ooc.sizes import format_size
from ooc.storage.store import Task
from ooc.storage.types import Types
from ooc.suggestions import did_you_mean, did_you_mean_path
from ooc.train.embedding import Embedding
from ooc.train.loss import training_classes
from ooc.train.schedule import Scheduler, by_factor, constant, cosine, steps
from ooc.train.setup import edge_data_used

if TYPE_CHECKING:
    from torch_geometric.nn.models.basic_gnn import BasicGNN

    from ooc.events import Listener
    from ooc.storage.store import Store
    from ooc.train.batched.graphs import GraphBounds
    from ooc.train.links.metrics import LinkMetric
    from ooc.train.links.sets import Links
    from ooc.train.metrics import Metric
    from ooc.train.runs.run import RunFolder
    from ooc.train.trainer import Trainer

_SHAPES: dict[str, Shape] = {"gcn": GCN, "sage": SAGE, "gin": GIN}
MODELS_WITH_HEADS = frozenset(("gat", "gatv2", "transformer", "hgt", "han"))
MODELS_WITH_AGGREGATION = frozenset(("sage", "gin"))
MODELS_FOR_TYPES = ("rgcn", "sage", "hgt", "han")
MODELS_FOR_TYPES_ALONE = frozenset(("rgcn", "hgt", "han"))
_NORMS: dict[str, dict[str, Any]] = {
    "none": {},
    # PyG's default mode takes its statistics over the whole graph.
    "layer": {"norm": "layer_norm", "norm_kwargs": {"mode": "node"}},
    "batch": {"norm": "batch_norm"},
    "graph": {"norm": "graph_norm"},
}
_HOMOGENEOUS_ONLY = ("norm", "jk", "residual", "aggr")
_PASSED_TO_TRAINER = (
    *("memory", "gpu_budget", "host_budget", "device", "seed", "spill_dir", "input_dropout", "average_from"),
    *("block_rows", "slab_columns", "exchange", "exchange_by", "link", "max_ssd_writes", "optimizer_state"),
    "spill_dtype",
)
"""Trainer arguments that are options of the same name."""
_BATCH_NODES = 1024
"""The default number of training nodes in a sampled batch."""


def build_model(settings: TrainSettings, store: "Store") -> nn.Module:
    """Return a freshly initialised PyG model for the store's features and classes, the same for the same seed. Raise
    BudgetError where free memory cannot hold its weights: no budget can be planned without them."""
    # Here, because the file may draw random numbers, and must not run under the meta device.
    _user_model_factory(settings.model)
    features = _x_columns(store.num_features, store.source)
    sizes = _Sizes(features, store.num_classes, store.num_edge_features, store.num_graphs)
    make = partial(_construct_model, settings, sizes, store.types)
    _check_weights_fit(settings, make)
    torch.manual_seed(settings.seed)
    return make()


def _check_weights_fit(settings: TrainSettings, make: Callable[[], nn.Module]) -> None:
    with torch.device("meta"):
        nbytes = sum(parameter.nbytes for parameter in make().parameters())
    if nbytes > (free := available_memory_bytes()):
        raise BudgetError(
            f"the weights of {settings.layers} layers, {settings.hidden} wide, need {format_size(nbytes)}, "
            f"{format_size(free)} are free; give a smaller --hidden or fewer --layers"
        )


def input_columns(settings: TrainSettings, features: int, types: Types | None) -> dict[str, int]:
    """Return the model's input columns by node type, features and embedding together, without types that have none."""
    embedding = build_embedding(settings)
    learnt = {} if embedding is None else embedding.widths(types)
    known = {"": features} if types is None else types.features
    columns = {name: count + learnt.get(name, 0) for name, count in known.items()}
    return columns if types is None else {name: count for name, count in columns.items() if count}


def with_decoder(settings: TrainSettings, model: nn.Module, types: Types | None) -> nn.Module:
    """Return ``model``; where links are trained, as the encoder of a model with a decoder."""
    if settings.links is None:
        return model
    from ooc.model.layers.decoders import LinkPredictor

    of_all = types is not None and len(types.nodes) == 1 and settings.link_type is None
    relations = len(types.edges) if types is not None and of_all and len(types.edges) > 1 else 0
    return LinkPredictor(model, settings.decoder, channels=settings.hidden, relations=relations)


def planned_model(settings: TrainSettings, store: "Store") -> nn.Module:
    """Return a model to plan with: only the shape where one is known, otherwise the model of `build_model`. A plan
    needs no gigabytes of weights to be initialised."""
    plain = settings.norm == "none" and settings.jk == "none" and not settings.residual
    plain = plain and settings.heads == 1 and settings.aggr == "auto" and settings.links is None
    plain = plain and store.types is None and not store.num_graphs
    if settings.model not in _SHAPES or not plain or edge_data_used(store, settings.edge_data_left_out):
        return build_model(settings, store)
    make = partial(
        ModelShape,
        _SHAPES[settings.model],
        input_columns(settings, _x_columns(store.num_features, store.source), None)[""],
        settings.hidden,
        store.num_classes,
        layers=settings.layers,
        dropout=settings.dropout,
    )
    _check_weights_fit(settings, make)
    return make()


def describe_model(settings: TrainSettings, model: nn.Module, *, weighted: bool) -> str:
    """Return a one-line description of the model."""
    heads = f", {settings.heads} heads" if settings.heads > 1 else ""
    parameters = sum(parameter.numel() for parameter in model.parameters())
    left_out = ", without the edges' weights" * (weighted and settings.edge_data_left_out in ("weight", "all"))
    learnt = f", an embedding of {settings.embedding} columns" if settings.embedding else ""
    shape = f"{settings.layers} layer{'s' * (settings.layers > 1)}, {settings.hidden} wide{heads}, "
    shape = shape if user_model_of(settings.model) is None else ""  # a model of the user's own may ignore these options
    return f"{model_name(settings.model)}: {shape}{parameters:,} parameters{learnt}{left_out}"


def check_user_model(model: str, run: "RunFolder") -> None:
    """Raise RunError where the file of a model of the user's own has changed since ``run`` was begun."""
    digest = user_model_digest(model)
    if run.config.setdefault("model_sha256", digest) != digest:
        raise RunError(f"{model.rpartition(':')[0]} has changed since {run.path} was begun; put it back, or begin anew")


def rebuild_model(
    settings: TrainSettings, weights: dict[str, torch.Tensor], run: "RunFolder", *, own: str | None = None
) -> nn.Module:
    """Return the model of ``run`` with these weights; raise RunError where they belong to another model. ``own`` is the
    file and name, given now, of a model of the user's own: code that only a run's folder names is never run."""
    if own is None and user_model_of(settings.model) is not None:
        where = f"--model {settings.model}"
        raise RunError(f"the model of {run.path} is in a file whose code would be run; if you trust it, give {where}")
    if own is not None:
        if user_model_of(settings.model) is None or user_model_of(own) is None:
            raise OptionError(f"--model says where a model of your own is; {run.path} has {settings.model}")
        settings = replace(settings, model=own)
        check_user_model(own, run)
    facts = run.config.get("store_facts", {})
    if not isinstance(facts, dict) or not {"num_features", "num_classes"} <= facts.keys():
        raise RunError(f"{run.path} does not say how many features and classes its store had")
    sizes = _Sizes(*(facts.get(f"num_{name}", 0) for name in _Sizes._fields))
    if any(type(size) is not int or size < 0 for size in sizes):
        raise RunError(f"{run.path} says of its store that it had {[*sizes]} {', '.join(_Sizes._fields)}")
    sizes = sizes._replace(features=_x_columns(sizes.features, facts.get("source", {})))
    try:
        types = Types.of(facts)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise RunError(f"{run.path} says of its store types of nodes and edges that are none") from error
    model = with_decoder(settings, _construct_model(settings, sizes, types), types)
    try:
        model.load_state_dict(weights)
    except RuntimeError as error:
        raise RunError(f"the weights in {run.path} are not of the model that its configuration describes") from error
    return model.eval()


class _Sizes(NamedTuple):
    """The counts of the store that a model is built for."""

    features: int
    classes: int
    edge_features: int
    graphs: int


def _x_columns(features: int, source: Mapping[str, Any]) -> int:
    """Return how many of a store's ``features`` columns are x; its ``source`` says what other inputs lie beside x."""
    inputs = source.get("inputs")
    return next((columns for name, columns, _ in inputs if name == "x"), 0) if inputs else features


def _construct_model(settings: TrainSettings, sizes: _Sizes, types: Types | None) -> nn.Module:
    columns = input_columns(settings, sizes.features, types)
    outputs = sizes.classes if settings.links is None else settings.hidden
    made = _user_model_factory(settings.model)
    if made is not None:
        return _user_model(made, settings, columns, sizes._replace(classes=outputs), types)
    if types is not None:
        return _relational_model(settings, columns, outputs, types)
    features = columns[""]
    if settings.model in MODELS_FOR_TYPES_ALONE:
        raise OptionError(f"--model {settings.model} is for graphs with types of nodes and edges; this one has none")
    if not sizes.graphs:
        return _homogeneous_model(settings, features, outputs, sizes.edge_features)
    from ooc.models import Pooled

    gnn = _homogeneous_model(settings, features, settings.hidden, sizes.edge_features)
    return Pooled(gnn, settings.hidden, outputs, pool=settings.pool, paths=settings.paths, hops=settings.hops)


def _homogeneous_model(settings: TrainSettings, features: int, outputs: int, edge_features: int) -> nn.Module:
    """Return one of PyG's basic GNN models, for a graph without types."""
    from torch_geometric.nn.models import GAT, GCN, GIN, GraphSAGE

    from ooc.models import Residual, Transformer

    kinds: dict[str, tuple[type[BasicGNN], dict[str, Any]]] = {
        "gcn": (GCN, {}),
        "sage": (GraphSAGE, {}),
        "gin": (GIN, {}),
        # ELU is what the paper of GAT puts between layers.
        "gat": (GAT, {"act": "elu"}),
        "gatv2": (GAT, {"act": "elu", "v2": True}),
        "transformer": (Transformer, {}),
    }
    kind, options = kinds[settings.model]
    common = {"num_layers": settings.layers, "dropout": settings.dropout, **options}
    common |= _edge_arguments(settings, edge_features)
    width, norm = settings.hidden, _NORMS[settings.norm]
    if settings.residual:
        if settings.jk != "none":
            raise OptionError(f"--residual is for models without jumping knowledge; --jk is {settings.jk}")
        return Residual(kind(width, width, out_channels=width, **common), features, outputs, **norm)
    jk = None if settings.jk == "none" else settings.jk
    model = kind(features, width, out_channels=outputs, jk=jk, **norm, **common)
    assert isinstance(model, nn.Module)
    return model


def _relational_model(settings: TrainSettings, columns: dict[str, int], outputs: int, types: Types) -> nn.Module:
    """Return a model for a graph with types; raise OptionError for options that such models do not have."""
    from ooc.models import Relational, RelationalAttention

    if settings.model not in MODELS_FOR_TYPES:
        names = ", ".join(MODELS_FOR_TYPES)
        raise OptionError(f"--model {settings.model} is for graphs of one type; for those with types there are {names}")
    if bare := [name for name in types.nodes if name not in columns]:
        raise OptionError(f"nodes {bare[0]!r} have no features; train an embedding of them, --embedding 64")
    refuse(settings, _HOMOGENEOUS_ONLY, "is not for graphs with types; a model of your own may have it")
    heads = _heads_argument(settings)
    edge_types = [(one.source, one.relation, one.target) for one in types.edges]
    shape = columns, edge_types, settings.hidden, settings.layers, outputs
    link_type = edge_type(settings)
    ends = types.labelled if link_type is None else tuple(dict.fromkeys((link_type[0], link_type[2])))
    common: dict[str, Any] = {"target": ends, "dropout": settings.dropout, **heads}
    if heads:
        return RelationalAttention(*shape, by_type=settings.model == "han", **common)
    return Relational(*shape, roots=settings.model == "sage", **common)


def _edge_arguments(settings: TrainSettings, edge_features: int) -> dict[str, Any]:
    """Return the arguments for attention heads, aggregation and edge features, for models that have them.

    Raise OptionError for heads or an aggregation that the model lacks. Edge data that it cannot use is refused when the
    model is lowered.
    """
    options = _heads_argument(settings)
    if options and edge_features and settings.edge_data_left_out not in ("features", "all"):
        options["edge_dim"] = edge_features
    if settings.aggr != "auto":
        if settings.model not in MODELS_WITH_AGGREGATION:
            raise OptionError(f"--aggr is of {', '.join(sorted(MODELS_WITH_AGGREGATION))}, not of {settings.model}")
        options["aggr"] = settings.aggr
    return options


def _heads_argument(settings: TrainSettings) -> dict[str, Any]:
    """Return the ``heads`` argument of a model with attention; OptionError where the model or its width forbids it."""
    if settings.model not in MODELS_WITH_HEADS:
        refuse(settings, ["heads"], f"is of {', '.join(sorted(MODELS_WITH_HEADS))}; {settings.model} has none")
        return {}
    if settings.hidden % settings.heads:
        raise OptionError(f"--hidden {settings.hidden} is not a multiple of --heads {settings.heads}")
    return {"heads": settings.heads}


# ---- a model of the user's own --------------------------------------------------------------------------------------


_MODEL_PARAMETERS = {
    "hidden": "hidden_channels",
    "layers": "num_layers",
    "dropout": "dropout",
    "heads": "heads",
    "norm": "",
    "jk": "",
    "aggr": "",
    "residual": "",
    "pool": "pool",
}
"""By option, the parameter that passes it to a model of the user's own; empty where such a model decides for itself."""


def user_model_digest(model: str) -> str | None:
    """Return the SHA-256 digest of the file of a model of the user's own; None for a model that comes with ooc."""
    own = user_model_of(model)
    if own is None:
        return None
    try:
        return hashlib.sha256(own[0].read_bytes()).hexdigest()
    except OSError as error:
        raise OptionError(f"--model {model}: {error.strerror or error}{did_you_mean_path(own[0])}") from error


def _user_model_factory(model: str) -> Callable[..., Any] | None:
    """Return the callable that makes a model of the user's own, running its file once; None for a model of ooc's."""
    own = user_model_of(model)
    digest = user_model_digest(model)
    return None if own is None or digest is None else _run_file(*own, digest)


@cache
def _run_file(path: Path, name: str, digest: str) -> Callable[..., Any]:
    module_name = f"ooc_own_{digest[:16]}"
    spec = importlib.util.spec_from_file_location(module_name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module  # PyG's layers look up their own module there
    sys.path.insert(0, str(path.parent))  # as for a script: files beside it can be imported
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[module_name]
        raise ModelError(f"{path} cannot be run: {type(error).__name__}: {error}") from error
    finally:
        sys.path.remove(str(path.parent))
    made: Callable[..., Any] | None = getattr(module, name, None)
    if not callable(made):
        names = [one for one, value in vars(module).items() if isinstance(value, type) and issubclass(value, nn.Module)]
        raise ModelError(f"{path} has nothing called {name} that makes a model{did_you_mean(name, names)}")
    return made


def _user_model(
    make: Callable[..., Any], settings: TrainSettings, columns: dict[str, int], sizes: _Sizes, types: Types | None
) -> nn.Module:
    """Return the model that ``make`` makes of the options, under PyG's names, that it has parameters for.

    ``columns`` are those of the input; ``sizes`` has those of the output. For a graph with types, ``in_channels`` is a
    dict by node type, and ``metadata`` is offered too.
    """
    offered: dict[str, Any] = {
        "in_channels": columns if types is not None else columns[""],
        "out_channels": sizes.classes,
        "hidden_channels": settings.hidden,
        "num_layers": settings.layers,
        "dropout": settings.dropout,
        "heads": settings.heads,
        "edge_dim": sizes.edge_features or None,
    }
    if types is not None:
        offered["metadata"] = [*types.nodes], [tuple(one) for one in types.edges]
        offered["edge_dim"] = {tuple(one): count for one, count in types.edge_features.items()} or None
    if sizes.graphs:
        offered |= {"pool": settings.pool, "paths": settings.paths, "hops": settings.hops}
    parameters = inspect.signature(make).parameters
    plain = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    taken = {name: value for name, value in offered.items() if name in parameters and parameters[name].kind in plain}
    name = model_name(settings.model)
    needed = [one.name for one in parameters.values() if one.kind in plain and one.default is one.empty]
    if missing := [one for one in needed if one not in taken]:
        raise ModelError(f"{name} wants {', '.join(missing)}; what it can be given are {', '.join(offered)}")
    for option, parameter in _MODEL_PARAMETERS.items():
        wanted = f"; let it take {parameter}" if parameter else ""
        if parameter not in taken:
            refuse(settings, (option,), f"says nothing to {name}, a model of your own{wanted}")
    try:
        model = make(**taken)
    except Exception as error:
        raise ModelError(f"{name} cannot be made: {type(error).__name__}: {error}") from error
    if not isinstance(model, nn.Module):
        raise ModelError(f"{name} makes a {type(model).__name__}, not a torch.nn.Module")
    return model


# ---- how it is trained ----------------------------------------------------------------------------------------------


def build_loss(settings: TrainSettings, store: "Store") -> nn.Module | None:
    """Return the loss that the options describe; None means the usual loss for the store's labels."""
    refined = settings.label_smoothing > 0 or settings.class_weights != "none"
    if refined and not (settings.loss in ("auto", "cross-entropy") and store.task is Task.CLASSES):
        raise OptionError("--label-smoothing and --class-weights are of cross-entropy, for one class a node")
    if refined or settings.loss == "cross-entropy":
        weight = _class_weights(settings.class_weights, store)
        return nn.CrossEntropyLoss(weight=weight, label_smoothing=settings.label_smoothing)
    return None if settings.loss == "auto" else getattr(nn, LOSSES[settings.loss])()


def _class_weights(asked: str, store: "Store") -> torch.Tensor | None:
    """Return one weight for each class, as ``asked`` for. ``balanced`` weights are scikit-learn's, n / (C · n_c): each
    of the C classes with training rows counts alike, and their mean over all n training rows is 1."""
    if asked == "none":
        return None
    if asked != "balanced":
        given = [float(part) for part in asked.split(",")]
        if len(given) != store.num_classes:
            raise OptionError(f"--class-weights has {len(given)} weights, {store.path} has {store.num_classes} classes")
        return torch.tensor(given)
    counts = training_classes(store)
    present = int((counts > 0).sum())
    weights = store.split_sizes["train"] / (present * counts.clamp(min=1).double())
    return torch.where(counts > 0, weights, 0.0).float()


def build_average(settings: TrainSettings, model: nn.Module) -> AveragedModel | None:
    """Return the average of the weights that is scored in the model's place; OptionError for options without effect."""
    refuse(settings, ["average_decay"] if settings.average != "ema" else [], "is of --average ema")
    refuse(settings, ["average_from"] if settings.average == "none" else [], "is of --average ema or swa")
    if settings.average == "ema":
        moving_average: Any = get_ema_multi_avg_fn
        return AveragedModel(model, multi_avg_fn=moving_average(settings.average_decay))
    return AveragedModel(model) if settings.average == "swa" else None


def graph_bounds(settings: TrainSettings) -> "GraphBounds":
    """Return the bounds on batches of many graphs."""
    from ooc.train.batched.graphs import GraphBounds

    return GraphBounds(**{one.name: getattr(settings, one.name) for one in fields(GraphBounds)})


def links_of(settings: TrainSettings) -> "Links":
    """Return the links to train on and to score."""
    from ooc.train.links.sets import Links

    assert settings.links is not None
    asked: dict[str, Any] = {"filtered": settings.filtered, "edge_type": edge_type(settings)}
    return replace(Links.read(settings.links), negatives=settings.ranked, **asked)


def build_trainer(
    settings: TrainSettings, store: "Store", run: "RunFolder", metric: "Metric | LinkMetric", listener: "Listener"
) -> "Trainer":
    """Return the trainer of the model that the options describe; its events go to ``listener``."""
    from ooc.train.batched.batches import SampledTrainer, Sampling
    from ooc.train.batched.graphs import GraphTrainer
    from ooc.train.links.trainer import LinkTrainer
    from ooc.train.trainer import Trainer

    model = with_decoder(settings, build_model(settings, store), store.types)
    optimizer = build_optimizer(settings, model)
    kind: Callable[..., Trainer] = Trainer
    if settings.links is not None:
        kind = partial(LinkTrainer, links=links_of(settings), negatives=settings.negatives, steps=settings.link_steps)
    elif store.num_graphs:
        kind = partial(GraphTrainer, **asdict(graph_bounds(settings)), accumulate=settings.accumulate)
    elif settings.sampler != "none":
        size = settings.batch_size or _BATCH_NODES
        drawn = Sampling(fanouts=settings.drawn, batch_size=size, accumulate=settings.accumulate)
        kind = partial(SampledTrainer, sampling=drawn)
    return kind(
        model,
        store,
        optimizer=optimizer,
        loss=build_loss(settings, store),
        out=run,
        metric=metric.value,
        scheduler=build_schedule(settings, optimizer, rising=metric.higher_is_better),
        clip_norm=settings.clip,
        average=build_average(settings, model),
        embedding=build_embedding(settings),
        listener=listener,
        compute_dtype=settings.dtype,
        ignore_edge_data=settings.edge_data_left_out,
        **{name: getattr(settings, name) for name in _PASSED_TO_TRAINER},
    )


# ---- optimizers, schedules and embeddings ---------------------------------------------------------------------------


_SGD_MOMENTUM = 0.9
_SCHEDULES_BY_OPTION = {"step_every": ("step",), "lr_factor": ("step", "plateau"), "plateau_patience": ("plateau",)}
"""By option, the values of ``--schedule`` that use it."""
_EMBEDDING_OPTIONS = ("embedding_optimizer", "embedding_lr", "embedding_option")
_OPTIMIZER_REFUSALS = {
    "lr": "give --lr",
    "weight_decay": "give --weight-decay",
    **dict.fromkeys(("foreach", "fused", "capturable", "differentiable"), "it changes how steps are taken, not which"),
}
_SCHEDULE_REFUSALS = {
    "optimizer": "it is --optimizer",
    "last_epoch": "the run knows it",
    "verbose": "torch has given it up",
}
_TORCH_ERRORS = (TypeError, ValueError, RuntimeError, ArithmeticError, AttributeError, LookupError)
"""The exceptions torch raises for arguments that it does not accept."""
_CONSTANTS = {"true": True, "false": False, "none": None}


def build_optimizer(settings: TrainSettings, model: nn.Module) -> torch.optim.Optimizer:
    """Return the optimizer over all parameters, tried on a small model first; OptionError for what torch refuses."""
    kind = _class_named(torch.optim, settings.optimizer)
    values = optimizer_options(settings)
    small = _small_model()
    _try_step(_construct(kind, "--optimizer-option", small.parameters(), values), "--optimizer-option", [])
    optimizer = _construct(kind, "--optimizer-option", model.parameters(), values)
    assert isinstance(optimizer, torch.optim.Optimizer)
    return optimizer


def optimizer_options(settings: TrainSettings) -> dict[str, Any]:
    """Return the arguments of torch's optimizer, without the parameters."""
    kind = _class_named(torch.optim, settings.optimizer)
    values: dict[str, Any] = {"lr": settings.lr}
    if "weight_decay" in inspect.signature(kind).parameters:
        values["weight_decay"] = settings.weight_decay
    elif settings.weight_decay:
        raise OptionError(f"{kind.__name__} has no weight decay; leave out --weight-decay")
    if kind is torch.optim.SGD:
        values["momentum"] = _SGD_MOMENTUM
    given = _parse_arguments(
        settings.optimizer_option, "--optimizer-option", kind, _OPTIMIZER_REFUSALS | {"params": "it is the model"}
    )
    return values | given


def build_embedding(settings: TrainSettings) -> Embedding | None:
    """Return the embedding trained for every node; None where there is none, and OptionError for its options then."""
    if not settings.embedding:
        refuse(settings, _EMBEDDING_OPTIONS, "is of an embedding; give --embedding COLUMNS, too")
        return None
    kind, option = _class_named(torch.optim, settings.embedding_optimizer), "--embedding-option"
    spread = [text for text in settings.embedding_option if text.partition("=")[0] == "std"]
    others = [text for text in settings.embedding_option if text not in spread]
    values = _parse_arguments(others, option, kind, {"lr": "give --embedding-lr", "params": "it is the embedding"})
    std = _parse_value(spread[-1].partition("=")[2], f"{option} {spread[-1]}") if spread else 1.0
    if not isinstance(std, int | float):
        raise OptionError(f"{option} {spread[-1]}: it must be a number")
    widths: int | str | dict[str, int] = settings.embedding
    if isinstance(widths, str):
        widths = {name: int(count) for name, _, count in (part.rpartition("=") for part in widths.split(","))}
    return Embedding(widths, optimizer=settings.embedding_optimizer, lr=settings.embedding_lr, std=std, **values)


def build_schedule(settings: TrainSettings, optimizer: torch.optim.Optimizer, *, rising: bool) -> list[Scheduler]:
    """Return the learning rate's schedule; OptionError for another's options. ``rising``: higher scores are better."""
    for name, kinds in _SCHEDULES_BY_OPTION.items():
        refuse(settings, [name] if settings.schedule not in kinds else [], f"is of --schedule {' or '.join(kinds)}")
    warmup, epochs = settings.warmup, settings.schedule_epochs or settings.epochs
    if settings.schedule in ("none", "cosine", "step", "plateau"):
        of_torch = f"is of torch's schedules, such as ExponentialLR; not of {settings.schedule}"
        refuse(settings, ["schedule_option"], of_torch)
    match settings.schedule:
        case "none":
            return [by_factor(optimizer, constant, warmup=warmup)] if warmup else []
        case "cosine":
            if warmup >= epochs:
                raise OptionError(f"--warmup {warmup} leaves nothing of the schedule's {epochs} epochs")
            return [by_factor(optimizer, cosine(epochs - warmup), warmup=warmup)]
        case "step":
            return [by_factor(optimizer, steps(settings.step_every, settings.lr_factor), warmup=warmup)]
        case "plateau":
            mode: Any = "max" if rising else "min"
            options: dict[str, Any] = {"factor": settings.lr_factor, "patience": settings.plateau_patience}
            plateau = ReduceLROnPlateau(optimizer, mode, **options)
            # Both scale the current learning rate, so their effects combine.
            rise = LinearLR(optimizer, 1 / warmup, total_iters=warmup - 1) if warmup > 1 else None
            return [plateau] if rise is None else [rise, plateau]
        case name:
            if warmup:
                raise OptionError(f"--warmup goes with none, cosine, step and plateau, not with {name}")
            return [_torch_schedule(settings, optimizer, epochs, rising=rising)]


def _torch_schedule(
    settings: TrainSettings, optimizer: torch.optim.Optimizer, epochs: int, *, rising: bool
) -> Scheduler:
    """Return one of torch's schedulers, after trying it for an epoch; arguments that the run knows may be left out."""
    option, kind = "--schedule-option", _class_named(lr_scheduler, settings.schedule)
    values: dict[str, Any] = {}
    settled = _SCHEDULE_REFUSALS
    if kind is lr_scheduler.CosineAnnealingLR:
        values = {"T_max": epochs}
    elif kind is lr_scheduler.OneCycleLR:
        values = {"max_lr": settings.lr, "total_steps": epochs}
    elif kind is ReduceLROnPlateau:
        values = {"mode": "max" if rising else "min"}
        settled = {**settled, "mode": "the metric decides it"}
    given = _parse_arguments(settings.schedule_option, option, kind, settled)
    if {"epochs", "steps_per_epoch"} & given.keys():
        del values["total_steps"]
    values |= given
    small = build_optimizer(settings, _small_model())
    _try_step(small, option, [_construct(kind, option, small, values)])
    made = _construct(kind, option, optimizer, values)
    assert isinstance(made, lr_scheduler.LRScheduler)
    return made


def _class_named(module: Any, name: str) -> Any:
    """Return the class of ``module`` called ``name`` in any case; raise OptionError where there is none."""
    found = next((one for one in vars(module) if one.casefold() == name.casefold() and one[0].isupper()), None)
    if found is None:
        raise OptionError(f"torch {torch.__version__} has no {name}; a later version may")
    return getattr(module, found)


def _parse_arguments(texts: Sequence[str], option: str, kind: Any, settled: Mapping[str, str]) -> dict[str, Any]:
    """Return arguments of ``kind`` from texts KEY=VALUE; ``settled`` says why some cannot be given there."""
    known = [name for name in inspect.signature(kind).parameters if name not in settled]
    found: dict[str, Any] = {}
    for text in texts:
        name, _, value = text.partition("=")
        if name in settled:
            raise OptionError(f"{option} {name}: {settled[name]}")
        if name not in known:
            hint = did_you_mean(name, known) or f"; it has {', '.join(known)}"
            raise OptionError(f"{option} {text}: {kind.__name__} has no {name}{hint}")
        if name in found:
            raise OptionError(f"{option} {name} is given twice")
        found[name] = _parse_value(value, f"{option} {text}")
    return found


def _parse_value(text: str, where: str) -> Any:
    """Return the value of ``text``: a number, a tuple of numbers such as ``0.9,0.99``, true, false, none, or a word."""
    if text.casefold() in _CONSTANTS:
        return _CONSTANTS[text.casefold()]
    try:
        value = ast.literal_eval(text)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return text
    several = value if isinstance(value, tuple | list) else [value]
    if any(isinstance(one, float) and not math.isfinite(one) for one in several):
        raise OptionError(f"{where}: it must be finite")
    return value


def _construct(kind: Any, option: str, what: Any, values: Mapping[str, Any]) -> Any:
    _, *parameters = inspect.signature(kind).parameters.items()
    if needed := [name for name, one in parameters if one.default is one.empty and name not in values]:
        raise OptionError(f"{kind.__name__} wants {' and '.join(needed)}; give {option} {needed[0]}=…")
    try:
        return kind(what, **values)
    except _TORCH_ERRORS as error:
        raise OptionError(f"{option}: {kind.__name__} says: {error}") from error


def _try_step(optimizer: torch.optim.Optimizer, option: str, schedulers: Sequence[Any]) -> None:
    """Try a step of the optimizer and of each scheduler; raise OptionError for bad arguments before the first epoch."""
    try:
        optimizer.step()
        for scheduler in schedulers:
            scheduler.step(*([0.5] if isinstance(scheduler, ReduceLROnPlateau) else []))
    except _TORCH_ERRORS as error:
        name = type((schedulers or [optimizer])[0]).__name__
        raise OptionError(f"{option}: {name} says: {error}") from error


def _small_model() -> nn.Module:
    """Return a model of a few parameters with gradients, to try an optimizer on; it draws no random numbers."""
    model = nn.ParameterList([torch.ones(2, 2), torch.ones(2)])
    for parameter in model:
        parameter.grad = torch.ones_like(parameter)
    return model
