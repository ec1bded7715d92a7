# SPDX-License-Identifier: Apache-2.0
"""Link prediction: losses, weights and scores of PyG in memory for the same links, whatever the memory."""

import contextlib
import copy
import inspect
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel
from torch_geometric.data import Data
from torch_geometric.nn import GCNConv, LGConv
from torch_geometric.nn.models import GAE, GAT, GCN, VGAE, ARLinkPredictor, GraphSAGE
from torch_geometric.transforms import RandomLinkSplit

import ooc
from ooc.cli import main
from ooc.conversion.held_out_links import HeldOut
from ooc.engine.record import EpochRecord
from ooc.kernels.dropout.rows import noise
from ooc.model.layers.decoders import binary_cross_entropy
from ooc.model.layers.links import LinkLosses
from ooc.sources.reading import Request
from ooc.sources.registry import open_source
from ooc.storage.store import Store
from ooc.train.embedding import LearntRows
from ooc.train.links.metrics import LinkMetric
from ooc.train.setup import Tuning
from tests.graphs import GraphCase, random_data
from tests.processes import together

_CASE = GraphCase(nodes=300, edges=1500, features=7, self_loops=9, duplicates=20, isolated=5)
_NODES, _EPOCHS = 300, 2


@pytest.fixture(scope="module")
def graph() -> Data:
    data = random_data(_CASE)
    return Data(x=data.x.double(), edge_index=data.edge_index)


@pytest.fixture(scope="module")
def store(graph: Data, tmp_path_factory: pytest.TempPathFactory) -> Store:
    return ooc.convert(graph, tmp_path_factory.mktemp("links") / "g.ooc", dtype="float64")


@pytest.fixture(scope="module")
def links() -> ooc.Links:
    """With a head of many links; validation links have tails of their own, test links share pairs."""
    generator = torch.Generator().manual_seed(4)

    def pairs(count: int) -> Tensor:
        return torch.randint(0, _NODES, (2, count), generator=generator)

    train = pairs(400)
    train[0, :90] = 17
    tails = torch.randint(0, _NODES, (40, 12), generator=generator)
    return ooc.Links(train, pairs(40), pairs(30), tails, pairs(50))


def _model(encoder: type[nn.Module] = GraphSAGE, decoder: str = "dot", dropout: float = 0.0) -> ooc.LinkPredictor:
    torch.manual_seed(1)
    return ooc.LinkPredictor(encoder(7, 8, 2, 6, dropout=dropout), decoder).double()


def _train(
    model: ooc.LinkPredictor, graph: Data | Store, links: ooc.Links, **options: Any
) -> tuple[list[EpochRecord], list[list[tuple[Tensor, Tensor]]]]:
    """The records, and what each epoch's steps were made of."""
    given = {"negatives": 2, "steps": 2, "memory": "24M", "seed": 3} | options
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    with ooc.LinkTrainer(model, graph, links, optimizer=optimizer, **given) as trainer:
        records = trainer.fit(_EPOCHS, progress=False)
        steps = range(given["steps"])
        drawn = [[trainer.negatives(epoch, step) for step in steps] for epoch in range(_EPOCHS)]
        with torch.no_grad():
            if isinstance(graph, Data):
                expected = model(graph.x, graph.edge_index, links.train)
                torch.testing.assert_close(trainer.score(links.train), expected, rtol=1e-9, atol=1e-11)
        return records, drawn


def _train_by_pyg(
    model: Any, graph: Data, links: ooc.Links, drawn: list[list[tuple[Tensor, Tensor]]], parameters: Any = None
) -> list[float]:
    """As anybody would write it; the mean loss of every epoch."""
    optimizer, losses = torch.optim.Adam(parameters or model.parameters(), lr=0.01), []
    for steps in drawn:
        total = count = 0.0
        for chosen, tails_EK in steps:
            heads = links.train[0, chosen]
            negative = torch.stack((heads.repeat_interleave(tails_EK.shape[1]), tails_EK.reshape(-1)))
            labels = torch.cat((torch.ones(len(chosen)), torch.zeros(negative.shape[1]))).double()
            optimizer.zero_grad()
            pairs = torch.cat((links.train[:, chosen], negative), dim=1)
            loss = F.binary_cross_entropy_with_logits(model(graph.x, graph.edge_index, pairs), labels)
            loss.backward()
            optimizer.step()
            total, count = total + loss.item() * len(labels), count + len(labels)
        losses.append(total / count)
    return losses


class OfOgb(nn.Module):
    """Gives scores in a column, or by themselves."""

    def __init__(self, *, column: bool) -> None:
        super().__init__()
        self.lin, self.column = nn.Linear(6, 1), column

    def forward(self, x_i: Tensor, x_j: Tensor) -> Tensor:
        scores: Tensor = self.lin(x_i * x_j)
        return scores if self.column else scores.squeeze(-1)


class OfIndex(OfOgb):
    """As PyG's, is given rows and which pairs of them are meant."""

    def forward(self, z: Tensor, edge_index: Tensor) -> Tensor:
        return super().forward(z[edge_index[0]], z[edge_index[1]])


class OfBothAndIndex(OfOgb):
    """As in PyG's introduction to link prediction."""

    def forward(self, x_user: Tensor, x_movie: Tensor, edge_label_index: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x_user[edge_label_index[0]], x_movie[edge_label_index[1]])


def test_compiled_encoders_are_taken_as_they_were() -> None:
    encoder = GraphSAGE(7, 8, 2, 6)
    assert ooc.LinkPredictor(torch.compile(encoder, backend="eager")).encoder is encoder


def test_decoders_have_several_forms(store: Store, links: ooc.Links) -> None:
    found = []
    for kind, column in ((OfOgb, False), (OfOgb, True), (OfIndex, False), (OfBothAndIndex, True)):
        torch.manual_seed(1)
        model = ooc.LinkPredictor(GraphSAGE(7, 8, 2, 6), kind(column=column)).double()
        with ooc.LinkTrainer(model, store, links, memory="100M") as trainer:
            losses = [record.loss for record in trainer.fit(1, progress=False)]
            found.append((losses, trainer.evaluate(), trainer.score(links.test).tolist()))
            assert model(torch.ones(9, 7).double(), torch.arange(8).view(2, 4), torch.arange(6).view(2, 3)).shape == (
                3,
            )
    assert all(one == found[0] for one in found)


