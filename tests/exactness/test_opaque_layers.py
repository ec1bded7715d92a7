# SPDX-License-Identifier: Apache-2.0
"""Layers that nobody has taken apart run as they are, tile by tile, and are PyG's; what cannot is refused by name."""

import math
import re
from collections.abc import Callable
from dataclasses import replace
from math import log2
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch_geometric.nn import (
    DNAConv,
    FiLMConv,
    GCNConv,
    GeneralConv,
    GraphConv,
    MessagePassing,
    PointTransformerConv,
    ResGatedGraphConv,
    SuperGATConv,
)
from torch_geometric.nn.conv.gcn_conv import gcn_norm
from torch_geometric.typing import OptTensor
from torch_geometric.utils import (
    add_self_loops,
    degree,
    get_laplacian,
    remove_self_loops,
    scatter,
    softmax,
    to_dense_batch,
)

from ooc.errors import BudgetError, ModelError
from ooc.kernels import neighbourhood
from ooc.model.layers import opaque
from ooc.model.layers.conformance import ProbeResult, probe_layer
from ooc.model.layers.layer import Layer
from ooc.model.lowering import opened
from ooc.plan.layout.passes import ColumnPass, RowPass
from ooc.train.prediction import Prediction
from ooc.train.resources import Resources
from ooc.train.trainer import Trainer
from tests.exactness.comparison import (
    DIRECTIONS,
    assert_agrees,
    in_turn,
    least,
    make_trainer,
    store_of,
    train_epoch,
    tuned_trainer,
)
from tests.exactness.conftest import Converted
from tests.exactness.layers import (
    LAYERS,
    MODELS,
    Carrying,
    Distances,
    LeAsItIs,
    MlpMessages,
    PartlyFrozen,
    WeighedMessages,
    behind,
    twice,
)
from tests.exactness.reference import CustomCase, ModelCase, adamw, smooth_adam
from tests.exactness.test_savings import in_hop_order
from tests.examples import cases, examples, is_thorough
from tests.graphs import GraphCase, graph_cases, random_data

EPOCHS = 2
K = 3
ROUGH = GraphCase(self_loops=9, isolated=7, duplicates=15, unlabelled=8)
UNDIRECTED = GraphCase(self_loops=9, isolated=7, duplicates=15, unlabelled=8, undirected=True)
CASES = {name: CustomCase(make=behind(make)) for name, make in LAYERS.items()}
CASES |= {name: CustomCase(make=make) for name, make in MODELS.items()}
F_IN, C = ROUGH.features, ROUGH.classes


@pytest.mark.thorough(
    "an MLP on edges, mean",
    "an MLP on edges, std",
    "an MLP on edges, softmax",
    "MFConv",
    "ClusterGCNConv",
    "GENConv",
    "PNAConv as it is",
    "EdgeConv",
    "partly frozen",
    "nothing between",
    "positions",
    "among others",
    "SAGEConv, sets",
)
@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_layers(case: ModelCase, converted: Converted, tmp_path: Path) -> None:
    """Losses, gradients and scores are PyG's, in seven tiles."""
    data, store = converted(ROUGH)
    assert_agrees(case, data, tmp_path, epochs=EPOCHS, store=store)


@pytest.mark.thorough("among others-directed", "nothing between-undirected")
@pytest.mark.parametrize(("name", "undirected"), in_turn(MODELS, DIRECTIONS, all_ways={"among others"}))
def test_least_memory(name: str, undirected: bool, converted: Converted, tmp_path: Path) -> None:
    """So they are where nothing waits in memory, and where in-edges are the only edges of a store."""
    data, store = converted(UNDIRECTED if undirected else ROUGH)
    assert_agrees(CASES[name], data, tmp_path, epochs=EPOCHS, store=store, **least(CASES[name], store, tmp_path))


def test_what_edges_carry(tmp_path: Path) -> None:
    """Weights and features of edges go to the layers, in the order of the edges."""
    options: dict[str, Any] = {"self_loops": 9, "isolated": 7, "duplicates": 15}

    def agrees(make: Callable[[int, int], nn.Module], folder: str, **carried: Any) -> None:
        (tmp_path / folder).mkdir()
        data = random_data(GraphCase(**options, **carried))
        assert_agrees(CustomCase(make=behind(make)), data, tmp_path / folder, epochs=EPOCHS)

    agrees(WeighedMessages, "of either direction", weighted=True, undirected=True)
    agrees(LeAsItIs, "LEConv", weighted=True)
    agrees(lambda i, o: WeighedMessages(i, o, K), "features", edge_features=K)
    agrees(lambda i, o: ResGatedGraphConv(i, o, edge_dim=K), "ResGatedGraphConv", edge_features=K, undirected=True)
    if is_thorough():
        agrees(WeighedMessages, "max by weight", weighted=True)
        agrees(lambda i, o: GraphConv(i, o, aggr="mean"), "GraphConv", weighted=True)
        agrees(lambda i, o: GeneralConv(i, o, in_edge_channels=K), "GeneralConv", edge_features=K)


@pytest.mark.thorough("among others", "an MLP on edges, softmax")
@pytest.mark.parametrize("name", ["an MLP on edges, softmax", "PNAConv as it is", "among others"])
def test_float32(name: str, tmp_path: Path) -> None:
    """Single precision, to 1e-4."""
    data = random_data(ROUGH, dtype=torch.float32)
    assert_agrees(CASES[name], data, tmp_path, dtype=torch.float32, make_optimizer=smooth_adam, epochs=EPOCHS)


class Stacked(nn.Module):
    """Attention to what layers before gave, of edges that count alike."""

    def __init__(self, features: int, classes: int) -> None:
        super().__init__()
        self.first, self.layer, self.last = nn.Linear(features, 8), DNAConv(8, heads=2), nn.Linear(8, classes)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        x = self.first(x)
        return self.last(self.layer(torch.stack([x, x.tanh()], dim=1), edge_index))


