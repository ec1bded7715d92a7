# SPDX-License-Identifier: Apache-2.0
"""A small node classifier of every layer and model of torch-geometric: how each is made, and what cannot be.

``CATALOGUE`` is what tools/models_table tries. Convolutions are made as ``Conv(inputs, outputs)`` unless something else
is said of them; norms stand between two convolutions; aggregators are a SAGEConv's. ``NOT_TRIED`` names those that no
model from features and edges to a row of numbers a node can be made of, ``OF_PRINCIPLE`` why some cannot be run exactly
in bounded memory at all.
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch_geometric import nn as pyg
from torch_geometric.utils import scatter

NODES = 60
"""Of the graph on which results are compared; some models want to know."""
EDGE_FEATURES = 3
KINDS = 4
"""Types of nodes, of layers that are told them; of edges there are as many as features."""
DEGREES = torch.tensor([0, 6, 10, 14, 12, 8, 4, 2, 1])
"""A histogram of degrees, as PNA wants one; of some other graph."""

Make = Callable[[int, int], nn.Module]
Model = Callable[[int, int, int], nn.Module]
"""features, hidden, classes."""


@dataclass(frozen=True)
class Entry:
    """How a layer's model is made, and the models that take what edges carry, by the name of the argument."""

    model: Model
    carrying: dict[str, Model]
    form: str = ""
    """What the edges of its graph carry, as it needs it; ``sorted``: by where they lead. Or that its graph has types:
    ``types``, of nodes and edges, and the model is made by the graph alone, or ``relations``, of edges by number."""


class Twice(nn.Module):
    """Two layers that ``make`` makes; ``between`` them what it says, or tanh."""

    def __init__(self, features: int, hidden: int, classes: int, make: Make, between: nn.Module | None = None) -> None:
        super().__init__()
        self.first, self.second = make(features, hidden), make(hidden, classes)
        self.between = nn.Tanh() if between is None else between

    def forward(
        self, x: Tensor, edge_index: Tensor, edge_weight: Tensor | None = None, edge_attr: Tensor | None = None
    ) -> Tensor:
        carried: dict[str, Tensor] = {}
        if edge_weight is not None:
            carried["edge_weight"] = edge_weight
        if edge_attr is not None:
            carried["edge_attr"] = edge_attr
        x = self.between(self.first(x, edge_index, **carried))
        return self.second(x, edge_index, **carried)


def twice(make: Make) -> Model:
    """A model of two such layers."""
    return partial(Twice, make=make)


class Framed(nn.Module):
    """A layer of given width with linear maps before and behind it; ``call(layer, x, edge_index, carried)``."""

    def __init__(
        self, inputs: int, outputs: int, layer: nn.Module, widths: tuple[int, int], call: Callable[..., Tensor]
    ) -> None:
        super().__init__()
        self.before, self.after = nn.Linear(inputs, widths[0]), nn.Linear(widths[1], outputs)
        self.layer, self.call = layer, call

    def forward(self, x: Tensor, edge_index: Tensor | None = None, **carried: Tensor) -> Tensor:
        return self.after(self.call(self.layer, self.before(x), edge_index, carried))


def _plain(layer: nn.Module, x: Tensor, edge_index: Tensor, carried: dict[str, Tensor]) -> Any:
    return layer(x, edge_index, **carried)


def _with_start(layer: nn.Module, x: Tensor, edge_index: Tensor, carried: dict[str, Tensor]) -> Any:
    return layer(x.tanh(), x, edge_index, **carried)


def _with_positions(layer: nn.Module, x: Tensor, edge_index: Tensor, carried: dict[str, Tensor]) -> Any:
    return layer(x, x[:, :3], edge_index)


def _with_normals(layer: nn.Module, x: Tensor, edge_index: Tensor, carried: dict[str, Tensor]) -> Any:
    return layer(x, x[:, :3], x[:, 1:4], edge_index)