def test_how_a_decoder_is_called_is_found_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """And not for every tile."""
    losses, zeros = LinkLosses(OfIndex(column=True), binary_cross_entropy), torch.zeros(3, 6)
    monkeypatch.setattr(inspect, "signature", lambda *given: pytest.fail("it is looked at again"))
    assert losses(zeros, torch.tensor([[0, 1], [1, 2]]), torch.ones(2)).shape == (3, 1)


def test_links_that_are_left_out_have_no_gradient() -> None:
    """Nor any that would be no number, as that of the distance between equal rows."""

    class Distance(nn.Module):
        def forward(self, head_EC: Tensor, tail_EC: Tensor) -> Tensor:
            return -(head_EC - tail_EC).pow(2).sum(dim=1).sqrt()

    z, pairs = torch.rand(3, 4, requires_grad=True), torch.tensor([[0, 1, 2], [1, 1, 0]])
    module = LinkLosses(Distance(), binary_cross_entropy)
    module(z, pairs, torch.tensor([1.0, torch.nan, 0.0])).sum().backward()
    assert z.grad is not None and z.grad.isfinite().all()


def test_a_decoder_is_told_how_it_is_called(store: Store, links: ooc.Links) -> None:
    class OfPairs(nn.Module):
        def forward(self, z: Tensor, pairs: Tensor) -> Tensor:
            row, column = pairs
            return (z[row] * z[column]).sum(dim=-1)

    with pytest.raises(ooc.ModelError, match=r"a decoder is called with rows of heads and of tails \[E, C\]"):
        ooc.LinkTrainer(ooc.LinkPredictor(GraphSAGE(7, 8, 2, 6), OfPairs()).double(), store, links, memory="100M")


@pytest.mark.parametrize(
    ("encoder", "decoder"),
    [(GraphSAGE, "dot"), (GCN, "mlp"), (GAT, "bilinear"), (GraphSAGE, "distmult"), (GCN, "complex")],
)
def test_losses_weights_and_scores_are_those_of_pyg(
    graph: Data, store: Store, links: ooc.Links, encoder: type[nn.Module], decoder: str
) -> None:
    model, other = _model(encoder, decoder), _model(encoder, decoder)
    records, drawn = _train(model, store, links)
    losses = _train_by_pyg(other, graph, links, drawn)
    assert [record.loss for record in records] == pytest.approx(losses, rel=1e-12)
    for own, expected in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(own, expected, rtol=1e-9, atol=1e-11)
    assert records[-1].valid_score == pytest.approx(_mean_reciprocal_rank(other, graph, links), rel=1e-12)


@torch.no_grad()
def _mean_reciprocal_rank(model: nn.Module, graph: Data, links: ooc.Links) -> float:
    """Of the validation links, by a model as PyG runs it."""
    scores = model(graph.x, graph.edge_index, links.valid)[:, None]
    pairs = torch.stack((links.valid[0].repeat_interleave(12), links.valid_negatives.reshape(-1)))
    others = model(graph.x, graph.edge_index, pairs).reshape(-1, 12)
    ranks = 1 + 0.5 * ((others > scores).sum(dim=1) + (others >= scores).sum(dim=1)).double()
    return float((1 / ranks).mean())


