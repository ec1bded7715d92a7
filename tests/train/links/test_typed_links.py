# SPDX-License-Identifier: Apache-2.0
"""Links between nodes of a graph with types: losses, weights and scores of PyG in memory, whatever the memory."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch_geometric.data import HeteroData
from torch_geometric.nn import HeteroConv, RGCNConv, SAGEConv
from torch_geometric.transforms import RandomLinkSplit

import ooc
from ooc.cli import main
from ooc.engine.record import EpochRecord
from ooc.models import RelationalAttention
from ooc.storage.store import Store
from ooc.train.setup import Tuning
from tests.examples import thorough

_USERS, _MOVIES, _EPOCHS = 90, 40, 2
_RATES, _KNOWS = ("user", "rates", "movie"), ("user", "knows", "user")


@pytest.fixture(scope="module")
def split() -> list[HeteroData]:
    """Of ratings; a user has rated most movies."""
    generator = torch.Generator().manual_seed(0)

    def ends(count: int, *nodes: int) -> Tensor:
        return torch.stack([torch.randint(0, n, (count,), generator=generator) for n in nodes])

    data = HeteroData()
    data["movie"].x = torch.randn(_MOVIES, 5, generator=generator).double()
    data["user"].x = torch.randn(_USERS, 7, generator=generator).double()
    rates = ends(500, _USERS, _MOVIES)
    rates[0, :80] = 3
    data[_RATES].edge_index = rates.unique(dim=1)
    data[_KNOWS].edge_index = ends(200, _USERS, _USERS)
    data["movie", "rev_rates", "user"].edge_index = data[_RATES].edge_index.flip(0)
    torch.manual_seed(0)
    found: Any = RandomLinkSplit(0.1, 0.1, edge_types=[_RATES], rev_edge_types=[("movie", "rev_rates", "user")])(data)
    return list(found)


@pytest.fixture(scope="module")
def store(split: list[HeteroData], tmp_path_factory: pytest.TempPathFactory) -> Store:
    return ooc.convert(split[0], tmp_path_factory.mktemp("typed") / "g.ooc", dtype="float64")


class Convolutions(nn.Module):
    def __init__(self, edge_types: list[Any]) -> None:
        super().__init__()
        columns = {"user": 7, "movie": 5}
        self.first = HeteroConv({one: SAGEConv((columns[one[0]], columns[one[2]]), 8) for one in edge_types})
        self.second = HeteroConv({one: SAGEConv((8, 8), 6) for one in edge_types})

    def forward(self, x_dict: dict[str, Tensor], edge_index_dict: dict[Any, Tensor]) -> dict[str, Tensor]:
        hidden = self.first(x_dict, edge_index_dict)
        found: dict[str, Tensor] = self.second({name: rows.relu() for name, rows in hidden.items()}, edge_index_dict)
        return found


class Attention(RelationalAttention):
    def __init__(self, edge_types: list[Any]) -> None:
        super().__init__({"movie": 5, "user": 7}, edge_types, 8, 2, 6, target=("user", "movie"), heads=2)


def _model(encoder: type[nn.Module], data: HeteroData, decoder: str = "dot") -> ooc.LinkPredictor:
    torch.manual_seed(1)
    return ooc.LinkPredictor(encoder(data.edge_types), decoder, channels=6).double()  # type: ignore[call-arg]


def _train(model: ooc.LinkPredictor, store: Store, links: ooc.Links, **options: Any) -> tuple[list[EpochRecord], Any]:
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    given = {"negatives": 2, "steps": 2, "memory": "48M", "seed": 3} | options
    with ooc.LinkTrainer(model, store, links, optimizer=optimizer, **given) as trainer:
        records = trainer.fit(_EPOCHS, progress=False)
        drawn = [[trainer.negatives(epoch, step) for step in range(2)] for epoch in range(_EPOCHS)]
        return records, (drawn, trainer.score(links.test), trainer.predict(node_type=links.edge_type[2]))


def _scores(model: ooc.LinkPredictor, data: HeteroData, pairs: Tensor, kind: tuple[str, str, str]) -> Tensor:
    z_dict = model.encoder(data.x_dict, data.edge_index_dict)
    found: Tensor = model.decoder(z_dict[kind[0]][pairs[0]], z_dict[kind[2]][pairs[1]])
    return found


def _train_by_pyg(model: ooc.LinkPredictor, data: HeteroData, links: ooc.Links, drawn: Any) -> list[float]:
    optimizer, losses = torch.optim.Adam(model.parameters(), lr=0.01), []
    for steps in drawn:
        total = count = 0.0
        for chosen, tails_EK in steps:
            heads = links.train[0, chosen].repeat_interleave(tails_EK.shape[1])
            negative = torch.stack((heads, tails_EK.reshape(-1)))
            negative = negative[:, negative[1] >= 0]
            labels = torch.cat((torch.ones(len(chosen)), torch.zeros(negative.shape[1]))).double()
            optimizer.zero_grad()
            scores = _scores(model, data, torch.cat((links.train[:, chosen], negative), dim=1), links.edge_type)
            loss = F.binary_cross_entropy_with_logits(scores, labels)
            loss.backward()
            optimizer.step()
            total, count = total + loss.item() * len(labels), count + len(labels)
        losses.append(total / count)
    return losses


@torch.no_grad()
def _filtered_rank(model: ooc.LinkPredictor, data: HeteroData, links: ooc.Links) -> float:
    """Mean reciprocal rank of validation links among all tails that are not linked."""
    kind, heads = links.edge_type, links.valid[0]
    z_dict = model.encoder(data.x_dict, data.edge_index_dict)
    tails = z_dict[kind[2]]
    scores = model.decoder(z_dict[kind[0]][heads].repeat_interleave(len(tails), 0), tails.repeat(len(heads), 1))
    scores = scores.view(len(heads), -1)
    own = scores.gather(1, links.valid[1, :, None])
    for pairs in (data[kind].edge_index, links.train, links.valid, links.test):
        for head, tail in pairs.T.tolist():
            scores[heads == head, tail] = -torch.inf
    return float((1 / (1 + 0.5 * ((scores > own).sum(1) + (scores >= own).sum(1)).double())).mean())


@pytest.mark.parametrize(
    ("encoder", "decoder", "kind"),
    thorough(
        [(Convolutions, "dot", _RATES), (Attention, "mlp", _RATES), (Convolutions, "complex", _KNOWS)],
        (Convolutions, "dot", _RATES),
    ),
)
def test_losses_weights_and_scores_are_those_of_pyg(
    split: list[HeteroData], store: Store, encoder: type[nn.Module], decoder: str, kind: Any
) -> None:
    """Between two types of nodes and within one; filtered."""
    data = split[0]
    if kind == _RATES:
        links = replace(ooc.Links.of_split(*split, kind), valid_negatives=None, negatives=0, filtered=True)
    else:
        pairs = torch.randint(0, _USERS, (3, 2, 40), generator=torch.Generator().manual_seed(5))
        links = ooc.Links(*pairs, negatives=0, filtered=True, edge_type=kind)
    model, other = _model(encoder, data, decoder), _model(encoder, data, decoder)
    records, (drawn, scores, embeddings) = _train(model, store, links)
    assert [one.loss for one in records] == pytest.approx(_train_by_pyg(other, data, links, drawn), rel=1e-11)
    for own, expected in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(own, expected, rtol=1e-9, atol=1e-11)
    with torch.no_grad():
        torch.testing.assert_close(scores, _scores(other, data, links.test, kind), rtol=1e-9, atol=1e-11)
        expected = other.encoder(data.x_dict, data.edge_index_dict)[kind[2]]
        torch.testing.assert_close(embeddings, expected, rtol=1e-9, atol=1e-11)
    assert records[-1].valid_score == pytest.approx(_filtered_rank(other, data, links), rel=1e-12)
    linked = {*map(tuple, torch.cat((data[kind].edge_index, links.train), dim=1).T.tolist())}
    for chosen, tails_EK in (step for steps in drawn for step in steps):
        pairs = torch.stack((links.train[0, chosen].repeat_interleave(2), tails_EK.reshape(-1)))
        assert linked.isdisjoint(map(tuple, pairs.T.tolist()))
    assert any((tails < 0).any() for steps in drawn for _, tails in steps)


def test_memory_and_tiles_in_memory_change_no_bit(split: list[HeteroData], store: Store) -> None:
    links = ooc.Links.of_split(*split, _RATES)
    found = []
    for memory, threads in (("200M", 2), ("16M", 1)):
        model = _model(Convolutions, split[0], "mlp")
        records, (_, scores, _) = _train(
            model, store, links, memory=memory, threads=threads, metric="hits@5", _tuning=Tuning(tile_rows=16)
        )
        found.append(([(one.loss, one.valid_score) for one in records], scores, [*model.parameters()]))
    (losses, scores, weights), (other_losses, other_scores, other_weights) = found
    assert losses == other_losses and scores.equal(other_scores) and all(map(torch.equal, weights, other_weights))


class Relational(nn.Module):
    def __init__(self, edge_types: object) -> None:
        super().__init__()
        self.conv = RGCNConv(5, 6, num_relations=3)

    def forward(self, x: Tensor, edge_index: Tensor, edge_type: Tensor) -> Tensor:
        out: Tensor = self.conv(x, edge_index, edge_type)
        return out


@pytest.mark.parametrize("decoder", thorough(["distmult", "complex", "dot"], "complex"))
def test_links_of_all_types_of_edges(tmp_path: Path, decoder: str) -> None:
    """A knowledge graph: nodes of one type, triples as links, a vector for each relation; filtered by relation."""
    generator = torch.Generator().manual_seed(2)
    triples = torch.stack([torch.randint(0, n, (260,), generator=generator) for n in (30, 3, 30)])
    x = torch.randn(30, 5, generator=generator).double()
    train, valid = triples[:, :220], triples[:, 220:]
    data = {"x": x, "edge_index": train[[0, 2]], "edge_type": train[1], "y": np.zeros(30, np.int64), "train_idx": [0]}
    np.savez(tmp_path / "g.npz", **{name: np.asarray(array) for name, array in data.items()})
    store = ooc.convert(tmp_path / "g.npz", tmp_path / "g.ooc", dtype="float64")
    models = []
    for _ in range(2):
        torch.manual_seed(1)
        relations = 0 if decoder == "dot" else 3
        models.append(ooc.LinkPredictor(Relational(None), decoder, channels=6, relations=relations).double())
    links = ooc.Links(train, valid, negatives=0, filtered=True)
    optimizer = torch.optim.Adam(models[0].parameters(), lr=0.05)
    with ooc.LinkTrainer(models[0], store, links, negatives=2, memory="24M", optimizer=optimizer) as trainer:
        records = trainer.fit(_EPOCHS, progress=False)
        drawn = [trainer.negatives(epoch) for epoch in range(_EPOCHS)]
        scores, embeddings = trainer.score(valid), trainer.predict()
    model, losses = models[1], []
    known = {*map(tuple, triples.T.tolist())}
    graph = x, train[[0, 2]], train[1]

    def scored(given: Tensor) -> Tensor:
        z, kinds = model.encoder(*graph), [] if decoder == "dot" else [given[1]]
        found: Tensor = model.decoder(z[given[0]], z[given[2]], *kinds)
        return found

    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    for chosen, tails_E2 in drawn:
        negative = torch.stack((*train[:2, chosen].repeat_interleave(2, dim=1), tails_E2.reshape(-1)))
        negative = negative[:, negative[2] >= 0]
        assert {*map(tuple, train.T.tolist())}.isdisjoint(map(tuple, negative.T.tolist()))
        labels = torch.cat((torch.ones(len(chosen)), torch.zeros(negative.shape[1]))).double()
        optimizer.zero_grad()
        loss = F.binary_cross_entropy_with_logits(scored(torch.cat((train[:, chosen], negative), dim=1)), labels)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert any((tails < 0).any() for _, tails in drawn)
    assert [one.loss for one in records] == pytest.approx(losses, rel=1e-11)
    with torch.no_grad():
        torch.testing.assert_close(scores, scored(valid), rtol=1e-9, atol=1e-11)
        torch.testing.assert_close(embeddings, model.encoder(*graph), rtol=1e-9, atol=1e-11)
        reciprocal = 0.0
        for head, kind, tail in valid.T.tolist():
            others = [t for t in range(30) if (head, kind, t) not in known]
            own, rest = (
                scored(torch.tensor([[head], [kind], [tail]])),
                torch.tensor([[head, kind, t] for t in others]).T,
            )
            found = scored(rest)
            reciprocal += 1 / (1 + 0.5 * float((found > own).sum() + (found >= own).sum()))
    assert records[-1].valid_score == pytest.approx(reciprocal / valid.shape[1], rel=1e-12)


def test_what_cannot_be_is_refused_by_name(split: list[HeteroData], store: Store) -> None:
    model, links = _model(Convolutions, split[0]), ooc.Links.of_split(*split, _RATES)
    with pytest.raises(ooc.OptionError, match="say of which type links are"):
        ooc.LinkTrainer(model, store, ooc.Links(links.train))
    with pytest.raises(ooc.OptionError, match="is no \\(source, relation, target\\)"):
        ooc.LinkTrainer(model, store, ooc.Links(links.train, edge_type=("user", "rates", "film")))
    with pytest.raises(ooc.OptionError, match="no node 'movie' 40"):
        ooc.LinkTrainer(model, store, ooc.Links(torch.tensor([[0], [40]]), edge_type=_RATES))
    with pytest.raises(ooc.OptionError, match="no edges user likes movie"):
        ooc.LinkTrainer(model, store, ooc.Links(edge_type=("user", "likes", "movie")))
    with pytest.raises(ooc.BudgetError, match="memory="):
        ooc.LinkTrainer(model, store, links, memory="200K")

    class OfUsers(Convolutions):
        def forward(self, x_dict: Any, edge_index_dict: Any) -> Any:
            return super().forward(x_dict, edge_index_dict)["user"]

    with pytest.raises(ooc.ModelError, match="nothing for 'user'"):
        ooc.LinkTrainer(_model(OfUsers, split[0]), store, links)


@pytest.mark.parametrize("kind", [_RATES, _KNOWS])
def test_edges_of_a_type_are_held_out(split: list[HeteroData], tmp_path: Path, kind: tuple[str, str, str]) -> None:
    """And those that lead back."""
    data, text = split[0], "0.2,0.3,5:" + ",".join(kind)
    store = ooc.convert(data, tmp_path / "g.ooc", hold_out_links=text)
    links, assertions = ooc.Links.read(tmp_path / "g.links.npz"), 0
    held = {*map(tuple, np.concatenate((links.valid, links.test), axis=1).T.tolist())}
    assert held
    for one in data.edge_types:
        indptr, indices = (array.read() for array in store.topology(f"edges/{'__'.join(one)}/out"))
        left = [*zip(np.repeat(np.arange(len(indptr) - 1), np.diff(indptr)).tolist(), indices.tolist(), strict=True)]
        given = [*map(tuple, data[one].edge_index.T.tolist())]
        back = one == (kind[2], f"rev_{kind[1]}", kind[0])
        gone = {(tail, head) for head, tail in held} if back else held if one == kind else set()
        assert sorted(left) == sorted(edge for edge in given if edge not in gone)
        assertions += len(left) < len(given)
    assert assertions == (2 if kind == _RATES else 1)
    for wrong in ("0.1,0.1", "0.1,0.1:user,movie", "0.1,0.1:user,likes,movie"):
        with pytest.raises(ooc.OptionError):
            ooc.convert(data, tmp_path / "h.ooc", hold_out_links=wrong)


def test_from_the_command_line(split: list[HeteroData], tmp_path: Path) -> None:
    """A run that is gone on with is an undisturbed one; scores and embeddings are predicted; it is planned."""
    links = ooc.Links.of_split(*split, _RATES)
    store = str(ooc.convert(split[0], tmp_path / "g.ooc").path)
    np.savez(tmp_path / "l.npz", train=links.train, valid=links.valid)
    options = ["--links", str(tmp_path / "l.npz"), "--link-type", "user,rates,movie", "--filtered", "--ranked", "0"]
    options += ["--model", "rgcn", "--hidden", "8", "--layers", "2", "--decoder", "distmult", "--memory", "48M"]
    runs = {name: str(tmp_path / name) for name in ("whole", "halves")}
    assert main(["train", store, *options, "-q", "--epochs", "4", "--out", runs["whole"]]) == 0
    assert main(["train", store, *options, "-q", "--epochs", "2", "--out", runs["halves"]]) == 0
    assert main(["train", "--resume", "-q", "--epochs", "4", "--out", runs["halves"]]) == 0
    lines = [(Path(run) / "metrics.jsonl").read_text().splitlines() for run in runs.values()]
    kept = [[(record["loss"], record["valid_score"]) for record in map(json.loads, of_run)] for of_run in lines]
    assert kept[0] == kept[1]
    np.save(tmp_path / "pairs.npy", np.asarray(links.test))
    out = str(tmp_path / "scores.npy")
    predict = ["predict", runs["whole"], "-q", "--out", out, "--what"]
    assert main([*predict, "scores", "--pairs", str(tmp_path / "pairs.npy")]) == 0
    assert np.load(out).shape == (links.test.shape[1],)
    assert main([*predict, "embeddings", "--type", "movie", "--force"]) == 0
    assert np.load(out).shape == (_MOVIES, 8)
    assert main([*predict, "embeddings", "--force"]) == 2
    assert main(["plan", store, *options]) == 0
    assert main(["train", store, *options, "--link-type", "user,movie"]) == 2


def test_triples_from_the_command_line(tmp_path: Path) -> None:
    """Held out, trained on, scored."""
    rng = np.random.default_rng(0)
    ends, kinds, x = rng.integers(0, 30, (2, 300)), rng.integers(0, 3, 300), rng.random((30, 5), np.float32)
    np.savez(tmp_path / "g.npz", x=x, edge_index=ends, edge_type=kinds, y=np.zeros(30, np.int64), train_idx=[0])
    store, links = str(tmp_path / "g.ooc"), str(tmp_path / "g.links.npz")
    assert main(["convert", str(tmp_path / "g.npz"), store, "-q", "--hold-out-links", "0.1,0.2"]) == 0
    with np.load(links) as file:
        held = np.concatenate((file["valid"], file["test"]), axis=1)
    given = {*zip(ends[0].tolist(), kinds.tolist(), ends[1].tolist(), strict=True)}
    assert {*map(tuple, held.T.tolist())} < given
    assert ooc.open(store).num_edges < 300
    options = ["--links", links, "--model", "rgcn", "--hidden", "8", "--layers", "1", "--decoder", "complex"]
    assert main(["train", store, *options, "-q", "--filtered", "--epochs", "2", "--out", str(tmp_path / "r")]) == 0
    np.save(tmp_path / "held.npy", held)
    words = ["--what", "scores", "--pairs", str(tmp_path / "held.npy"), "--out", str(tmp_path / "s.npy"), "-q"]
    assert main(["predict", str(tmp_path / "r"), *words]) == 0
    assert np.load(tmp_path / "s.npy").shape == (held.shape[1],)


@pytest.mark.parametrize("order", ["none", "hop"])
def test_links_of_tables_go_by_ids(tmp_path: Path, order: str) -> None:
    """Of both ends, numbers and texts; so do those that are held out, embeddings in files, and negatives."""
    folder, users, movies = tmp_path / "tables", [17, 3, 11, 2, 5], ["m-9", "m-1", "007"]
    for name in ("nodes", "edges"):
        (folder / name).mkdir(parents=True)
    labelled = [f"{user},{at / 8},{at % 2}" for at, user in enumerate(users)]
    (folder / "nodes" / "user.csv").write_text("\n".join(["id,age,label", *labelled]))
    bare = [f"{movie},{at / 4}" for at, movie in enumerate(movies)]
    (folder / "nodes" / "movie.csv").write_text("\n".join(["id,length", *bare]))
    pairs = [(user, movie) for at, user in enumerate(users) for movie in movies[at % 3 :]]
    (folder / "edges" / "user__rates__movie.csv").write_text("\n".join(["src,dst", *(f"{u},{m}" for u, m in pairs)]))
    store = ooc.convert(folder, tmp_path / "g.ooc", order=order, hold_out_links="0.4,0.3:user,rates,movie")
    links = replace(ooc.Links.read(tmp_path / "g.links.npz"), edge_type=_RATES)
    held = [(int(user), movie.decode()) for both in (links.valid, links.test) for user, movie in both.T]
    assert len(held) > 1 and set(held) < set(pairs)
    torch.manual_seed(0)
    convolutions: dict[Any, nn.Module] = {_RATES: SAGEConv((1, 1), 4)}

    class Encoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.lin = HeteroConv(convolutions), nn.Linear(1, 4)

        def forward(self, x_dict: Any, edge_index_dict: Any) -> dict[str, Tensor]:
            return {**self.conv(x_dict, edge_index_dict), "user": self.lin(x_dict["user"])}

    with ooc.LinkTrainer(ooc.LinkPredictor(Encoder()), store, links, memory="48M") as trainer:
        trainer.fit(1, progress=False)
        scores = trainer.score(np.array([[str(user) for user, _ in pairs], [movie for _, movie in pairs]]))
        with pytest.raises(ooc.OptionError, match="must be ids of nodes"):
            trainer.score(np.array([["003"], ["m-9"]]))
        rows: dict[str, Tensor] = {}
        for kind, ids in (("user", [*map(str, users)]), ("movie", movies)):
            trainer.predict(node_type=kind, out=tmp_path / f"{kind}.csv")
            _, *lines = (line.split(",") for line in (tmp_path / f"{kind}.csv").read_text().splitlines())
            assert [line[0] for line in lines] == ids
            rows |= {line[0]: torch.tensor([*map(float, line[1:])]) for line in lines}
    torch.testing.assert_close(scores, torch.stack([rows[str(user)] @ rows[movie] for user, movie in pairs]))


def test_splits_of_types_are_told_of_which_type_links_are() -> None:
    data = HeteroData({"a": {"x": torch.ones(4, 1)}, ("a", "to", "a"): {"edge_index": torch.zeros(2, 3).long()}})
    with pytest.raises(ooc.OptionError, match="several types of edges; edge_type="):
        ooc.Links.of_split(data, data, data)
    with pytest.raises(ooc.OptionError, match="there is no edge_label of edges"):
        ooc.Links.of_split(data, data, data, edge_type=("a", "to", "a"))