def _of_layers(layer: nn.Module, x: Tensor, edge_index: Tensor, carried: dict[str, Tensor]) -> Any:
    return layer(torch.stack([x, x.tanh()], dim=1), edge_index, **carried)


def _as_one_batch(layer: nn.Module, x: Tensor, edge_index: Tensor, carried: dict[str, Tensor]) -> Any:
    return layer(x, edge_index, torch.zeros(x.size(0), dtype=torch.long))


def _as_one_graph(layer: nn.Module, x: Tensor, edge_index: Tensor, carried: dict[str, Tensor]) -> Any:
    return layer(x, edge_index, None)


def _encoder_first(layer: nn.Module, x: Tensor, edge_index: Tensor, carried: dict[str, Tensor]) -> Any:
    return layer[1](layer[0](x, x.tanh()), edge_index)


def _itself_beside(layer: nn.Module, x: Tensor, edge_index: Tensor, carried: dict[str, Tensor]) -> Any:
    return layer(x, x.tanh())


def _first(layer: nn.Module, x: Tensor, edge_index: Tensor, carried: dict[str, Tensor]) -> Any:
    return layer(x, edge_index)[0]


def framed(layer: Callable[[int], nn.Module], call: Callable[..., Any] = _plain, wider: int = 1) -> Make:
    """Layers that are as wide as what is wanted, and give ``wider`` times that."""
    return lambda inputs, width: Framed(inputs, width, layer(width), (width, wider * width), call)


class OfTypes(nn.Module):
    """Two layers for graphs with types, between linear maps; ``jump`` makes one row of all that there were."""

    def __init__(
        self, data: Any, make: Callable[[int, Any], nn.Module], jump: nn.Module | None = None, width: int = 8
    ) -> None:
        super().__init__()
        self.lift = pyg.HeteroDictLinear({kind: data[kind].x.shape[1] for kind in data.node_types}, width)
        self.layers = nn.ModuleList(make(width, data.metadata()) for _ in range(2))
        self.jump, self.out = jump, nn.Linear(width, int(data["paper"].y.max()) + 1)

    def forward(self, x_dict: dict[str, Tensor], edge_index_dict: dict[Any, Tensor]) -> Tensor:
        seen = [self.lift(x_dict)]
        for layer in self.layers:
            found = layer({kind: x.tanh() for kind, x in seen[-1].items()}, edge_index_dict)
            seen.append({**seen[-1], **{kind: x for kind, x in found.items() if x is not None}})
        if self.jump is not None:
            seen.append(self.jump({kind: [one[kind] for one in seen] for kind in x_dict}))
        return self.out(seen[-1]["paper"])


class OfRelations(nn.Module):
    """Two layers that are given the numbers of the edges' types."""

    def __init__(self, features: int, hidden: int, classes: int, conv: type[nn.Module]) -> None:
        super().__init__()
        self.first, self.second = conv(features, hidden, 6), conv(hidden, classes, 6)

    def forward(self, x: Tensor, edge_index: Tensor, edge_type: Tensor) -> Tensor:
        return self.second(self.first(x, edge_index, edge_type).tanh(), edge_index, edge_type)


class Told(nn.Module):
    """Two layers that are told the type of each node and edge: which of some columns is largest."""

    def __init__(self, features: int, hidden: int, classes: int, make: Make, norm: nn.Module | None = None) -> None:
        super().__init__()
        self.first, self.second, self.norm = make(features, hidden), make(hidden, classes), norm

    def forward(self, x: Tensor, edge_index: Tensor, edge_attr: Tensor | None = None) -> Tensor:
        kinds = x[:, :KINDS].argmax(dim=1)
        given = () if edge_attr is None else (kinds, edge_attr.argmax(dim=1), edge_attr)
        x = self.first(x, edge_index, *given)
        return self.second(x.tanh() if self.norm is None else self.norm(x, kinds).relu(), edge_index, *given)