class MeanAndSpread(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.both, self.mean, self.spread = GCNConv(7, 8), GCNConv(8, 6), GCNConv(8, 6)

    def forward(self, x: Tensor, edge_index: Tensor) -> tuple[Tensor, Tensor]:
        x = self.both(x, edge_index).relu()
        return self.mean(x, edge_index), self.spread(x, edge_index)


class Variational(nn.Module):
    """PyG's VGAE as an encoder of links, with each row's divergence beside its embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.vgae = VGAE(MeanAndSpread())

    def forward(self, x: Tensor, edge_index: Tensor) -> tuple[Tensor, Tensor]:
        z = self.vgae.encode(x, edge_index)
        mu, logstd = self.vgae.__mu__, self.vgae.__logstd__
        return z, -0.5 * (1 + 2 * logstd - mu**2 - logstd.exp() ** 2).sum(dim=1, keepdim=True) / _NODES


def reconstruction(scores: Tensor, labels: Tensor) -> Tensor:
    """PyG's recon_loss of a link, of which there are as many as of negatives: twice its mean over both is PyG's."""
    return -2 * (torch.where(labels > 0, scores.sigmoid(), 1 - scores.sigmoid()) + 1e-15).log()


def test_a_variational_autoencoder(graph: Data, store: Store, links: ooc.Links) -> None:
    """Noise is drawn anew in every epoch, as dropout is; scores are of the means."""
    torch.manual_seed(1)
    models = [ooc.LinkPredictor(Variational(), loss=reconstruction).double() for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    records, drawn = _train(models[0], store, links, negatives=1, steps=1)
    vgae: Any = models[1].encoder.vgae
    optimizer, losses = torch.optim.Adam(models[1].parameters(), lr=0.01), []
    for epoch, [(chosen, tails_E1)] in enumerate(drawn):
        optimizer.zero_grad()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch, "randn_like", lambda x, epoch=epoch: noise(3, epoch, 1, 0, x))
            z = vgae.encode(graph.x, graph.edge_index)
        positive = links.train[:, chosen]
        loss = vgae.recon_loss(z, positive, torch.stack((positive[0], tails_E1[:, 0]))) + vgae.kl_loss() / _NODES
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert [record.loss for record in records] == pytest.approx(losses, rel=1e-9)
    for own, expected in zip(models[0].parameters(), models[1].parameters(), strict=True):
        torch.testing.assert_close(own, expected, rtol=1e-9, atol=1e-11)
    models[1].eval()
    assert records[-1].valid_score == pytest.approx(_mean_reciprocal_rank(models[1], graph, links), rel=1e-12)


class Halves(nn.Module):
    """ARLinkPredictor's embeddings, side by side, and its score of a pair of them."""

    def __init__(self, model: ARLinkPredictor, *, encodes: bool) -> None:
        super().__init__()
        self.model, self.encodes = model, encodes

    def forward(self, one: Tensor, other: Tensor) -> Tensor:
        if self.encodes:
            return torch.cat(self.model.encode(one), dim=1)
        attracts = one.shape[1] // 2
        product = one * other
        return product[:, :attracts].sum(dim=1) - product[:, attracts:].sum(dim=1)


def test_attracting_and_repelling(graph: Data, store: Store, links: ooc.Links) -> None:
    """PyG's ARLinkPredictor, whose encoder does not look at edges."""
    torch.manual_seed(1)
    models = [ARLinkPredictor(7, 8, 6).double() for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    predictor = ooc.LinkPredictor(Halves(models[0], encodes=True), Halves(models[0], encodes=False))
    records, drawn = _train(predictor, store, links)

    def scores(x: Tensor, edge_index: Tensor, pairs: Tensor) -> Tensor:
        return models[1].decode(*models[1].encode(x), pairs)

    losses = _train_by_pyg(scores, graph, links, drawn, [*models[1].parameters()])
    assert [record.loss for record in records] == pytest.approx(losses, rel=1e-9)


def test_a_plateau_goes_by_the_scores_of_links(store: Store, links: ooc.Links) -> None:
    """Whether or not nodes have labels and splits, of which there are none here."""
    model = _model()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, mode="max", patience=0)
    options: dict[str, Any] = {"optimizer": optimizer, "scheduler": plateau, "memory": "24M"}
    with ooc.LinkTrainer(model, store, links, **options) as trainer:
        trainer.fit(1, progress=False)
        assert plateau.last_epoch == 1
    with (
        ooc.LinkTrainer(model, store, ooc.Links(links.train, None, links.test), **options) as trainer,
        pytest.raises(ooc.OptionError, match=r"a plateau schedule .*, and there are no validation links"),
    ):
        trainer.fit(1)


def test_averaged_weights_are_scored(graph: Data, store: Store, links: ooc.Links) -> None:
    """Once an epoch they are averaged, and the model goes on with its own."""
    model, plain = _model(decoder="distmult"), _model(decoder="distmult")
    average = AveragedModel(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    given = {"negatives": 2, "steps": 2, "memory": "24M", "seed": 3}
    with ooc.LinkTrainer(model, store, links, optimizer=optimizer, average=average, **given) as trainer:
        records = trainer.fit(_EPOCHS, progress=False)
        with torch.no_grad():
            torch.testing.assert_close(
                trainer.score(links.test), average.module(graph.x, graph.edge_index, links.test), rtol=1e-9, atol=1e-11
            )
    assert int(average.n_averaged) == _EPOCHS
    assert records[-1].valid_score == pytest.approx(_mean_reciprocal_rank(average.module, graph, links), rel=1e-12)
    _train(plain, store, links)
    assert all(map(torch.equal, model.parameters(), plain.parameters()))


def test_every_link_is_in_one_step_and_epochs_draw_anew(store: Store, links: ooc.Links) -> None:
    _, drawn = _train(_model(), store, links, steps=3)
    for steps in drawn:
        assert torch.cat([chosen for chosen, _ in steps]).sort().values.equal(torch.arange(400))
        assert [len(chosen) for chosen, _ in steps] == [134, 133, 133]
    first, second = (torch.cat([tails for _, tails in steps]) for steps in drawn[:2])
    assert not first.equal(second)
    counts = torch.bincount(torch.cat([t.reshape(-1) for steps in drawn for _, t in steps]), minlength=_NODES)
    expected = _EPOCHS * 400 * 2 / _NODES
    assert float(((counts - expected) ** 2 / expected).sum()) < 400  # chi-square of 299 degrees: 1 in 20,000 above


def test_steps_of_an_epoch_drop_out_apart(store: Store, links: ooc.Links) -> None:
    """With a learning rate of nothing, and all links in a step, losses differ by masks alone."""
    losses = set()
    model = _model(dropout=0.5)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-30)
    with ooc.LinkTrainer(model, store, links, memory="24M", steps=2, optimizer=optimizer) as trainer:
        trainer._training.draw = lambda epoch, step, steps, both_ways: draw(0, 0, 1, both_ways=both_ways)  # type: ignore[method-assign]
        draw = type(trainer._training).draw.__get__(trainer._training)
        run = trainer._session.run

        def watched(*given: Any) -> None:
            run(*given)
            if given[0] == "train":  # not what is aggregated once, before the first step
                losses.add(trainer._objective.mean_loss())

        trainer._session.run = watched  # type: ignore[method-assign,assignment]
        trainer.fit(2, eval_every=0, progress=False)
    assert len(losses) == 4


def test_random_link_split_is_taken_as_it_is(graph: Data) -> None:
    torch.manual_seed(0)
    train, valid, test = RandomLinkSplit(num_val=0.1, num_test=0.1)(graph)
    links = ooc.Links.of_split(train, valid, test)
    records, _ = _train(_model(), train, links, metric="roc-auc", steps=1, memory="64M")
    assert all(0 < one.valid_score < 1 and one.train_score is None for one in records if one.valid_score is not None)


def test_links_with_labels_of_their_own_are_refused(graph: Data) -> None:
    """PyG counts these from 1 then, 0 being none: those of 1 alone would be links."""
    labelled = Data(graph.x, graph.edge_index, edge_label=torch.arange(graph.num_edges) % 3)
    with pytest.raises(ooc.OptionError, match="links have labels of their own in edge_label"):
        ooc.Links.of_split(*RandomLinkSplit(num_val=0.1, num_test=0.1)(labelled))


@pytest.mark.parametrize("directed", [False, True])
def test_edges_are_held_out_when_a_store_is_made(tmp_path: Path, graph: Data, directed: bool) -> None:
    """All of them are in one of three, by the source's ids, whatever their direction; what is left is trained on."""
    edges = graph.edge_index if directed else torch.cat((graph.edge_index, graph.edge_index.flip(0)), dim=1)
    edges = edges.unique(dim=1)
    data = Data(x=graph.x, edge_index=edges, y=torch.zeros(_NODES).long())
    ooc.convert(data, tmp_path / "g.ooc", hold_out_links="0.2,0.3,5", split="random", order="hop", dtype="float64")
    links, store = ooc.Links.read(tmp_path / "g.links.npz"), ooc.open(tmp_path / "g.ooc")
    offsets, tails = (array.read() for array in store.topology("in" if store.undirected else "out"))
    numbers = store.array("perm").read()
    left = [
        *zip(numbers[np.repeat(np.arange(_NODES), np.diff(offsets))].tolist(), numbers[tails].tolist(), strict=True)
    ]
    held = [*zip(*links.valid.tolist(), strict=True), *zip(*links.test.tolist(), strict=True)]
    if not directed:
        held += [(tail, head) for head, tail in held]
    assert sorted(left + held) == sorted(zip(*edges.tolist(), strict=True))
    assert 0.15 < links.valid.shape[1] / (links.valid.shape[1] + links.test.shape[1]) * 0.5 < 0.25
    with ooc.LinkTrainer(_model(), store, links, memory="24M") as trainer:
        trainer.fit(1, progress=False)
        chosen, _ = trainer.negatives(0)
    loops = sum(head == tail for head, tail in left)
    assert len(chosen) == (len(left) - loops) // (1 if directed else 2)


def test_links_go_by_ids_that_are_texts(tmp_path: Path) -> None:
    """Those that are held out as well, and no id is taken for one that it begins with."""
    rng = np.random.default_rng(0)
    lines = [f"n{head},n{tail}" for head, tail in rng.integers(90, 120, (200, 2)).tolist() if head != tail]
    (tmp_path / "edges.csv").write_text("\n".join(["src,dst", *lines]) + "\n")
    options = {"features": "random:4", "labels": "random:2", "hold_out_links": "0.2,0.2"}
    store = ooc.convert(tmp_path / "edges.csv", tmp_path / "g.ooc", **options)
    links = ooc.Links.read(tmp_path / "g.links.npz")
    held = {f"{head.decode()},{tail.decode()}" for head, tail in links.valid.T.tolist() + links.test.T.tolist()}
    assert held and held <= {*lines, *(",".join(reversed(line.split(","))) for line in lines)}
    model = ooc.LinkPredictor(GCN(4, 8, 2, 6))
    with ooc.LinkTrainer(model, store, links, memory="24M") as trainer:
        trainer.fit(1, progress=False)
        assert trainer.score(np.array([["n90"], ["n119"]])).shape == (1,)
        with pytest.raises(ooc.OptionError, match="there is no node"):
            trainer.score(np.array([["n90"], ["n1190"]]))
        with pytest.raises(ooc.OptionError, match="the ids of these nodes are texts"):
            trainer.negatives(0)


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"decoder": "complex", "channels": 5}, "decoder complex needs an even number of channels, not 5"),
        ({"decoder": "cosine"}, "decoder 'cosine' is not one of dot, distmult, complex, bilinear, mlp"),
    ],
)
def test_decoders_that_are_none_are_refused(given: dict[str, Any], told: str) -> None:
    with pytest.raises(ooc.OptionError, match=told):
        ooc.LinkPredictor(GCN(4, 8, 2, 5), **given)


