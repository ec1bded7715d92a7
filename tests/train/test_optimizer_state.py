# SPDX-License-Identifier: Apache-2.0
"""What an optimizer keeps of large parameters may be on the SSD: the same bits, in less memory, and runs go on."""

import copy
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch_geometric.nn.models import GCN

import ooc
from ooc.errors import BudgetError, OptionError, RunError, SpillError
from ooc.prefetch.engine import Engine
from ooc.prefetch.engines.choice import choose_engine
from ooc.storage.store import Store
from ooc.train import optimizer_state
from ooc.train.optimizer_state import StateOnDisk
from ooc.train.runs.run import OPTIMIZER, RunFolder
from ooc.train.trainer import Trainer
from tests.examples import thorough

EPOCHS = 4
KINDS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "Adam": (torch.optim.Adam, {"weight_decay": 0.1}),
    "AdamW, three numbers": (torch.optim.AdamW, {"amsgrad": True}),
    "Adamax": (torch.optim.Adamax, {}),
    "NAdam": (torch.optim.NAdam, {}),
    "RAdam": (torch.optim.RAdam, {}),
    "Adagrad, which has its state at once": (torch.optim.Adagrad, {"initial_accumulator_value": 0.5}),
    "Adadelta": (torch.optim.Adadelta, {}),
    "RMSprop": (torch.optim.RMSprop, {"centered": True, "momentum": 0.9}),
    "Rprop": (torch.optim.Rprop, {}),
    "ASGD": (torch.optim.ASGD, {"t0": 2.0}),
    "SGD": (torch.optim.SGD, {"momentum": 0.9, "nesterov": True}),
}


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(optimizer_state, "PIECE", 1024)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    folder = tmp_path_factory.mktemp("store")
    return ooc.convert("synthetic:nodes=400,edges=2000,features=700,classes=4", folder / "g.ooc")


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Engine]:
    found, _ = choose_engine(tmp_path)
    yield found
    found.close()


def parameters() -> list[nn.Parameter]:
    torch.manual_seed(3)
    return [nn.Parameter(torch.randn(shape)) for shape in ((90, 31), (7,), (64, 64), (1023,))]


def stepped(given: list[nn.Parameter], optimizer: torch.optim.Optimizer, step: Callable[[], Any], steps: int) -> None:
    for number in range(steps):
        torch.manual_seed(number)
        for one in given:
            one.grad = torch.randn(one.shape)
        for group in optimizer.param_groups:
            group["lr"] = 0.1 / (1 + number)
        step()


def assert_same_state(found: torch.optim.Optimizer, expected: torch.optim.Optimizer) -> None:
    states, wanted = found.state_dict()["state"], expected.state_dict()["state"]
    assert states.keys() == wanted.keys()
    for at, state in wanted.items():
        assert states[at].keys() == state.keys()
        assert all(torch.equal(torch.as_tensor(states[at][name]), torch.as_tensor(state[name])) for name in state)


@pytest.mark.parametrize("kind", KINDS)
def test_a_step_in_pieces_is_torchs(kind: str, engine: Engine, tmp_path: Path) -> None:
    """To the bit, with what is kept afterwards; and after more steps, which begin with what was in memory."""
    make, options = KINDS[kind]
    plain, paged = parameters(), parameters()
    expected, found = (make([{"params": p[:2]}, {"params": p[2:]}], lr=0.1, **options) for p in (plain, paged))
    state = StateOnDisk(found, paged, folder=None)
    assert state.nbytes >= 4 * (90 * 31 + 64 * 64)
    for steps in (3, 2):
        stepped(plain, expected, expected.step, steps)
        state.open(tmp_path, engine)
        stepped(paged, found, lambda: state.step(engine), steps)
        assert all(map(torch.equal, plain, paged))
        kept = [t for one in found.state.values() for t in one.values() if isinstance(t, Tensor)]
        assert max(map(torch.numel, kept), default=0) < 1024
        state.close()
        assert_same_state(found, expected)