class Positioned(nn.Module):
    """Scores are differences of maps of rows, which are large of large ones."""

    def __init__(self, features: int, classes: int) -> None:
        super().__init__()
        self.layer = PointTransformerConv(features, classes)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.layer(x, x[:, :3], edge_index)


@pytest.mark.parametrize("make", [Stacked, Positioned, SuperGATConv])
def test_float32_of_more_layers(make: Callable[[int, int], nn.Module], tmp_path: Path) -> None:
    """Weights that the layer makes are of the rows' precision, and SuperGAT keeps scores of pairs that it draws."""
    data = random_data(ROUGH, dtype=torch.float32)
    options: dict[str, Any] = {"dtype": torch.float32, "make_optimizer": smooth_adam, "epochs": EPOCHS}
    assert_agrees(CustomCase(make=make), data, tmp_path, **options)


def test_what_has_no_part_has_no_gradient(tmp_path: Path) -> None:
    """Weight decay leaves alone what is not trained, and what nothing comes of."""
    assert_agrees(CustomCase(make=PartlyFrozen), random_data(ROUGH), tmp_path, make_optimizer=adamw, epochs=EPOCHS)


@pytest.mark.thorough("among others-None")
@pytest.mark.parametrize(("name", "spill_dtype"), [("an MLP on edges, softmax", "bfloat16"), ("among others", None)])
def test_results_do_not_depend_on_the_plan(name: str, spill_dtype: str | None, tmp_path: Path) -> None:
    """Gradients and losses are equal to the last bit under every budget, whatever is spilled, on any threads."""
    graph = GraphCase(nodes=220, edges=900, features=12, self_loops=20, isolated=20, duplicates=40, unlabelled=60)
    store = store_of(random_data(graph, dtype=torch.float32), tmp_path)
    given: dict[str, Any] = {"dtype": torch.float32, "tile_rows": 64, "spill_dtype": spill_dtype}

    def trained(**options: Any) -> tuple[list[float], dict[str, Tensor], Trainer]:
        with make_trainer(CASES[name], store, tmp_path, **given, **options) as trainer:
            epochs = [train_epoch(trainer) for _ in range(2)]
            return [e.loss for e in epochs], epochs[-1].gradients, trainer

    scarce = least(CASES[name], store, tmp_path, **given)
    losses, gradients, roomy = trained()
    assert not roomy.plan.ssd_write_bytes
    plans: list[dict[str, Any]] = [{"gpu_budget": 2 * scarce["gpu_budget"]}]
    plans += [{"slab_columns": 1, "threads": 3}, {**scarce, "threads": 1}]
    kinds = set()
    for options in plans:
        other_losses, other_gradients, trainer = trained(**options)
        passes = trainer.plan.programs["train"]
        kinds |= {type(item) for item in passes if item.pull is not None and item.pull.is_opaque}
        assert other_losses == losses, options
        for parameter, gradient in other_gradients.items():
            assert torch.equal(gradient, gradients[parameter]), (options, parameter)
    assert kinds == {RowPass, ColumnPass}, "pulled from whole matrices and from slabs"


def test_rows_without_edges_get_no_others(tmp_path: Path) -> None:
    """A tile of them, and no self-loops in the graph: a layer that has no gradient there still has PyG's."""
    data = random_data(GraphCase(nodes=64, edges=60, classes=6, seed=2))
    data.edge_index = data.edge_index[:, data.edge_index[1] >= 16]
    assert_agrees(CustomCase(make=Distances), data, tmp_path, epochs=EPOCHS)