@pytest.mark.parametrize("text", ["0.5", "0.5,0.5", "-0.1,0.2", "a,b", "0.1,0.1,x", "0,0", "0.1,0.1,1,1", "0.1,0.1,-3"])
def test_shares_to_hold_out_that_are_none_are_refused(tmp_path: Path, graph: Data, text: str) -> None:
    with pytest.raises(ooc.OptionError, match="such as"):
        ooc.convert(graph, tmp_path / "g.ooc", hold_out_links=text)
    with pytest.raises(ooc.OptionError, match="has one type of edges; leave out :a,b,c"):
        ooc.convert(graph, tmp_path / "g.ooc", hold_out_links="0.1,0.1:a,b,c")
    assert list(tmp_path.iterdir()) == []


def test_metrics_are_as_defined() -> None:
    rng = np.random.default_rng(0)
    positive, shared = rng.integers(0, 9, 50).astype(float), rng.integers(0, 9, 80).astype(float)
    best = sorted(shared)[-7]
    assert LinkMetric.of("hits@7").of_shared(positive, shared) == np.mean([score > best for score in positive])
    assert LinkMetric.of("hits@81").of_shared(positive, shared) == 1.0
    pairs = [(p > n) + 0.5 * (p == n) for p in positive for n in shared]
    assert LinkMetric.of("roc-auc").of_shared(positive, shared) == pytest.approx(np.mean(pairs))
    ranks = [1 + 0.5 * (sum(n > p for n in shared) + sum(n >= p for n in shared)) for p in positive]
    mrr = LinkMetric.of("mrr")
    assert mrr.of_shared(positive, shared) == pytest.approx(np.mean([1 / rank for rank in ranks]))
    own = np.concatenate((positive[:, None], np.tile(shared, (50, 1))), axis=1)
    assert mrr.total_of_own(own) / 50 == pytest.approx(mrr.of_shared(positive, shared))
    assert LinkMetric.of("hits@7").total_of_own(own) == sum(rank <= 7 for rank in ranks)


@pytest.mark.parametrize("metric", ["mrr", "hits@3", "roc-auc"])
def test_links_whose_scores_are_no_numbers_have_no_rank(store: Store, links: ooc.Links, metric: str) -> None:
    """No negative is above NaN: they were all the first."""
    model = _model()
    with ooc.LinkTrainer(model, store, links, metric=metric) as trainer:
        for parameter in model.parameters():
            parameter.data.fill_(torch.nan)
        assert {*trainer.evaluate().values()} == {None}