@pytest.mark.parametrize("kind", ["AdamW, three numbers", "SGD"])
def test_a_state_that_it_is_given_meanwhile_is_gone_on_with(kind: str, engine: Engine, tmp_path: Path) -> None:
    """One of before, or none; of which what is on the SSD is missing is refused."""
    make, options = KINDS[kind]
    plain, paged = parameters(), parameters()
    expected, found = (make(p, lr=0.1, **options) for p in (plain, paged))
    state = StateOnDisk(found, paged)
    state.open(tmp_path, engine)

    def both(steps: int) -> None:
        stepped(plain, expected, expected.step, steps)
        stepped(paged, found, lambda: state.step(engine), steps)
        assert all(map(torch.equal, plain, paged))

    both(1)
    before, without = (copy.deepcopy(one.state_dict()) for one in (expected, found))
    both(2)
    for one in (expected, found):
        one.load_state_dict(copy.deepcopy(before))
    both(2)
    for one in (expected, found):
        one.state.clear()
    both(2)
    found.load_state_dict(without)
    with pytest.raises(OptionError, match=r"without what is on the SSD; take it after close\(\)"):
        state.step(engine)
    for one in (expected, found):
        one.load_state_dict(copy.deepcopy(before))
    state.close()
    assert_same_state(found, expected)
    del found.state[paged[0]]
    with pytest.raises(OptionError, match="of some large parameters the optimizer has state, of others none"):
        StateOnDisk(found, paged).open(tmp_path, engine)


def model_of(store: Store) -> GCN:
    torch.manual_seed(5)
    return GCN(store.num_features, 64, 2, store.num_classes)


def trained(
    store: Store, where: str, run: Path | None = None, *, memory: str = "24M", epochs: int = EPOCHS, **options: Any
) -> tuple[list[float], list[Tensor], torch.optim.Optimizer, Trainer]:
    model = model_of(store)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    given: dict[str, Any] = {"memory": memory, "optimizer_state": where, "threads": 1} | options
    with Trainer(model, store, optimizer=optimizer, out=run, **given) as trainer:
        records = trainer.fit(epochs, progress=False, resume=run is not None and (run / "checkpoint.pt").exists())
    losses = [record.loss for record in records]
    if trainer.plan.state_bytes and len(records) > 2:
        assert records[-2].ssd_write_bytes == trainer.plan.bytes_written("train_and_score")
    return losses, [p.detach().clone() for p in model.parameters()], optimizer, trainer


@pytest.fixture(scope="module")
def undisturbed(store: Store) -> tuple[list[float], list[Tensor], torch.optim.Optimizer, Trainer]:
    """With what is kept in memory."""
    return trained(store, "memory")


def test_it_goes_to_the_ssd_only_where_it_must(store: Store, tmp_path: Path) -> None:
    """Losses, weights and what is kept are the same wherever it is; the floor is the smaller one."""
    expected = trained(store, "auto", spill_dir=tmp_path, clip_norm=0.5)
    assert not expected[3].plan.state_bytes
    with pytest.raises(BudgetError, match="give memory=") as error:
        trained(store, "memory", memory="100K")
    with_less = str(int(str(error.value).split("memory='")[1].split("K")[0]) - 250) + "K"
    with pytest.raises(BudgetError):
        trained(store, "memory", memory=with_less)
    for where, memory in (("ssd", "24M"), ("auto", with_less)):
        found = trained(store, where, memory=memory, spill_dir=tmp_path, clip_norm=0.5)
        assert found[3].plan.state_bytes >= 2 * 4 * 700 * 64
        assert found[0] == expected[0] and all(map(torch.equal, found[1], expected[1]))
        assert_same_state(found[2], expected[2])
    with pytest.raises(BudgetError, match="optimizer state, and the limit is"):
        trained(store, "ssd", max_ssd_writes="100K")


@pytest.mark.parametrize(
    "places",
    thorough(map(pytest.param, [("ssd", "ssd"), ("memory", "ssd"), ("ssd", "memory")]), ("ssd", "ssd")),
    ids=" then ".join,
)
def test_a_run_goes_on_wherever_it_is(places: tuple[str, str], store: Store, undisturbed: Any, tmp_path: Path) -> None:
    run = tmp_path / "run"
    trained(store, places[0], run, epochs=2)
    found = trained(store, places[1], run)
    assert found[0] == undisturbed[0][2:] and all(map(torch.equal, found[1], undisturbed[1]))
    assert_same_state(found[2], undisturbed[2])


@pytest.mark.parametrize(
    ("kind", "name"), [(StateOnDisk, "_check"), (RunFolder, "save"), (StateOnDisk, "saved")], ids=lambda one: str(one)
)
def test_a_stopped_run_goes_on_to_the_same(
    kind: type, name: str, store: Store, undisturbed: Any, tmp_path: Path
) -> None:
    """In the middle of a step, after it, and when a checkpoint was just written."""
    run = tmp_path / "run"
    original, left = getattr(kind, name), [40 if name == "_check" else 3]

    def stopping(*arguments: Any, **options: Any) -> Any:
        left[0] -= 1
        if not left[0]:
            raise KeyboardInterrupt
        return original(*arguments, **options)

    with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(kind, name, stopping)
        trained(store, "ssd", run)
    found = trained(store, "ssd", run)
    assert found[0] == undisturbed[0][-len(found[0]) :] and all(map(torch.equal, found[1], undisturbed[1]))