def test_tiles_of_many_edges_are_run_in_parts(
    converted: Converted, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows of one tile are then in-neighbours of others of it, and a row of many edges is alone."""
    monkeypatch.setattr(neighbourhood, "EDGES_AT_ONCE", 5)
    data, store = converted(ROUGH)
    for name in cases(["self-loops of its own"], ["an MLP on edges, std", "among others"]):
        assert_agrees(CASES[name], data, tmp_path, epochs=EPOCHS, store=store, tile_rows=32)


@pytest.mark.parametrize("name", ["self-loops of its own", "among others", "nothing between"])
def test_rows_that_do_not_reach_the_loss_are_left_out(name: str, tmp_path: Path) -> None:
    """In the order of hops from few training nodes, layers compute some of the rows, and results are PyG's."""
    store, data = in_hop_order(random_data(GraphCase(nodes=150, edges=200, unlabelled=144, seed=5)), tmp_path)
    case = CASES[name] if name in MODELS else CustomCase(make=twice(LAYERS[name]))
    plan = assert_agrees(case, data, tmp_path, epochs=EPOCHS, store=store)
    rows = {item.rows for item in plan.programs["train"]}
    assert name == "among others" or len(rows) > 2, "its norm takes all rows"


def test_the_plan_says_so(tmp_path: Path) -> None:
    """Passes that run a layer as it is are named; what it scatters to is in memory whole."""
    store = store_of(random_data(ROUGH), tmp_path)
    with make_trainer(CustomCase(make=twice(MlpMessages)), store, tmp_path) as trainer:
        titles = [item.title for item in trainer.plan.programs["train"]]
        assert [title for title in titles if "general path" in title] == [
            "forward 1, general path",
            "loss, general path",
            "sources 2, general path",
            "sources 1, general path",
        ]
        assert trainer.plan.matrices["dm2"].whole and "dm1" not in trainer.plan.matrices
        (shares,) = [line for line in trainer.plan.summary() if line["matrix"] == "dm2"]
        assert shares["resident"] == 100


class Asked(nn.Module):
    """One layer, called twice in ways that differ by a plain argument and once more as before."""

    def __init__(self, features: int, classes: int) -> None:
        super().__init__()
        self.conv = Scaled(features)
        self.head = nn.Linear(features, classes)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        x = self.conv(x, edge_index, times=2.0)
        x = self.conv(x, edge_index, times=3.0)
        return self.head(self.conv(x, edge_index, times=2.0))


class Scaled(MessagePassing):
    def __init__(self, features: int) -> None:
        super().__init__(aggr="mean")
        self.lin = nn.Linear(features, features)

    def forward(self, x: Tensor, edge_index: Tensor, times: float) -> Tensor:
        return times * self.propagate(edge_index, x=torch.tanh(self.lin(x)))

    def message(self, x_i: Tensor, x_j: Tensor) -> Tensor:
        return (x_j - x_i).abs()


def test_a_layer_is_tried_once_a_mode_and_way_of_calling_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Though a model is taken apart several times; in evaluation as to memory alone, where it gives what it gives in
    training."""
    tried: list[tuple[float, bool, bool]] = []

    def watched(layer: Layer, module: nn.Module, **options: Any) -> ProbeResult:
        tried.append((layer.plain["times"], module.training, options["in_training"] is None))
        return probe_layer(layer, module, **options)

    monkeypatch.setattr(opaque, "probe_layer", watched)
    assert_agrees(CustomCase(make=Asked), random_data(ROUGH), tmp_path, epochs=EPOCHS)
    assert tried == [(2.0, True, True), (3.0, True, True), (2.0, False, False), (3.0, False, False)]


def _by_the_mean(layer: nn.Module, x: Tensor, edge_index: Tensor) -> Tensor:
    """In evaluation, where something is as no small graph of usual numbers has it."""
    return x - x.mean(dim=0) if x.abs().max() > 50 and not layer.training else x.tanh()


def _kept(layer: nn.Module, x: Tensor, edge_index: Tensor) -> Tensor:
    """In evaluation, what the first graph had."""
    most = degree(edge_index[1], len(x)).max() if edge_index.numel() else x.new_zeros(())
    if not layer.training:
        most = vars(layer).setdefault("most", most)
    return x * (most >= degree(edge_index[1], len(x)))[:, None]


@pytest.mark.parametrize(("what", "why"), [(_by_the_mean, "depends on more than the node"), (_kept, "of another run")])
def test_what_a_layer_does_in_evaluation_alone_is_tried(
    what: Callable[..., Tensor], why: str, converted: Converted, tmp_path: Path
) -> None:
    _, store = converted(ROUGH)
    with pytest.raises(ModelError, match=why):
        make_trainer(CustomCase(make=lambda f, c: Own(what)), store, tmp_path)


class Deep(nn.Module):
    """Layers that are alike but for their weights, one of them with another factor, one with frozen ones."""

    def __init__(self, features: int, classes: int) -> None:
        super().__init__()
        self.convs = nn.ModuleList([Bounded(features, factor) for factor in (1.0, 1.0, -2.0, 1.0, 1.0)])
        self.convs[3].lin.requires_grad_(False)
        self.head = nn.Linear(features, classes)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        for conv in self.convs:
            x = conv(x, edge_index)
        return self.head(x)


class Bounded(Scaled):
    factor: Tensor

    def __init__(self, features: int, factor: float) -> None:
        super().__init__(features)
        self.register_buffer("factor", torch.full((features,), factor))

    def forward(self, x: Tensor, edge_index: Tensor, times: float = 1.0) -> Tensor:
        if self.factor[0] < 0:  # a way that those of the others do not go
            x = x.abs() + self.lin.bias.sum()
        return super().forward(x, edge_index, times) * self.factor


def test_layers_that_are_alike_but_for_their_weights_are_tried_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried: list[str] = []

    def watched(layer: Layer, module: nn.Module, **options: Any) -> ProbeResult:
        tried.append(f"{re.sub(r'[^0-9]', '', layer.where)} {'training' if module.training else 'evaluation'}")
        return probe_layer(layer, module, **options)

    monkeypatch.setattr(opaque, "probe_layer", watched)
    assert_agrees(CustomCase(make=Deep), random_data(ROUGH), tmp_path, epochs=EPOCHS)
    assert tried == [f"{number} {mode}" for mode in ("training", "evaluation") for number in (0, 2, 3)]


def test_what_does_not_fit_is_refused_with_the_bytes_needed(tmp_path: Path) -> None:
    """What a layer makes of edges, and as much of a matrix as a step gathers; the error tells how much that is."""
    graph = GraphCase(nodes=2000, edges=4500, features=4)
    store = store_of(random_data(graph), tmp_path)
    case = CustomCase(make=twice(lambda i, o: MlpMessages(i, o)))
    budgets = least(case, store, tmp_path, tile_rows=64)
    assert budgets["gpu_budget"] + budgets["host_budget"] > 10**5
    with pytest.raises(BudgetError, match=r"gpu_budget='\d+"):
        make_trainer(case, store, tmp_path, tile_rows=64, **budgets | {"gpu_budget": int(0.98 * budgets["gpu_budget"])})


@pytest.mark.thorough("among others")
@pytest.mark.parametrize("name", ["an MLP on edges, mean", "GeneralConv, attention", "among others"])
def test_predictions(name: str, tmp_path: Path) -> None:
    """Logits of all nodes and of some are those of the model in PyG."""
    data = random_data(ROUGH)
    store = store_of(data, tmp_path)
    model = CASES[name].build(store.num_features, store.num_classes).eval()
    with torch.no_grad():
        expected = model(data.x, data.edge_index)
    resources = Resources.parse("64M", "64M", spill_dir=tmp_path, tile_rows=8)
    for nodes in (None, [3, 17, 40]):
        prediction = Prediction(model, store, resources, nodes=nodes)
        wanted = expected if nodes is None else expected[nodes]
        assert torch.allclose(prediction.read(), wanted, rtol=1e-9, atol=1e-11)
        prediction.close()


@given(
    graph=graph_cases(),
    name=st.sampled_from(sorted({*CASES} - {"EdgeConv", "SAGEConv, median"})),  # PyG fails without edges
    tile_rows=st.sampled_from([4, 16, 64]),
    share=st.sampled_from([1.0, 1.3, 100.0]),
)
@settings(
    max_examples=examples(2),
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
def test_any_case_is_exact(graph: GraphCase, name: str, tile_rows: int, share: float, tmp_path: Path) -> None:
    """Under the least budgets that the trainer itself says would do, or a multiple of them."""
    data = random_data(graph)
    store = store_of(data, tmp_path)
    budgets = least(CASES[name], store, tmp_path, tile_rows=tile_rows, block_rows=None)
    budgets["gpu_budget"] = int(budgets["gpu_budget"] * share)
    assert_agrees(CASES[name], data, tmp_path, epochs=EPOCHS, store=store, tile_rows=tile_rows, **budgets)


class Own(MessagePassing):
    """A layer that does ``what`` before it sums."""

    def __init__(self, what: Callable[["Own", Tensor, Tensor], Tensor], **options: Any) -> None:
        super().__init__(**options)
        self.linear, self.norm = nn.Linear(F_IN, C), nn.BatchNorm1d(F_IN)
        self.gate = nn.Parameter(torch.zeros(1))
        self.what, self.calls = what, 0

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.linear(self.propagate(edge_index, x=self.what(self, x, edge_index)))


class OfItself(MessagePassing):
    """Adds self-loops to what it puts together, numbers near 1."""

    def __init__(self, inputs: int, outputs: int, aggr: str) -> None:
        super().__init__(aggr=aggr)
        self.linear = nn.Linear(inputs, outputs)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        edge_index, _ = add_self_loops(edge_index, num_nodes=x.size(0))
        out: Tensor = self.propagate(edge_index, x=1 + 0.01 * self.linear(x).tanh())
        return out

    def message(self, x_i: Tensor, x_j: Tensor) -> Tensor:
        return x_j * torch.sigmoid(x_i * x_j) / torch.sigmoid(x_i)


@pytest.mark.parametrize("aggr", ["mul", "median"])
def test_loops_count_once_where_the_edges_of_a_node_come_in_pieces(aggr: str, tmp_path: Path) -> None:
    data = random_data(GraphCase(nodes=40, edges=80, self_loops=3))
    others = torch.arange(40)[torch.arange(40) != 5].repeat(12)
    data.edge_index = torch.cat((data.edge_index, torch.stack((others, torch.full_like(others, 5)))), dim=1)
    case, store = CustomCase(make=behind(lambda i, o: OfItself(i, o, aggr))), store_of(data, tmp_path)
    assert_agrees(case, data, tmp_path, epochs=1, store=store, **least(case, store, tmp_path))


class Untold(MessagePassing):
    """Adds up without being told how many rows there are, with parameters or none."""

    def __init__(self, learns: bool) -> None:
        super().__init__()
        self.linear, self.learns = nn.Linear(F_IN, C), learns

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.propagate(edge_index, x=self.linear(x) if self.learns else x)  # type: ignore[no-any-return]

    def message(self, x_i: Tensor, x_j: Tensor) -> Tensor:
        return (x_i * x_j).softmax(dim=-1)

    def aggregate(self, inputs: Tensor, index: Tensor) -> Tensor:
        return scatter(inputs, index, dim=0, reduce="sum")


class First(nn.Module):
    """A layer of features as they are, and a convolution."""

    def __init__(self, first: nn.Module) -> None:
        super().__init__()
        self.first, self.last = first, GCNConv(F_IN, C)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.last(self.first(x, edge_index), edge_index)  # type: ignore[no-any-return]


class Padded(MessagePassing):
    """A layer that takes no pairs of rows and makes room in that of every node for as many edges as any has."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(F_IN, C)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        sources, targets = edge_index
        return self.linear(to_dense_batch(x[sources], targets, batch_size=len(x))[0].sum(1))  # type: ignore[no-any-return]


def out_degree(layer: Own, x: Tensor, edge_index: Tensor) -> Tensor:
    """How many edges a node sends off."""
    return x / (1 + torch.bincount(edge_index[0], minlength=len(x)))[:, None]


def mean_of_the_first(layer: Own, x: Tensor, edge_index: Tensor) -> Tensor:
    """Less the mean of the rows that it was given first."""
    vars(layer).setdefault("mean", x.mean(0).detach())
    return x - vars(layer)["mean"]


def updated_mean(layer: Own, x: Tensor, edge_index: Tensor) -> Tensor:
    """Less a running mean."""
    vars(layer)["mean"] = (x.detach().mean(0) + vars(layer).get("mean", 0)) / 2
    return x - vars(layer)["mean"]


def put_by(layer: Own, x: Tensor, edge_index: Tensor) -> Tensor:
    """Leaves something for others, another thing every time."""
    vars(layer)["seen"] = torch.from_numpy(np.random.rand(3))
    return 2 * x if len(edge_index[0]) < 1e9 else x


def counted(layer: Own, x: Tensor, edge_index: Tensor) -> Tensor:
    """Another result after a thousand calls."""
    layer.calls += 1
    return x if layer.calls < 1000 else 2 * x


def written(layer: Own, x: Tensor, edge_index: Tensor) -> Tensor:
    with torch.no_grad():
        return x.mul_(2)


class Counting(Own):
    """Keeps how often it was run."""

    def __init__(self) -> None:
        super().__init__(lambda layer, x, _: x)
        self.register_buffer("count", torch.zeros(1))

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        self.count += 1
        return super().forward(x, edge_index)


class Remembering(Own):
    """Keeps the rows that it has seen first."""

    def __init__(self) -> None:
        super().__init__(lambda layer, x, _: x)
        self.cached: Tensor | None = None

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        if self.cached is None:
            self.cached = x
        return super().forward(self.cached, edge_index)


class Referring(Own):
    """Keeps a function that refers to the layer, whichever copy of it is run."""

    def __init__(self, refer: Callable[["Own", Tensor], Tensor]) -> None:
        super().__init__(lambda copy, x, _: refer(self, x))


class Listening(Own):
    """Somebody looks at its messages."""

    def __init__(self) -> None:
        super().__init__(lambda layer, x, _: x)
        self.register_message_forward_hook(lambda *_: None)


class Twice(MessagePassing):
    """Looks ``hops`` hops far, or at the degrees of sources with ``norm``."""

    def __init__(self, inputs: int, outputs: int, *, hops: int = 2, norm: bool = False) -> None:
        super().__init__(aggr="add")
        self.linear, self.hops, self.norm = nn.Linear(inputs, outputs), hops, norm

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        x = self.linear(x)
        for _ in range(self.hops):
            edges, weight = edge_index, None
            if self.norm:
                edges, weight = gcn_norm(edge_index, num_nodes=x.size(0), dtype=x.dtype)
            x = self.propagate(edges, x=x, weight=weight)
        return x

    def message(self, x_j: Tensor, weight: OptTensor) -> Tensor:
        return x_j if weight is None else weight[:, None] * x_j


class Inside(MessagePassing):
    """Has a norm over all rows, or over all edges."""

    def __init__(self, inputs: int, outputs: int, *, of_edges: bool = False) -> None:
        super().__init__(aggr="add")
        self.linear, self.norm = nn.Linear(inputs, outputs), nn.BatchNorm1d(outputs)
        self.of_edges = of_edges

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        out: Tensor = self.propagate(edge_index, x=self.linear(x))
        return out if self.of_edges else self.norm(out)

    def message(self, x_j: Tensor) -> Tensor:
        return self.norm(x_j) if self.of_edges else x_j


class Updated(MessagePassing):
    """Scores edges by ``edge_updater``, and writes into what a network makes of their features."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(aggr="add", node_dim=0)
        self.linear, self.shift = nn.Linear(inputs, 2 * outputs), nn.Parameter(torch.ones(1))
        self.of_edges = nn.Sequential(nn.Linear(K, 2), nn.ReLU(inplace=True))

    def forward(self, x: Tensor, edge_index: Tensor, edge_attr: Tensor) -> Tensor:
        x = self.linear(F.dropout(x, 0.2, self.training)).view(x.size(0), 2, -1)
        edge_index, edge_attr = remove_self_loops(edge_index, edge_attr)
        scores = self.edge_updater(edge_index, x=(x, x.tanh())) + self.of_edges(edge_attr)
        scores += self.shift.exp()
        return self.propagate(edge_index, x=x, scores=softmax(scores, edge_index[1], num_nodes=x.size(0))).mean(dim=1)

    def edge_update(self, x_i: Tensor, x_j: Tensor) -> Tensor:
        return (x_i * x_j).sum(dim=-1)

    def message(self, x_j: Tensor, scores: Tensor) -> Tensor:
        return x_j * scores[:, :, None]


class ByDegrees(MessagePassing):
    """Takes roots and logarithms of numbers that come of both ends' degrees."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(aggr="add")
        self.linear = nn.Linear(inputs, outputs)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        row, col = edge_index
        degrees = torch.bincount(col, minlength=x.size(0)).to(x.dtype) + 1
        out: Tensor = self.propagate(edge_index, x=self.linear(x), norm=1 / (degrees[row] * degrees[col]))
        return out

    def message(self, x_i: Tensor, x_j: Tensor, norm: Tensor) -> Tensor:
        return norm.sqrt()[:, None] * torch.tanh(x_j - x_i) + norm.log()[:, None] * x_j


class Spectral(MessagePassing):
    """A polynomial of the graph's Laplacian as BernNet and ChebNetII have it, with coefficients made one by one, and
    numbers of NumPy's; by degrees of the ends that edges lead from."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(aggr="add")
        self.linear, self.given = nn.Linear(inputs, outputs), nn.Parameter(torch.rand(3))

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        x = self.linear(x) / np.sqrt(x.shape[1])
        x = x / (1 + degree(edge_index[0], x.size(0), dtype=x.dtype)).unsqueeze(-1)
        factors = self.given.relu().clone()
        for k in range(1, 3):
            factors[k] = np.float64(0.5) * factors[k] + self.given[0] * np.cos(k)
        edge_index, norm = get_laplacian(edge_index, None, normalization="sym", dtype=x.dtype, num_nodes=x.size(0))
        edge_index, norm = add_self_loops(edge_index, -norm, fill_value=2.0, num_nodes=x.size(0))
        out = factors[0] * x
        for k in range(1, 3):
            x = self.propagate(edge_index, x=x, norm=norm)
            out = out + factors[k] * x
        return out

    def message(self, x_j: Tensor, norm: Tensor) -> Tensor:
        return norm.view(-1, 1) * x_j


class Headed(MessagePassing):
    """Gives several rows of numbers a node, of several, as DIFFormer's convolution does."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(aggr="add", node_dim=0)
        self.linear = nn.Linear(inputs, 2 * outputs)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        row, col = edge_index
        degrees = degree(col, x.shape[0], dtype=x.dtype)
        value = torch.ones_like(row) * (1.0 / degrees[col]).sqrt() * (1.0 / degrees[row]).sqrt()
        value = torch.nan_to_num(value, nan=0.0, posinf=0.0, neginf=0.0)
        return self.propagate(edge_index, x=self.linear(x).view(x.size(0), 2, -1), value=value)

    def message(self, x_j: Tensor, value: Tensor) -> Tensor:
        return value.view(-1, 1, 1) * x_j


class OfHeads(nn.Module):
    """Two of these, whose rows are put together."""

    def __init__(self, features: int, classes: int) -> None:
        super().__init__()
        self.first, self.second = Headed(features, 5), Headed(5, classes)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        x = self.first(x, edge_index)
        return self.second((x[:, 0] - x[:, 1]).tanh(), edge_index).mean(dim=1)


def one_hop_before(layer: Own, x: Tensor, edge_index: Tensor) -> Tensor:
    """A sum over in-neighbours, of which there will be another."""
    return torch.zeros_like(x).index_put((edge_index[1],), x[edge_index[0]], accumulate=True)


OPENED: dict[str, Callable[[int, int], nn.Module]] = {
    "a norm over nodes": lambda f, c: Own(lambda s, x, e: s.norm(x)),
    "a function of the layer's mode": lambda f, c: Referring(lambda layer, x: 2 * x if layer.training else x),
    "several hops": lambda f, c: Twice(f, c),
    "normalised by both ends": lambda f, c: Twice(f, c, norm=True),
    "norm inside": lambda f, c: Inside(f, c),
    "roots of degrees": twice(ByDegrees),
    "a polynomial of the Laplacian": twice(Spectral),
    "several rows a node": OfHeads,
    "numbers of NumPy's": lambda f, c: Own(lambda s, x, e: x / np.sqrt(x.shape[1])),
    "less a mean over nodes": lambda f, c: Own(lambda s, x, e: x - x.mean(0) + s.gate * x.std(0)),
}
AS_A_WHOLE: dict[str, Callable[["Own", Tensor, Tensor], Tensor]] = {
    "by how many edges there are": lambda s, x, e: x * 2 if len(e[0]) < 1e9 else x,
    "results that are put by": put_by,
}


@pytest.mark.thorough("a polynomial of the Laplacian")
@pytest.mark.parametrize("name", OPENED)
def test_what_looks_at_rows_alone_is_computed_as_between_layers(
    name: str, converted: Converted, tmp_path: Path
) -> None:
    """So layers may do there what models may, and look as far as they like."""
    data, store = converted(ROUGH)
    assert_agrees(CustomCase(make=OPENED[name]), data, tmp_path, epochs=EPOCHS, store=store)


def test_what_a_layer_has_kept_of_another_graph_is_not_used(tmp_path: Path) -> None:
    """As PyG's keep it with ``cached``, of a graph that there was before."""

    class Doubled(GCNConv):  # type: ignore[misc]
        def message(self, x_j: Tensor, edge_weight: Tensor) -> Tensor:
            return torch.tanh(x_j) * edge_weight[:, None]

    data, other = random_data(ROUGH), random_data(replace(ROUGH, nodes=90))
    losses = []
    for cached in (True, False):
        torch.manual_seed(1)
        conv = Doubled(data.x.shape[1], 4, cached=cached).double()
        conv(other.x, other.edge_index)
        with Trainer(conv, store_of(data, tmp_path), memory="64M") as trainer:
            losses.append([record.loss for record in trainer.fit(epochs=2, progress=False)])
    assert losses[0] == losses[1]


def test_what_looks_at_edges_is_computed_with_what_sums_over_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(opened, "_WIDER", 100)
    data = random_data(replace(ROUGH, edge_features=K))
    assert_agrees(CustomCase(make=lambda f, c: Carrying(f, c, Updated)), data, tmp_path, epochs=EPOCHS)


@pytest.fixture
def tried(monkeypatch: pytest.MonkeyPatch) -> set[type[nn.Module]]:
    """The classes of layers that have been tried."""
    found: set[type[nn.Module]] = set()

    def recorded(layer: Layer, *args: Any, **options: Any) -> ProbeResult:
        found.add(type(layer.module))
        return probe_layer(layer, *args, **options)

    monkeypatch.setattr(opaque, "probe_layer", recorded)
    return found


@pytest.mark.parametrize("name", AS_A_WHOLE)
def test_forwards_that_no_trace_can_follow_run_as_a_whole(
    name: str, converted: Converted, tmp_path: Path, tried: set[type[nn.Module]]
) -> None:
    """Silently, and exactly."""
    data, store = converted(ROUGH)
    assert_agrees(CustomCase(make=lambda f, c: Own(AS_A_WHOLE[name])), data, tmp_path, epochs=EPOCHS, store=store)
    assert tried == {Own}


def test_layers_that_gather_less_as_a_whole_are_not_tried_opened(
    converted: Converted, tmp_path: Path, tried: set[type[nn.Module]]
) -> None:
    data, store = converted(ROUGH)
    case = CustomCase(make=lambda f, c: FiLMConv(f, f + c, aggr="max"))
    assert_agrees(case, data, tmp_path, epochs=EPOCHS, store=store)
    assert tried == {FiLMConv}


class Both(nn.Module):
    """Gives a layer more than rows and edges."""

    def __init__(self, layer: nn.Module, *more: Any) -> None:
        super().__init__()
        self.layer, self.more = layer, more

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        if self.more == ("stacked",):
            return self.layer(torch.stack([x, x], dim=1), edge_index)
        return self.layer(x, *(x if more == "x" else more for more in self.more), edge_index)


REFUSED: dict[str, tuple[Callable[[], nn.Module], tuple[str, ...]]] = {
    "the number of nodes": (lambda: Own(lambda s, x, e: x / len(x)), ("Own", "in-neighbours", "number of nodes")),
    "values for numbers": (
        lambda: Own(lambda s, x, e: x * float(x.mean())),
        ("as a whole, since it takes a tensor's values for a Python number", "in Own.", "test_opaque_layers.py line"),
    ),
    "a largest row": (
        lambda: Own(lambda s, x, e: x - x.amax(0)),
        ("Own", "statistics over nodes", "runs as a whole, since amax looks across rows"),
    ),
    "no number of rows": (lambda: Untold(learns=True), ("Untold", "dim_size")),
    "no number of rows, without parameters": (lambda: First(Untold(learns=False)), ("Untold (first)", "dim_size")),
    "degrees of sources": (lambda: Own(out_degree), ("Own", "degrees of sources")),
    "degrees of sources, of roots": (lambda: Own(lambda s, x, e: out_degree(s, x.sqrt(), e)), ("degrees of sources",)),
    "self-loops of who knows how many nodes": (
        lambda: Own(lambda s, x, e: x + 0 * add_self_loops(e)[0].sum()),
        ("Own", "give num_nodes=x.size(0)"),
    ),
    "no numbers": (lambda: Own(lambda s, x, e: out_degree(s, (-1 - x.abs()).sqrt(), e)), ("Own", "finite number")),
    "degrees of sources, if large": (
        lambda: Own(lambda s, x, e: x / torch.bincount(e[0], minlength=len(x)).clamp(min=40)[:, None]),
        ("Own", "degrees of sources"),
    ),
    "a mean, of many nodes": (
        lambda: Own(lambda s, x, e: x - x.mean(0) if len(x) > 110 else x),
        ("Own", "statistics over nodes"),
    ),
    "the largest value": (
        lambda: Own(lambda s, x, e: x / x.abs().max().clamp(min=9)),
        ("Own", "statistics over nodes"),
    ),
    "a mean that is kept": (lambda: Own(mean_of_the_first), ("Own", "kept from another run")),
    "a mean that is updated": (lambda: Own(updated_mean), ("Own", "its attribute mean")),
    "a number that counts": (lambda: Own(counted), ("Own", "its attribute calls")),
    "rows that are written into": (lambda: Own(written), ("Own", "writes into the rows")),
    "hidden by a zero": (lambda: Own(lambda s, x, e: x + s.gate * x.amax(0)), ("Own", "statistics over nodes")),
    "noise": (lambda: Own(lambda s, x, e: x + torch.rand_like(x)), ("Own", "random numbers in training")),
    "dropout of other shapes": (
        lambda: Own(lambda s, x, e: x * F.dropout(x.new_ones(x.shape[1]), 0.5, s.training)),
        ("Own", "drops entries of a tensor of shape [9]"),
    ),
    "dropout now and then": (
        lambda: Own(lambda s, x, e: F.dropout(x, 0.5, s.training and len(x) < 20)),
        ("Own", "how often it drops something depends on the rows"),
    ),
    "dropout in evaluation": (lambda: Own(lambda s, x, e: F.dropout(x, 0.5)), ("Own", "dropout in evaluation")),
    "dropout of whole columns": (
        lambda: Own(lambda s, x, e: F.dropout1d(x, 0.5, s.training)),
        ("Own", "random numbers in training other than by F.dropout"),
    ),
    "a counter": (Counting, ("Counting", "its buffer count")),
    "a cache": (Remembering, ("Remembering", "x_0 is kept from an earlier forward pass")),
    "a function of the layer's parameters": (
        lambda: Referring(lambda layer, x: x * layer.gate if len(x) else x),
        ("Referring", "refers to the layer itself"),
    ),
    "a function of the layer's mode": (
        lambda: Referring(lambda layer, x: 2 * x if layer.training and len(x) else x),
        ("Referring", "refers to the layer itself"),
    ),
    "the order of edges": (
        lambda: Own(lambda s, x, e: x, aggr="lstm", aggr_kwargs={"in_channels": F_IN, "out_channels": F_IN}),
        ("Own", "order of edges"),
    ),
    "rows without edges": (
        lambda: Own(lambda s, x, e: x + 0 * x[(e[1] == 0).nonzero()[0]]),
        ("Own", "fails on some rows"),
    ),
    "all neighbours of all rows": (
        Padded,
        ("Padded", "most edges of any row"),
    ),
    "hooks of messages": (Listening, ("Listening", "message_forward_hooks")),
    "several hops": (lambda: Own(one_hop_before), ("Own", "several hops")),
    "norm inside": (lambda: Inside(F_IN, C, of_edges=True), ("Inside", "buffer norm")),
    "no matrix": (lambda: Both(LeAsItIs(F_IN, F_IN), "stacked"), ("LeAsItIs (layer)", "fails on a small graph")),
    "something else": (lambda: Both(Own(lambda s, x, e: x), None, None), ("Own (layer)", "not supported")),
}


@pytest.mark.parametrize(("build", "said"), REFUSED.values(), ids=REFUSED.keys())
def test_layers_are_refused_by_name(
    build: Callable[[], nn.Module], said: tuple[str, ...], converted: Converted, tmp_path: Path
) -> None:
    """One line that says which layer it is and why; its state is as it was, and so is torch's generator."""
    _, store = converted(ROUGH)
    model = build().double()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    random_state = torch.random.get_rng_state()
    with pytest.raises(ModelError) as caught:
        tuned_trainer(model, store, gpu_budget="64M", host_budget="64M", spill_dir=tmp_path)
    assert all(part in str(caught.value) for part in said), str(caught.value)
    assert "\n" not in str(caught.value)
    assert torch.equal(random_state, torch.random.get_rng_state())
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]), name