@pytest.mark.parametrize("metric", ["hits@0", "hits@", "accuracy"])
def test_a_metric_that_is_none_of_links_is_refused(store: Store, links: ooc.Links, metric: str) -> None:
    with pytest.raises(ooc.OptionError, match="mrr, hits@K, roc-auc"):
        ooc.LinkTrainer(_model(), store, links, metric=metric)


def test_two_links_are_ranked_against_pairs_that_both_share(graph: Data, tmp_path: Path) -> None:
    """As they come of a split: an array of two rows might be tails of each link's own, and is refused."""
    split = RandomLinkSplit(num_val=2, num_test=0.1)(graph)
    links = ooc.Links.of_split(*split)
    assert links.valid.shape == (2, 2)
    model = _model()
    with ooc.LinkTrainer(model, split[0], links, memory="64M", metric="roc-auc", spill_dir=tmp_path) as trainer:
        found = trainer.evaluate()["valid_score"]
    with torch.no_grad():
        scores = model.eval()(split[0].x, split[0].edge_index, split[1].edge_label_index)
    positive, negative = scores[split[1].edge_label == 1, None], scores[split[1].edge_label == 0]
    assert found == pytest.approx(float((positive > negative).double().mean()))
    ambiguous = ooc.Links(links.train, links.valid, valid_negatives=torch.stack(links.valid_negatives))
    with pytest.raises(ooc.OptionError, match="a tuple, of pairs, or a list, of tails"):
        ooc.LinkTrainer(model, split[0], ambiguous, memory="64M", spill_dir=tmp_path)


def test_splits_with_labels_apart_are_the_same_links(graph: Data) -> None:
    found = []
    for apart in (False, True):
        torch.manual_seed(3)
        found.append(ooc.Links.of_split(*RandomLinkSplit(0.1, 0.1, split_labels=apart)(graph)))
    for name in ("train", "valid", "test"):
        assert torch.equal(getattr(found[0], name), getattr(found[1], name)), name
    assert found[0].test_negatives.shape == found[1].test_negatives.shape


def test_links_with_labels_that_are_fractions_are_refused(graph: Data) -> None:
    rated = Data(x=graph.x, edge_index=graph.edge_index, edge_label=torch.rand(graph.num_edges))
    with pytest.raises(ooc.OptionError, match="labels of their own in edge_label"):
        ooc.Links.of_split(*RandomLinkSplit(0.1, 0.1, neg_sampling_ratio=0.0)(rated))
    with pytest.raises(ooc.OptionError, match="there is no edge_label"):
        ooc.Links.of_split(graph, graph, graph)


@pytest.mark.parametrize("loss", [nn.BCEWithLogitsLoss(pos_weight=torch.tensor(3.0)), F.mse_loss])
def test_means_of_torchs_are_of_each_link(loss: Any, graph: Data, links: ooc.Links, tmp_path: Path) -> None:
    of_each = ooc.LinkPredictor(GraphSAGE(7, 8, 2, 6), loss=loss).double()
    with ooc.LinkTrainer(of_each, graph, links, memory="64M", spill_dir=tmp_path) as trainer:
        before = copy.deepcopy(of_each)
        (record,) = trainer.fit(1, progress=False)
        chosen, tails = trainer.negatives(0)
    pairs = torch.cat((links.train[:, chosen], torch.stack((links.train[0, chosen], tails[:, 0]))), dim=1)
    labels = torch.cat((torch.ones(len(chosen)), torch.zeros(len(chosen)))).double()
    assert record.loss == pytest.approx(float(loss(before(graph.x, graph.edge_index, pairs), labels)), rel=1e-9)


class Probability(nn.Module):
    def forward(self, head_EC: Tensor, tail_EC: Tensor) -> Tensor:
        return (head_EC * tail_EC).sum(dim=-1).sigmoid()


def test_losses_may_be_of_probabilities(graph: Data, links: ooc.Links, tmp_path: Path) -> None:
    torch.manual_seed(1)
    encoder = GraphSAGE(7, 8, 2, 6).double()
    found = []
    for decoder, loss in ((Probability(), nn.BCELoss()), (Probability(), F.binary_cross_entropy), ("dot", None)):
        given = {} if loss is None else {"loss": loss}
        model = ooc.LinkPredictor(copy.deepcopy(encoder), decoder, **given)
        with ooc.LinkTrainer(model, graph, links, memory="64M", spill_dir=tmp_path) as trainer:
            found.append(trainer.fit(1, progress=False)[0].loss)
    assert found == pytest.approx(3 * found[-1:], rel=1e-9)


def _pairwise(scores: Tensor, labels: Tensor) -> Tensor:
    return -F.logsigmoid(scores[labels > 0] - scores[labels == 0])


@pytest.mark.parametrize("loss", [nn.BCEWithLogitsLoss(reduction="sum"), lambda s, y: (s - y).abs().mean(), _pairwise])
def test_losses_that_are_not_of_each_link_are_refused(loss: Any, store: Store, links: ooc.Links) -> None:
    model = ooc.LinkPredictor(GraphSAGE(7, 8, 2, 6), loss=loss).double()
    with pytest.raises(ooc.ModelError, match="it must give each link's loss by itself"):
        ooc.LinkTrainer(model, store, links, memory="24M")


def test_average_precision_is_that_of_links_and_negatives_together(store: Store, links: ooc.Links) -> None:
    found = LinkMetric.of("average-precision").of_shared(np.array([3.0, 1.0]), np.array([2.0, 1.0, 0.0]))
    assert found == pytest.approx(0.5 * 1 + 0.5 * 2 / 4)
    with ooc.LinkTrainer(_model(), store, links, memory="24M", metric="average-precision") as trainer:
        assert 0 < trainer.evaluate()["test_score"] < 1