def mlp(inputs: int, outputs: int) -> nn.Module:
    """A network without a norm."""
    return nn.Sequential(nn.Linear(inputs, outputs), nn.Tanh())


F = EDGE_FEATURES
C: Any = pyg.conv
_CONVS: dict[str, Make] = {
    "SimpleConv": framed(lambda w: C.SimpleConv()),
    "ChebConv": lambda i, o: C.ChebConv(i, o, K=3),
    "GatedGraphConv": framed(lambda w: C.GatedGraphConv(w, num_layers=2)),
    "AGNNConv": framed(lambda w: C.AGNNConv()),
    "GINConv": lambda i, o: C.GINConv(mlp(i, o)),
    "SSGConv": lambda i, o: C.SSGConv(i, o, alpha=0.1, K=2),
    "APPNP": framed(lambda w: C.APPNP(K=2, alpha=0.1)),
    "FiLMConv": C.FiLMConv,
    "DNAConv": framed(lambda w: C.DNAConv(w, heads=2), _of_layers),
    "PointNetConv": framed(lambda w: C.PointNetConv(mlp(w + 3, w)), _with_positions),
    "PPFConv": framed(lambda w: C.PPFConv(mlp(w + 4, w)), _with_normals),
    "PointTransformerConv": framed(lambda w: C.PointTransformerConv(w, w), _with_positions),
    "PointGNNConv": framed(lambda w: C.PointGNNConv(mlp(w, 3), mlp(w + 3, w), mlp(w, w)), _with_positions),
    "EdgeConv": lambda i, o: C.EdgeConv(mlp(2 * i, o)),
    "PNAConv": lambda i, o: C.PNAConv(i, o, ["mean", "std", "max"], ["identity", "amplification"], DEGREES),
    "GCN2Conv": framed(lambda w: C.GCN2Conv(w, alpha=0.1, theta=0.5, layer=1), _with_start),
    "FAConv": framed(lambda w: C.FAConv(w), _with_start),
    "PANConv": framed(lambda w: C.PANConv(w, w, filter_size=2), _first),
    "WLConvContinuous": framed(lambda w: C.WLConvContinuous()),
    "EGConv": framed(lambda w: C.EGConv(w, w, num_heads=2)),
    "CGConv": framed(lambda w: C.CGConv(w)),
    "LGConv": framed(lambda w: C.LGConv()),
    "GPSConv": framed(lambda w: C.GPSConv(w, C.SAGEConv(w, w), heads=2, attn_type="performer")),
    "AntiSymmetricConv": framed(lambda w: C.AntiSymmetricConv(w)),
    "DirGNNConv": lambda i, o: C.DirGNNConv(C.SAGEConv(i, o)),
    "MixHopConv": framed(lambda w: C.MixHopConv(w, w, powers=[0, 1, 2]), wider=3),
}
_WITH_FEATURES: dict[str, Make] = {
    "ResGatedGraphConv": lambda i, o: C.ResGatedGraphConv(i, o, edge_dim=F),
    "GATConv": lambda i, o: C.GATConv(i, o, edge_dim=F),
    "GATv2Conv": lambda i, o: C.GATv2Conv(i, o, edge_dim=F),
    "TransformerConv": lambda i, o: C.TransformerConv(i, o, edge_dim=F),
    "GINEConv": lambda i, o: C.GINEConv(mlp(i, o), edge_dim=F),
    "GMMConv": lambda i, o: C.GMMConv(i, o, dim=F, kernel_size=2),
    "SplineConv": lambda i, o: C.SplineConv(i, o, dim=F, kernel_size=2),
    "NNConv": lambda i, o: C.NNConv(i, o, nn.Linear(F, i * o)),
    "CGConv": framed(lambda w: C.CGConv(w, dim=F)),
    "PNAConv": lambda i, o: C.PNAConv(i, o, ["mean", "std", "max"], ["identity"], DEGREES, edge_dim=F),
    "GENConv": lambda i, o: C.GENConv(i, o, edge_dim=F),
    "PDNConv": lambda i, o: C.PDNConv(i, o, edge_dim=F, hidden_channels=4),
    "GeneralConv": lambda i, o: C.GeneralConv(i, o, in_edge_channels=F),
}
_WITH_WEIGHTS: dict[str, Make] = {"FAConv": framed(lambda w: C.FAConv(w, normalize=False), _with_start)}
"""Where weights want other options."""
_NEED_FEATURES = {"GINEConv", "GMMConv", "SplineConv", "NNConv", "PDNConv"}