BY_SIZE: dict[str, Callable[[Own, Tensor, Tensor], Tensor]] = {
    "size": lambda s, x, e: x.mul(2 if x.size(0) > 200 else 1),
    "length": lambda s, x, e: x.mul(2 if len(x) > 200 else 1),
    "shape": lambda s, x, e: x.mul(2 if x.shape[0] // 2 > 100 else 1),
    "the least of two": lambda s, x, e: x.mul(min(200, x.shape[0]) // 200 + 1),
    "edges": lambda s, x, e: x.mul(2 if e.shape[1] > 1_000 else 1),
    "numbers": lambda s, x, e: x.mul(2 if e.numel() > 2_000 else 1),
    "a fraction": lambda s, x, e: x.mul(2 if x.size(0) / 2 > 100 else 1),
    "a number with a point": lambda s, x, e: x.mul(2 if float(x.size(0)) > 200.5 else 1),
    "a share": lambda s, x, e: x.mul(2 if x.size(0) * 0.5 > 100 else 1),
    "a quotient": lambda s, x, e: x.mul(2 if x.size(0) // 201 > 0 else 1),
    "whether there is a quotient": lambda s, x, e: x.mul(2 if x.size(0) >> 7 > 1 or divmod(x.size(0), 201)[0] else 1),
    "a power": lambda s, x, e: x.mul(2 if x.size(0) ** 0.5 > 14.1 else 1),
    "a logarithm": lambda s, x, e: x.mul(2 if math.log(x.size(0)) > 5.3 else 1),
    "a logarithm by its name": lambda s, x, e: x.mul(2 if log2(x.size(0)) > 7.6 else 1),
    "by NumPy": lambda s, x, e: x.mul(2 if np.log(x.size(0)) > 5.3 else 1),
    "a plain number": lambda s, x, e: x.mul(2 if int(x.size(0)) > 200 else 1),
    "an equal number": lambda s, x, e: x.mul(2 if x.size(0) == 300 else 1),
    "one of some": lambda s, x, e: x.mul(2 if x.shape[0] in (300, 301) else 1),
    "a remainder": lambda s, x, e: x.mul(2 if x.size(0) % 13 == 1 else 1),
    "a share before it": lambda s, x, e: x.mul(2 if 0.5 * x.size(0) > 100 else 1),
    "a range": lambda s, x, e: x.mul(2 if len(range(x.size(0))) > 200 else 1),
    "the number": lambda s, x, e: x.mul(2 if abs(math.floor(x.size(0))) in range(201, 1_000) else 1),
    "digits": lambda s, x, e: x.mul(2 if round(x.size(0), -2) > 200 or x.size(0).bit_length() > 8 else 1),
    "a tensor": lambda s, x, e: x.mul(2 if torch.tensor(x.size(0)) > 200 else 1),
    "a tensor of one": lambda s, x, e: x.mul(2 if torch.tensor([x.size(0)]) > 200 else 1),
    "a tensor of a class": lambda s, x, e: x.mul(2 if torch.LongTensor([x.size(0)])[0] > 200 else 1),
    "a tensor of the class": lambda s, x, e: x.mul(2 if torch.Tensor([x.size(0)])[0] > 200 else 1),
    "largest index": lambda s, x, e: x.mul(2 if e.max() > 200 else 1),
    "largest index as a number": lambda s, x, e: x.mul(2 if int(e.max()) > 200 else 1),
}


@pytest.mark.thorough(
    "length",
    "shape",
    "numbers",
    "a share before it",
    "a logarithm by its name",
    "an equal number",
    "a tensor of one",
    "a tensor of the class",
    "largest index as a number",
    "a number with a point",
    "a quotient",
    "a fraction",
)
@pytest.mark.parametrize("what", BY_SIZE.values(), ids=BY_SIZE.keys())
def test_ways_by_how_many_there_are_are_refused(
    what: Callable[[Own, Tensor, Tensor], Tensor], converted: Converted, tmp_path: Path
) -> None:
    """Also where the graphs that layers are tried on are too small to go that way."""
    _, store = converted(GraphCase(nodes=300, edges=1_500))
    with pytest.raises(ModelError, match="Own: it goes another way by how many rows or edges it is given"):
        tuned_trainer(Own(what).double(), store, spill_dir=tmp_path)


def test_ways_that_a_graph_is_too_small_for_are_not(converted: Converted, tmp_path: Path) -> None:
    """One layer that has all of them."""

    def every(layer: Own, x: Tensor, edge_index: Tensor) -> Tensor:
        for what in BY_SIZE.values():
            x = what(layer, x, edge_index)
        return x

    _, store = converted(GraphCase(nodes=190, edges=800))
    tuned_trainer(Own(every).double(), store, spill_dir=tmp_path).close()


def test_another_way_without_edges_is_refused(converted: Converted, tmp_path: Path) -> None:
    """Where there are none at all: tiles without are given one, as PyG gives such a layer some of the graph."""

    class Early(Own):
        def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
            return super().forward(x, edge_index) if edge_index.numel() else self.linear(x)

    early = Early(lambda s, x, e: x).double()
    _, store = converted(GraphCase())
    tuned_trainer(early, store, spill_dir=tmp_path).close()
    _, store = converted(GraphCase(edges=0))
    with pytest.raises(ModelError, match="Early: it makes something else of a graph that has no edges at all"):
        tuned_trainer(early, store, spill_dir=tmp_path)


TENSORS: dict[str, Callable[[Own, Tensor, Tensor], Tensor]] = {
    "of a size": lambda s, x, e: x / torch.DoubleTensor([x.size(1)]).sqrt(),
    "of a number": lambda s, x, e: x * torch.scalar_tensor(x.size(1), dtype=x.dtype),
    "of a largest value": lambda s, x, e: x + 0.0 * torch.DoubleTensor([x[0].max()])[0],
    "of a largest value, by the class": lambda s, x, e: x + 0.0 * torch.Tensor([x[0].max()])[0],
    "of its own class": lambda s, x, e: x * s.linear.weight.data.new([x.size(1)]) if isinstance(x, torch.Tensor) else x,
}


@pytest.mark.parametrize("made", TENSORS.values(), ids=TENSORS.keys())
def test_tensors_are_made_by_their_classes(
    made: Callable[[Own, Tensor, Tensor], Tensor], converted: Converted, tmp_path: Path
) -> None:
    """Which read the memory of what says that it is one: the process ended where a stand-in for one did."""
    data, store = converted(ROUGH)
    assert_agrees(CustomCase(make=lambda f, c: Own(made)), data, tmp_path, epochs=1, store=store)


def test_dropout_of_nothing_is_taken(tmp_path: Path) -> None:
    """A layer with dropout of its own runs where that is set to 0."""
    case = CustomCase(make=lambda f, c: Own(lambda s, x, e: F.dropout(x, 0.0, s.training)))
    assert_agrees(case, random_data(ROUGH), tmp_path, epochs=1)


class Widened(MessagePassing):
    """Sums four times as many columns as it is given; ``centred``: less what looks at all rows."""

    def __init__(self, centred: bool) -> None:
        super().__init__()
        self.wide, self.norm = nn.Linear(F_IN, 4 * F_IN), nn.BatchNorm1d(F_IN) if centred else nn.Identity()

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.propagate(edge_index, x=self.wide(self.norm(x)))[:, :C]

    def message(self, x_i: Tensor, x_j: Tensor) -> Tensor:
        return (x_j - x_i).abs()


@pytest.mark.parametrize(("centred", "columns"), [(False, F_IN), (True, 4 * F_IN)])
def test_a_layer_runs_as_a_whole_where_narrower_rows_are_gathered_so(
    centred: bool, columns: int, converted: Converted, tmp_path: Path
) -> None:
    """And is opened all the same where it can run in no other way."""
    data, store = converted(ROUGH)
    case = CustomCase(make=lambda f, c: Widened(centred))
    plan = assert_agrees(case, data, tmp_path, epochs=EPOCHS, store=store)
    pulls = [item.pull for item in plan.programs["train"] if isinstance(item, RowPass) and item.pull]
    assert plan.matrices[pulls[0].source].grid.columns == columns