def test_whole_numbers_may_be_numpys(store: Store, links: ooc.Links) -> None:
    losses = []
    for whole in (int, np.int64):
        given = {"steps": whole(2), "negatives": whole(3), "seed": whole(1)}
        with ooc.LinkTrainer(_model(), store, links, memory="24M", **given) as trainer:
            losses.append(trainer.fit(1, eval_every=0, progress=False)[0].loss)
    assert losses[0] == losses[1]


def test_what_cannot_be_is_refused_by_name(store: Store, links: ooc.Links) -> None:
    with pytest.raises(ooc.OptionError, match="LinkTrainer: missing a required argument: 'links'"):
        ooc.LinkTrainer(_model(), store, memory="24M")  # type: ignore[call-arg]
    with pytest.raises(ooc.OptionError, match="LinkTrainer takes no memmory=; did you mean memory"):
        ooc.LinkTrainer(_model(), store, links, memmory="24M")
    with pytest.raises(ooc.OptionError, match=r"must be ooc.Links\("):
        ooc.LinkTrainer(_model(), store, links.train)
    for encoder, decoder in ((GraphSAGE(7, 8, 2, 6), lambda h, t: h @ t), (nn.Module(), "dot")):
        with pytest.raises(ooc.ModelError, match="must be a torch module with a forward"):
            ooc.LinkPredictor(encoder, decoder)  # type: ignore[arg-type]
    encodes = type("Net", (nn.Module,), {"encode": GraphSAGE.forward})()
    with pytest.raises(ooc.ModelError, match="with a forward, not Net; what it calls encode must be its forward"):
        ooc.LinkPredictor(encodes)
    with pytest.raises(ooc.ModelError, match="the encoder has a decoder, OfOgb, which is not called"):
        ooc.LinkPredictor(GAE(GraphSAGE(7, 8, 2, 6), OfOgb(column=True)))
    with pytest.raises(ooc.ModelError, match="LinkPredictor"):
        ooc.LinkTrainer(GraphSAGE(7, 8, 2, 6), store, links)  # type: ignore[arg-type]
    with pytest.raises(ooc.OptionError, match="loss= is of nodes; the loss of links is the LinkPredictor's own"):
        ooc.LinkTrainer(_model(), store, links, loss=nn.MSELoss())
    related = ooc.LinkPredictor(GraphSAGE(7, 8, 2, 6), "distmult", channels=6, relations=3).double()
    with pytest.raises(ooc.OptionError, match="tells types of edges apart, and links are of one; leave out relations="):
        ooc.LinkTrainer(related, store, links, memory="24M")
    with ooc.LinkTrainer(_model(), store, links, memory="24M") as trainer:
        for what in ("logits", "labels"):
            with pytest.raises(ooc.OptionError, match=f"has embeddings of nodes, no {what}; predict embeddings"):
                trainer.predict(what)
        with pytest.raises(ooc.OptionError, match="a type of nodes is chosen for their embedding, of a graph with ty"):
            trainer.predict(node_type="user")
    with pytest.raises(ooc.OptionError, match="there is no node 300"):
        ooc.LinkTrainer(_model(), store, ooc.Links(torch.tensor([[0], [300]])))
    with pytest.raises(ooc.OptionError, match=r"\[2, E\]"):
        ooc.LinkTrainer(_model(), store, ooc.Links(links.train.T))
    with pytest.raises(ooc.OptionError, match="not Data; data that RandomLinkSplit gives has them in edge_label_index"):
        ooc.LinkTrainer(_model(), store, ooc.Links(Data(edge_index=links.train)))
    with pytest.raises(ooc.OptionError, match=r"valid_negatives must be \[2, M\] or \[40, K\]"):
        ooc.LinkTrainer(_model(), store, ooc.Links(links.train, links.valid, valid_negatives=links.test.T))
    with pytest.raises(ooc.OptionError, match="401 steps an epoch are more than the 400 training links"):
        ooc.LinkTrainer(_model(), store, links, steps=401)
    with pytest.raises(ooc.BudgetError, match="memory="):
        _train(_model(), store, links, memory="200K")
    with pytest.raises(ooc.BudgetError, match=r"(finding .* nodes|links in order) needs .*; give memory='\d+K?'"):
        _train(_model(), store, links, memory="1K")

    class TwoHops(nn.Module):
        def forward(self, head_EC: Tensor, tail_EC: Tensor) -> Tensor:
            return (head_EC * tail_EC.mean(dim=0)).sum(dim=-1)

    with pytest.raises(ooc.ModelError, match="decoder TwoHops"):
        _train(ooc.LinkPredictor(GraphSAGE(7, 8, 2, 6), TwoHops()), store, links)


def test_an_embedding_is_trained_along(tmp_path: Path, graph: Data, links: ooc.Links) -> None:
    """Of a graph without features: rows and losses of torch's."""
    bare = Data(edge_index=graph.edge_index, num_nodes=_NODES)
    store = ooc.convert(bare, tmp_path / "bare.ooc", dtype="float64")
    model, other = _model(GCN), _model(GCN)
    learnt = LearntRows(ooc.Embedding(7), store, torch.float64, seed=3)
    drawn_rows = learnt.first_rows("", 0, (_NODES, 7))
    records, drawn = _train(model, store, links, embedding=ooc.Embedding(7))
    rows = nn.Parameter(torch.from_numpy(drawn_rows))
    parameters = [*other.parameters(), rows]
    losses = _train_by_pyg(other, Data(x=rows, edge_index=graph.edge_index), links, drawn, parameters)
    assert [record.loss for record in records] == pytest.approx(losses, rel=1e-10)
    with pytest.raises(ooc.ModelError, match="no features"):
        _train(model, store, links)