_NORMS: dict[str, Callable[[int], nn.Module]] = {
    "GraphSizeNorm": lambda w: pyg.GraphSizeNorm(),
    "PairNorm": lambda w: pyg.PairNorm(),
    "MeanSubtractionNorm": lambda w: pyg.MeanSubtractionNorm(),
    "MessageNorm": lambda w: pyg.MessageNorm(learn_scale=True),
    "DiffGroupNorm": lambda w: pyg.DiffGroupNorm(w, groups=3),
}

A: Any = pyg.aggr
_AGGREGATORS: dict[str, Callable[[int], tuple[Any, dict[str, Any], int]]] = {
    "MultiAggregation": lambda w: (["mean", "max", "std"], {}, 1),
    "SoftmaxAggregation": lambda w: ("softmax", {"learn": True}, 1),
    "PowerMeanAggregation": lambda w: ("powermean", {"learn": True}, 1),
    "QuantileAggregation": lambda w: ("quantile", {"q": 0.3}, 1),
    "LSTMAggregation": lambda w: ("lstm", {}, 1),
    "GRUAggregation": lambda w: ("gru", {"in_channels": w, "out_channels": w}, 1),
    "Set2Set": lambda w: (A.Set2Set(w, processing_steps=2), {}, 2),
    "DegreeScalerAggregation": lambda w: (
        A.DegreeScalerAggregation(["mean", "max"], ["identity", "amplification"], DEGREES), {}, 4),
    "SortAggregation": lambda w: (A.SortAggregation(k=2), {}, 2),
    "GraphMultisetTransformer": lambda w: (A.GraphMultisetTransformer(w, k=2), {}, 1),
    "AttentionalAggregation": lambda w: (A.AttentionalAggregation(nn.Linear(w, 1)), {}, 1),
    "EquilibriumAggregation": lambda w: (A.EquilibriumAggregation(w, w, [4], grad_iter=1), {}, 1),
    "MLPAggregation": lambda w: (A.MLPAggregation(w, w, max_num_elements=64, num_layers=1), {}, 1),
    "DeepSetsAggregation": lambda w: (A.DeepSetsAggregation(mlp(w, w), mlp(w, w)), {}, 1),
    "SetTransformerAggregation": lambda w: (A.SetTransformerAggregation(w), {}, 1),
    "LCMAggregation": lambda w: (A.LCMAggregation(w, w), {}, 1),
    "VariancePreservingAggregation": lambda w: (A.VariancePreservingAggregation(), {}, 1),
    "PatchTransformerAggregation": lambda w: (A.PatchTransformerAggregation(w, w, patch_size=2, hidden_channels=w),
                                              {}, 1),
}  # fmt: skip
"""``aggr``, ``aggr_kwargs``, and how many times as wide its result is; those with neither are named as SAGEConv's."""


def _sage(name: str, inputs: int, outputs: int) -> nn.Module:
    short = name.removesuffix("Aggregation").lower()
    aggr, options, wider = _AGGREGATORS.get(name, lambda w: (short, {}, 1))(inputs)
    return C.SAGEConv((wider * inputs, inputs), outputs, aggr=aggr, **({"aggr_kwargs": options} if options else {}))