def test_what_the_ssd_has_is_compared_with_what_was_written(store: Store, tmp_path: Path) -> None:
    """A run that has other bytes, or none, is not gone on with; nor is one after a step that failed halfway."""
    run = tmp_path / "run"
    trained(store, "ssd", run, epochs=2)
    model = model_of(store)
    with Trainer(
        model, store, optimizer=torch.optim.Adam(model.parameters()), memory="24M", optimizer_state="ssd"
    ) as own:
        own.fit(1, progress=False)
        assert own._kept is not None
        own._kept._crcs[0][-1] ^= 1
        with pytest.raises(SpillError, match="optimizer state: the SSD returns other bytes"):
            own.fit(1, progress=False)
        with pytest.raises(RunError, match="interrupted halfway"):
            own.fit(1, progress=False)
    for path in (run / OPTIMIZER).iterdir():
        content = bytearray(path.read_bytes())
        content[5000] ^= 1
        path.write_bytes(content)
    with pytest.raises(SpillError, match="optimizer state: the SSD returns other bytes"):
        trained(store, "ssd", run)
    with pytest.raises(RunError, match=r"state\.\d: optimizer state: the SSD returns other bytes"):
        trained(store, "memory", run)
    for path in (run / OPTIMIZER).iterdir():
        path.unlink()
    with pytest.raises(RunError, match=r"state\.\d: "):
        trained(store, "ssd", run)


@pytest.mark.parametrize(
    ("begun", "where", "message"),
    [
        ("memory", "ssd", "begun with other options of the optimizer, by which it keeps other state"),
        ("ssd", "ssd", "large parameters is of another model, or of other options"),
        ("memory", "memory", ""),  # as in torch, the options go with the state
    ],
)
def test_what_is_kept_by_other_options_is_not_gone_on_with(
    begun: str, where: str, message: str, store: Store, tmp_path: Path
) -> None:
    """Nor is a version that is too short."""
    trained(store, begun, run := tmp_path / "run", epochs=1)
    model = model_of(store)
    optimizer = torch.optim.Adam(model.parameters(), amsgrad=True)
    given: dict[str, Any] = {"memory": "24M", "optimizer_state": where, "threads": 1, "optimizer": optimizer}
    refused = pytest.raises(RunError, match=message) if message else nullcontext()
    with Trainer(model, store, out=run, **given) as trainer, refused:
        trainer.fit(2, progress=False, resume=True)
    if begun == "ssd":
        for path in (run / OPTIMIZER).iterdir():
            path.write_bytes(path.read_bytes()[:-4096])
        with pytest.raises(RunError, match=r"state\.\d is not what the checkpoint names"):
            trained(store, "ssd", run)


def test_two_trainers_do_not_step_by_one_state_at_once(store: Store) -> None:
    """Of which one has what is on the SSD."""
    expected, model = trained(store, "memory", epochs=2), model_of(store)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    given: dict[str, Any] = {"optimizer": optimizer, "memory": "24M", "threads": 1}
    with Trainer(model, store, optimizer_state="ssd", **given) as first, Trainer(model, store, **given) as second:
        losses = [record.loss for record in first.fit(1, progress=False)]
        with pytest.raises(OptionError, match="on the SSD for another trainer; close that one first"):
            second.fit(1, progress=False)
        first.close()
        losses += [record.loss for record in second.fit(1, progress=False)]
    assert losses == expected[0] and all(map(torch.equal, model.parameters(), expected[1]))


def test_what_cannot_be_on_the_ssd_is_refused(store: Store) -> None:
    class Own(torch.optim.Adam):
        pass

    model = model_of(store)
    for make, options, what in (
        (torch.optim.Adafactor, {}, "what Adafactor keeps has to be in memory; on the SSD may be that of Adam"),
        (Own, {}, "what Own keeps"),
        (torch.optim.Adam, {"fused": True}, "what Adam keeps has to be in memory with fused=True"),
    ):
        optimizer: torch.optim.Optimizer = make(model.parameters(), **options)
        with pytest.raises(OptionError, match=what):
            Trainer(model, store, optimizer=optimizer, memory="24M", optimizer_state="ssd")
        Trainer(model, store, optimizer=optimizer, memory="24M").close()
    with pytest.raises(OptionError, match="is not one of auto, memory, ssd"):
        Trainer(copy.deepcopy(model), store, memory="24M", optimizer_state="host")