class Weighted(nn.Module):
    """A decoder with the only parameters that there are."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(-1, 1, 6))

    def forward(self, heads: Tensor, tails: Tensor) -> Tensor:
        return (heads * tails) @ self.weight


def test_an_encoder_without_parameters_computes_as_the_decoder_does(tmp_path: Path, graph: Data) -> None:
    """In float64: what it gives was predicted in float32. Pairs are scored before anything is trained, too."""
    store = ooc.convert(Data(edge_index=graph.edge_index, num_nodes=_NODES), tmp_path / "bare.ooc", dtype="float64")
    model = ooc.LinkPredictor(Smoothed(), Weighted()).double()
    with ooc.LinkTrainer(model, store, ooc.Links(graph.edge_index[:, :90]), memory="24M", embedding=6) as trainer:
        first = trainer.score(graph.edge_index[:, :5])
        heads, tails = trainer.predict()[graph.edge_index[:, :5]]
        torch.testing.assert_close(first, model.decoder(heads, tails), rtol=1e-12, atol=1e-14)
        trainer.fit(1, progress=False)
        rows, found = trainer.predict(layer=0), trainer.predict()
        torch.testing.assert_close(found, LGConv()(rows, graph.edge_index), rtol=1e-12, atol=1e-14)
        scores = trainer.score(graph.edge_index[:, :5])
    heads, tails = found[graph.edge_index[:, :5]]
    torch.testing.assert_close(scores, model.decoder(heads, tails), rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("frozen", [False, True])
def test_an_encoder_may_have_nothing_to_train(store: Store, graph: Data, links: ooc.Links, frozen: bool) -> None:
    encoder = GCNConv(7, 7).requires_grad_(False) if frozen else LGConv()
    model = ooc.LinkPredictor(encoder, "bilinear", channels=7).double()
    with ooc.LinkTrainer(model, store, links, memory="24M") as trainer:
        trainer.fit(1, progress=False)
        expected = encoder(graph.x, graph.edge_index)
        torch.testing.assert_close(trainer.predict(), expected, rtol=1e-12, atol=1e-14)


class Dropping(nn.Module):
    """A decoder of what a part leaves of the products."""

    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self.part = part

    def forward(self, heads: Tensor, tails: Tensor) -> Tensor:
        return self.part(heads * tails).sum(-1)  # type: ignore[no-any-return]


def test_parts_of_decoders_in_eval_mode_are_frozen(store: Store, links: ooc.Links) -> None:
    """In a model in training mode; of one in eval mode all parts are trained, as encoders are."""
    found = []
    for part, is_training in ((nn.Identity(), True), (nn.Dropout().eval(), True), (nn.Dropout(), False)):
        torch.manual_seed(1)
        model = ooc.LinkPredictor(GraphSAGE(7, 8, 1, 6), Dropping(part)).double()
        with ooc.LinkTrainer(model if is_training else model.eval(), store, links, memory="24M") as trainer:
            found.append(trainer.fit(1, progress=False)[0].loss)
    assert found[0] == found[1] != found[2]


class Smoothed(nn.Module):
    """Sums of embeddings over neighbours, as in LightGCN."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = LGConv()

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.conv(x, edge_index)


def test_nothing_lies_in_the_scratch_folder(store: Store, links: ooc.Links, tmp_path: Path) -> None:
    """Whatever happens to the process, nothing is left there: files have no names."""
    with ooc.LinkTrainer(_model(), store, links, memory="24M", spill_dir=tmp_path / "scratch") as trainer:
        trainer.fit(1, progress=False)
        assert [*(tmp_path / "scratch").iterdir()] == []
        trainer.score(links.valid)
    (tmp_path / "file").write_text("")
    with pytest.raises(ooc.OocError, match="file"):
        ooc.LinkTrainer(_model(), store, links, memory="24M", spill_dir=tmp_path / "file")


def test_processes_change_no_bit(store: Store, links: ooc.Links, tmp_path: Path) -> None:
    def work(rank: int) -> Any:
        model = _model(GAT, "mlp")
        records, drawn = _train(model, store, links, memory="200M", threads=1, _tuning=Tuning(tile_rows=16))
        losses = [(one.loss, one.valid_score, one.test_score) for one in records]
        return losses, drawn[-1][-1][1], [parameter.detach() for parameter in model.parameters()]

    alone, *others = [*together(1, tmp_path, work), *together(3, tmp_path, work)]
    for losses, tails, weights in others:
        assert losses == alone[0] and tails.equal(alone[1])
        assert all(map(torch.equal, weights, alone[2]))


def test_processes_sort_links_each_in_its_own_part_of_the_memory(
    store: Store, links: ooc.Links, tmp_path: Path
) -> None:
    def work(rank: int) -> str:
        with pytest.raises(ooc.BudgetError if rank == 0 else ooc.RankError) as caught:
            ooc.LinkTrainer(_model(), store, links, memory="48K")
        return str(caught.value)

    for error in together(2, tmp_path, work):
        assert "400 links in order needs 25.6 KB" in error and error.endswith(
            "give memory='51200', for 2 processes, or more"
        )


def _saved(folder: Path, graph: Data, links: ooc.Links) -> tuple[str, str]:
    ooc.convert(Data(x=graph.x.float(), edge_index=graph.edge_index), folder / "g.ooc")
    names = ("train", "valid", "test", "valid_negatives")
    np.savez(folder / "links.npz", **{name: np.asarray(getattr(links, name)) for name in names})
    return str(folder / "g.ooc"), str(folder / "links.npz")