class NodeModel(nn.Module):
    """What a MetaLayer makes of nodes, as its documentation has it."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.of_edges, self.of_nodes = nn.Linear(inputs, outputs), nn.Linear(inputs + outputs, outputs)

    def forward(self, x: Tensor, edge_index: Tensor, *others: Any) -> Tensor:
        row, col = edge_index
        mean = scatter(self.of_edges(x[row]).tanh(), col, dim=0, dim_size=x.size(0), reduce="mean")
        return self.of_nodes(torch.cat([x, mean], dim=1))


def _deep(width: int) -> nn.Module:
    return M.DeepGCNLayer(C.GENConv(width, width, norm="layer"), nn.LayerNorm(width), nn.ReLU())


def _encoder(width: int) -> nn.Module:
    encoder = M.GPSENodeEncoder(width, width, 2, width, expand_x=True, dropout_be=0.0, dropout_ae=0.0)
    return nn.ModuleList([encoder, C.SAGEConv(width, width)])


def _polynormer(width: int, attends: bool = False) -> nn.Module:
    dropouts = dict.fromkeys(("in_dropout", "dropout", "global_dropout"), 0.0)
    model = M.Polynormer(width, width, width, local_layers=2, **dropouts)
    model._global = attends  # as its documentation has one switch over
    return model


def _linkx(features: int, hidden: int, classes: int) -> nn.Module:
    return M.LINKX(NODES, features, hidden, classes, num_layers=2)


def _jumping(mode: str, features: int, hidden: int, classes: int) -> nn.Module:
    return M.GCN(features, hidden, 3, classes, jk=mode)


M: Any = pyg.models
_PNA = {"aggregators": ["mean", "max", "std"], "scalers": ["identity", "amplification"], "deg": DEGREES}
_MODELS: dict[str, Model] = {
    "MLP": lambda f, h, c: Twice(f, h, c, C.SAGEConv, M.MLP([h, h, h])),
    **{
        name: partial(lambda kind, f, h, c, **options: kind(f, h, 2, c, **options), getattr(M, name), **options)
        for name, options in {"GCN": {}, "GraphSAGE": {}, "GIN": {}, "GAT": {}, "PNA": _PNA, "EdgeCNN": {}}.items()
    },
    "JumpingKnowledge, cat": partial(_jumping, "cat"),
    "JumpingKnowledge, max": partial(_jumping, "max"),
    "JumpingKnowledge, lstm": partial(_jumping, "lstm"),
    "MetaLayer": twice(framed(lambda w: M.MetaLayer(node_model=NodeModel(w, w)), _first)),
    "GPSENodeEncoder": twice(framed(_encoder, _encoder_first)),
    "DeepGCNLayer": twice(framed(_deep)),
    "RECT_L": twice(framed(lambda w: M.RECT_L(w, w))),
    "LINKX": _linkx,
    "GroupAddRev": twice(framed(lambda w: M.GroupAddRev(C.SAGEConv(w // 2, w // 2), num_groups=2))),
    "PMLP": lambda f, h, c: M.PMLP(f, h, c, num_layers=2),
    "SGFormer": twice(framed(lambda w: M.SGFormer(w, w, w, trans_dropout=0.0, gnn_dropout=0.0), _as_one_batch)),
    "Polynormer, local": twice(framed(_polynormer, _as_one_graph)),
    "Polynormer, global": twice(framed(partial(_polynormer, attends=True), _as_one_batch)),
}  # fmt: skip
_MODELS_CARRYING = {
    "GCN": {"edge_weight": _MODELS["GCN"]},
    "GAT": {"edge_attr": lambda f, h, c: M.GAT(f, h, 2, c, edge_dim=F)},
    "PNA": {"edge_attr": lambda f, h, c: M.PNA(f, h, 2, c, edge_dim=F, **_PNA)},
    "RECT_L": {"edge_weight": _MODELS["RECT_L"]},
}


def _relations(width: int, metadata: Any) -> nn.Module:
    return pyg.HeteroConv({kind: C.SAGEConv((width, width), width) for kind in metadata[1]})


_OF_TYPES: dict[str, Callable[[Any], nn.Module]] = {
    "HeteroConv": partial(OfTypes, make=_relations),
    "HGTConv": partial(OfTypes, make=lambda width, metadata: C.HGTConv(width, width, metadata, heads=2)),
    "HANConv": partial(OfTypes, make=lambda width, metadata: C.HANConv(width, width, metadata, heads=2)),
}


def _jumping_of_types(data: Any, width: int = 8) -> nn.Module:
    return OfTypes(data, _relations, pyg.HeteroJumpingKnowledge(data.node_types, "max"), width)


def _convolution(name: str) -> Entry:
    kind = getattr(C, name)
    if name in _OF_TYPES:
        return Entry(_OF_TYPES[name], {}, form="types")
    if name in ("RGCNConv", "FastRGCNConv", "RGATConv"):
        return Entry(partial(OfRelations, conv=kind), {}, form="relations")
    if name == "HEATConv":
        return Entry(partial(Told, make=lambda i, o: kind(i, o, KINDS, F, 4, F, 4)), {}, form="edge_attr")
    make = _CONVS.get(name, kind)
    carrying = {}
    if "edge_weight" in inspect.signature(kind.forward).parameters:
        carrying["edge_weight"] = twice(_WITH_WEIGHTS.get(name, make))
    if name in _WITH_FEATURES:
        carrying["edge_attr"] = twice(_WITH_FEATURES[name])
    if name in _NEED_FEATURES:
        return Entry(carrying["edge_attr"], {}, form="edge_attr")
    return Entry(twice(make), carrying)


def _norm(name: str) -> Entry:
    make = _NORMS.get(name, getattr(pyg.norm, name))
    if name.startswith("Hetero"):
        return Entry(lambda f, h, c: Told(f, h, c, C.SAGEConv, make(h, KINDS)), {})
    if name == "MessageNorm":
        return Entry(lambda f, h, c: Twice(f, h, c, C.SAGEConv, framed(make, _itself_beside)(h, h)), {})
    return Entry(lambda f, h, c: Twice(f, h, c, C.SAGEConv, nn.Sequential(make(h), nn.ReLU())), {})


GROUPS: dict[str, Any] = {"Convolutions": C, "Norms": pyg.norm, "Aggregators": A, "Ready models": M}


def catalogue() -> dict[str, dict[str, Entry]]:
    """Everything that is tried, by group and name."""
    found: dict[str, dict[str, Entry]] = {group: {} for group in GROUPS}
    for group, module in GROUPS.items():
        for name in module.__all__:
            if name in NOT_TRIED:
                continue
            if module is C:
                found[group][name] = _convolution(name)
            elif module is A:
                found[group][name] = Entry(twice(partial(_sage, name)), {}, form="sorted")
            elif module is M:
                if name == "HeteroJumpingKnowledge":
                    found[group][name] = Entry(_jumping_of_types, {}, form="types")
                for label in (key for key in _MODELS if key.partition(",")[0] == name):
                    found[group][label] = Entry(_MODELS[label], _MODELS_CARRYING.get(label, {}))
            else:
                found[group][name] = _norm(name)
    return found


_LINKS = "otherwise", "its loss is of links: its encoder trains as any model, or by links (links.md)"
_VARIATIONAL = "otherwise", "its loss is of links, and a number a row: an encoder that gives both (links.md)"
_AR = "otherwise", "its loss is of links: what it encodes to side by side, with a decoder of one's own (links.md)"
_ADVERSARIAL = (
    "principle",
    "has no one loss: an encoder and a discriminator are trained against each other; its encoder trains as any model",
)
_BASE = "nothing to train", "a base class"
_TOOL = "nothing to train", "no parameters"
_NEAREST = "principle", "builds a graph anew, of the nearest neighbours among features that change"
_CLOUDS = "principle", "takes batches of small point clouds or molecules, and builds their graphs"
_SMALL_GRAPHS = "principle", "gives a row for each of a batch of small graphs, none for a node"
_WALKS = "principle", "is trained on random walks, not on the graph as a whole"
_SIGNED = "principle", "takes two sets of edges"
_EVENTS = "principle", "is trained on a stream of events, one after the other"
_RAPIDS = "package", "needs pylibcugraphops and a GPU"

NOT_TRIED: dict[str, tuple[str, str]] = {
    "MessagePassing": ("nothing to train", "the base class of all; one's own are taken"),
    "Aggregation": _BASE,
    "CuGraphSAGEConv": _RAPIDS,
    "CuGraphGATConv": _RAPIDS,
    "CuGraphRGCNConv": _RAPIDS,
    "FusedGATConv": ("package", "needs dgNN and a GPU"),
    "GravNetConv": _NEAREST,
    "DynamicEdgeConv": _NEAREST,
    "XConv": _NEAREST,
    "MeshCNNConv": ("principle", "its rows are a mesh's edges, of which each has exactly four neighbours"),
    "SignedConv": _SIGNED,
    "SignedGCN": _SIGNED,
    "WLConv": ("nothing to train", "colours nodes by hashes, without parameters and gradients"),
    "Node2Vec": _WALKS,
    "MetaPath2Vec": _WALKS,
    "DeepGraphInfomax": (
        "principle",
        "is trained on rows that are shuffled anew in each epoch; its encoder alone trains as any model",
    ),
    **dict.fromkeys(("InnerProductDecoder", "GAE"), _LINKS),
    "VGAE": _VARIATIONAL,
    **dict.fromkeys(("ARGA", "ARGVA"), _ADVERSARIAL),
    "LightGCN": ("otherwise", "an embedding with LGConv (embeddings.md), and its loss is of links (links.md)"),
    "ARLinkPredictor": _AR,
    "LPFormer": ("principle", "takes the personalised PageRank of all pairs of nodes, N² numbers"),
    "RENet": _EVENTS,
    "TGNMemory": _EVENTS,
    "GraphUNet": ("principle", "builds graphs anew, of the nodes that score highest"),
    **dict.fromkeys(("SchNet", "DimeNet", "DimeNetPlusPlus", "GNNFF", "ViSNet"), _CLOUDS),
    "GPSE": ("principle", "takes batches of small graphs, with a node more that is linked to all"),
    "AttentiveFP": _SMALL_GRAPHS,
    "NeuralFingerprint": _SMALL_GRAPHS,
    "to_captum_model": _TOOL,
    "to_captum_input": _TOOL,
    "captum_output_to_dicts": _TOOL,
    "LabelPropagation": _TOOL,
    "CorrectAndSmooth": _TOOL,
    "MaskLabel": ("otherwise", "takes labels as an input: of known ones columns of features (training.md)"),
}
"""Kind and reason of those that are not tried."""

OTHERWISE: dict[str, str] = {
    "LINKX": "its rows of weights for every node are an embedding, summed by SimpleConv (embeddings.md)",
}
"""What is tried and refused, and how it is trained."""

OF_PRINCIPLE: dict[str, str] = {
    "EquilibriumAggregation": "takes steps that are divided by the number of all rows, in float32 whatever its type",
    **dict.fromkeys(
        ("MLPAggregation", "LCMAggregation", "PatchTransformerAggregation"),
        "depends on the order in which edges are stored, which means nothing in a graph",
    ),
    **dict.fromkeys(
        ("LSTMAggregation", "GRUAggregation"),
        "depends on the order in which edges are stored, and after a row's last goes on over zeros, in as many steps "
        "as any row has edges",
    ),
}
"""What is tried and refused, and will be."""