def test_a_run_that_is_gone_on_with_is_an_undisturbed_one(tmp_path: Path, graph: Data, links: ooc.Links) -> None:
    store, file = _saved(tmp_path, graph, links)
    options = ["--links", file, "--hidden", "8", "--layers", "2", "--decoder", "mlp", "--link-steps", "2", "-q"]
    options += ["--memory", "24M", "--embedding", "4"]
    whole, halves = str(tmp_path / "whole"), str(tmp_path / "halves")
    assert main(["train", store, *options, "--epochs", "4", "--out", whole]) == 0
    assert main(["train", store, *options, "--epochs", "2", "--out", halves]) == 0
    assert main(["train", "--resume", "--out", halves, "--epochs", "4", "-q"]) == 0
    one, other = (np.genfromtxt(_losses(tmp_path / name)) for name in ("whole", "halves"))
    assert len(one) == 4 and (one == other).all()
    assert main(["predict", whole, "--what", "embeddings", "--out", str(tmp_path / "z.npy"), "-q"]) == 0
    assert np.load(tmp_path / "z.npy").shape == (_NODES, 8)
    np.save(tmp_path / "pairs.npy", links.valid)
    scores = ["--what", "scores", "--pairs", str(tmp_path / "pairs.npy"), "-q"]
    assert main(["predict", whole, *scores, "--out", str(tmp_path / "s.npy")]) == 0
    assert main(["predict", whole, *scores, "--out", str(tmp_path / "s.csv")]) == 0
    lines = (tmp_path / "s.csv").read_text().splitlines()
    assert lines[0] == "pair,score" and len(lines) == 41
    assert [float(line.split(",")[1]) for line in lines[1:]] == pytest.approx(np.load(tmp_path / "s.npy"))
    assert main(["predict", whole, "--what", "scores"]) == 2


def test_links_are_planned_for(
    tmp_path: Path, graph: Data, links: ooc.Links, capsys: pytest.CaptureFixture[str]
) -> None:
    """As they are trained, and nothing stays behind."""
    store, file = _saved(tmp_path, graph, links)
    options = ["--links", file, "--hidden", "8", "--layers", "2", "--memory", "24M", "--spill-dir", str(tmp_path)]
    there = sorted(tmp_path.iterdir())
    assert main(["plan", store, *options, "--json"]) == 0
    planned = json.loads(capsys.readouterr().out)
    assert main(["train", store, *options, "--dry-run", "--json", "--out", str(tmp_path / "run")]) == 0
    trained = json.loads(capsys.readouterr().out.splitlines()[0])["plan"]
    assert planned["fates"] == trained["fates"]
    assert main(["plan", "--graph", "products", *options]) == 2
    assert sorted(tmp_path.iterdir()) == there


def _losses(run: Path) -> list[str]:
    return [str(json.loads(line)["loss"]) for line in (run / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--links", "none.npz"], "none.npz cannot be read: No such file or directory"),
        (["--decoder", "mlp"], "--decoder is of link prediction"),
        (["--metric", "mrr"], "--metric mrr is of links"),
        (["--links", "links.npz", "--sampler", "neighbor"], "--sampler is not for --links"),
    ],
)
def test_options_that_do_not_fit_are_refused_in_a_line(
    tmp_path: Path,
    graph: Data,
    links: ooc.Links,
    options: list[str],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    _saved(tmp_path, graph, links)
    monkeypatch.chdir(tmp_path)
    assert main(["train", "g.ooc", *options, "--out", "run"]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_files_of_something_else_are_refused_in_a_line(tmp_path: Path) -> None:
    np.savez(tmp_path / "graph.npz", train=np.zeros((2, 3)), x=np.zeros(3))
    np.save(tmp_path / "pairs.npy", np.zeros((2, 3)))
    (tmp_path / "pairs.csv").write_text("0,1\n")
    for name, said in (
        ("graph.npz", "it has x; its arrays are train"),
        ("pairs.npy", no := "is no .npz"),
        ("pairs.csv", no),
    ):
        with pytest.raises(ooc.OptionError, match=f"{name} cannot be read: .*{said}"):
            ooc.Links.read(tmp_path / name)


def test_damaged_files_are_refused_in_a_line(tmp_path: Path) -> None:
    """Wherever a byte is another one, or missing; a file that can be read all the same is no matter."""
    edges, rng = np.arange(40).reshape(20, 2), np.random.default_rng(0)
    np.savez(tmp_path / "links.npz", train=edges.T, valid=edges.T)
    for split in ("train", "valid", "test"):
        torch.save({"edge": edges, "edge_neg": edges}, tmp_path / f"{split}.pt")
    for file, asked in ((tmp_path / "links.npz", tmp_path / "links.npz"), (tmp_path / "valid.pt", tmp_path)):
        whole = file.read_bytes()
        for trial in range(60):
            damaged = bytearray(whole[: rng.integers(0, len(whole))] if trial % 3 == 0 else whole)
            if damaged:
                damaged[rng.integers(0, len(damaged))] ^= int(rng.integers(1, 256))
            file.write_bytes(damaged)
            with contextlib.suppress(ooc.OptionError):
                ooc.Links.read(asked)
        file.write_bytes(whole)
        assert ooc.Links.read(asked).train.shape == (2, 20)


def test_splits_are_read_as_ogb_has_them(tmp_path: Path) -> None:
    edges, tails = np.arange(8).reshape(4, 2), np.arange(12).reshape(4, 3)
    for split in ("train", "valid", "test"):
        torch.save({"edge": edges, "edge_neg": edges[::-1].copy()}, tmp_path / f"{split}.pt")
    found = ooc.Links.read(tmp_path)
    assert (found.train == edges.T).all() and (found.valid_negatives == edges[::-1].T).all()
    for split in ("train", "valid", "test"):
        own = {} if split == "train" else {"target_node_neg": torch.from_numpy(tails)}
        torch.save({"source_node": edges[:, 0], "target_node": edges[:, 1], **own}, tmp_path / f"{split}.pt")
    found = ooc.Links.read(tmp_path)
    assert (found.test == edges.T).all() and (found.test_negatives == tails).all()


def test_more_links_than_memory_has_room_for_are_refused(tmp_path: Path) -> None:
    source = open_source(
        "synthetic:nodes=900,edges=3000,features=2,classes=2",
        format=None,
        request=Request(split=None, budget_bytes=10**9),
    )
    with pytest.raises(ooc.BudgetError, match=r"holding out 2,650 links needs 254 KB"):
        HeldOut.parse("0.3,0.2").write(source, tmp_path / "l.npz", undirected=False, block_edges=99, budget_bytes=1000)
    assert list(tmp_path.iterdir()) == []
