# SPDX-License-Identifier: Apache-2.0
"""Any module within budgets: the same bits as without, its memory no more than planned, and nothing left behind."""

import copy
import gc
import threading
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import MethodType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel
from torch_geometric.data import Batch, Data, HeteroData
from torch_geometric.nn.models import GAT, GraphSAGE

import ooc
from ooc.errors import BudgetError, ModelError, OptionError
from ooc.model.layers.conformance import Watch
from ooc.offloading.measure import META, DryRuns
from ooc.offloading.saved import layers_of
from ooc.plan.hardware import UNMEASURED
from ooc.plan.workload import Fate
from ooc.sizes import parse_size
from tests.examples import thorough


class Encoder(nn.Module):
    """A small transformer."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.2, batch_first=True)
        self.into = nn.Linear(8, 16)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def forward(self, x: Tensor) -> Tensor:
        encoded: Tensor = self.encoder(self.into(x))
        return encoded


def _dense(*layers: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Linear(8, 32), *layers, nn.Linear(32, 4))


class Graph(nn.Module):
    """A model of PyG's on one batch."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        generator = torch.Generator().manual_seed(1)
        self.edge_index = torch.randint(0, 300, (2, 3000), generator=generator)

    def forward(self, x: Tensor) -> Tensor:
        edge_index = self.edge_index.to(x.device)
        outputs: Tensor = self.model(x, edge_index)
        return outputs


class Recurrent(nn.Module):
    """Cells called several times: torch writes the gates of each, parts of one matrix, in place."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.gru, self.lstm = nn.Linear(8, 32), nn.GRU(32, 32), nn.LSTM(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        h = self.into(x)[None]
        for _ in range(3):
            h = self.gru(h)[0]
            h = self.lstm(h)[0]
        return h


class Waves(nn.Module):
    """Saves numbers that torch marks as conjugated or negated in place of computing them, and holds a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(32, 2))
        self.turned = torch.arange(32).flip(0)

    def forward(self, x: Tensor) -> Tensor:
        z = torch.complex(x, x.tanh()) * torch.view_as_complex(self.weight)
        return (z.conj() * z[:, self.turned]).real + z.conj().imag.sin()


class Block(nn.Module):
    """A residual perceptron."""

    def __init__(self) -> None:
        super().__init__()
        self.wide, self.narrow, self.dropout = nn.Linear(32, 128), nn.Linear(128, 32), nn.Dropout(0.3)

    def forward(self, x: Tensor) -> Tensor:
        changed: Tensor = self.dropout(self.narrow(F.gelu(self.wide(x))))
        return x + changed


CASES: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "transformer": (Encoder, (8, 40, 8)),
    "batch norm": (
        lambda: _dense(nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.5), nn.Linear(32, 32), nn.GELU()),
        (500, 8),
    ),
    "nested": (
        lambda: _dense(nn.Sequential(nn.Linear(32, 32), nn.Tanh()), nn.ModuleList([nn.Dropout(0.3)])[0]),
        (500, 8),
    ),
    "in place": (lambda: _dense(nn.ELU(inplace=True), nn.LayerNorm(32), nn.Tanh(), nn.SiLU()), (500, 8)),
    "sage": (lambda: Graph(GraphSAGE(8, 16, 2, 4, dropout=0.5, norm="batch_norm")), (300, 8)),
    "recurrent": (Recurrent, (300, 8)),
    "conjugated": (lambda: _dense(Waves(), Waves()), (300, 8)),
    "gat": (lambda: Graph(GAT(8, 16, 3, 4, heads=2, dropout=0.2)), (300, 8)),
}


def _step(module: nn.Module, x: Tensor) -> list[Tensor]:
    """Loss, gradients, buffers and what random numbers come next."""
    module.zero_grad()
    torch.manual_seed(5)
    loss = module(x).square().mean()
    loss.backward()
    gradients = [p.grad for p in module.parameters() if p.grad is not None]
    return [loss.detach(), *gradients, *(b.clone() for b in module.buffers()), torch.rand(3)]


def _runs(module: nn.Module, *shape: int, dtype: torch.dtype = torch.float32) -> DryRuns:
    return DryRuns(module, lambda copied: copied(torch.empty(shape, dtype=dtype, device=META)), UNMEASURED)


def _least(module: nn.Module, *shape: int, dtype: torch.dtype) -> tuple[int, int]:
    """Bytes that a step takes with nothing kept, and with everything."""
    runs = _runs(module, *shape, dtype=dtype)
    with pytest.raises(BudgetError) as caught:
        runs.plan(1, 0)
    return parse_size(str(caught.value).split("memory='")[1].rstrip("'")), runs.kept_bytes


SLOW_DISK = replace(UNMEASURED, disk=replace(UNMEASURED.disk, both_ways_bytes_per_s=1.0))
SLOW_PROCESSOR = replace(UNMEASURED, processor=replace(UNMEASURED.processor, seconds_per_operator=1.0))


@pytest.mark.parametrize("case", thorough(CASES, "gat"))
def test_results_are_the_same_bits_whatever_the_budget(case: str, tmp_path: Path) -> None:
    dtype = torch.float64 if case in ("sage", "nested", "recurrent") else torch.float32
    make, shape = CASES[case]
    torch.manual_seed(0)
    plain = make().to(dtype)
    module = copy.deepcopy(plain)
    x = torch.randn(shape, dtype=dtype)
    steps = 2 if case == "batch norm" else 1
    expected = [_step(plain, x) for _ in range(steps)]
    least, most = _least(module, *shape, dtype=dtype)
    met: set[Fate] = set()
    for budget, hardware in ((least, SLOW_PROCESSOR), ((least + most) // 2, SLOW_DISK)):
        other = copy.deepcopy(module)
        with ooc.offload(other, memory=budget, spill_dir=tmp_path, hardware=hardware) as run:
            found = [_step(other, x) for _ in range(steps)]
        for one, two in zip(expected, found, strict=True):
            assert len(one) == len(two) and all(map(torch.equal, one, two))
        assert run.plan is not None and run.plan.nbytes <= budget
        met |= {fate for fate, nbytes in zip(run.plan.fates, run.plan.most, strict=True)}
    assert met >= {Fate.HOST, Fate.SSD}
    assert Fate.RECOMPUTE in met or case == "in place"
    assert "forward" not in vars(other) and list(tmp_path.iterdir()) == []


def test_a_step_takes_no_more_than_was_planned_and_no_storage_is_counted_twice(tmp_path: Path) -> None:
    """What operators make, added up while they run; views and repeated saves of a storage are one."""
    torch.manual_seed(0)
    module, x = Encoder(), torch.randn(8, 40, 8)
    least, most = _least(module, 8, 40, 8, dtype=torch.float32)
    for hardware in (SLOW_DISK, SLOW_PROCESSOR):
        budget = (least + most) // 2
        with ooc.offload(module, memory=budget, spill_dir=tmp_path, hardware=hardware) as run:
            module(x).sum().backward()
            module.zero_grad()
            known = [x, *module.parameters()]
            watch = Watch.of(lambda: module(x).sum().backward(), known)
        assert run.plan is not None
        assert 0.5 * run.plan.nbytes < watch.peak_bytes + run.plan.staging_bytes <= run.plan.nbytes
        module.zero_grad()
    assert run.plan is not None and run.plan.bytes_by_fate()[Fate.SSD] > 0


def test_smaller_calls_keep_to_the_plan_and_larger_ones_make_another(tmp_path: Path) -> None:
    module = _dense(nn.Dropout(0.5), nn.Linear(32, 32), nn.Tanh())
    least, _ = _least(module, 900, 8, dtype=torch.float32)
    plans = []
    with ooc.offload(module, memory=least, spill_dir=tmp_path) as run:
        for rows in (500, 300, 900):
            module(torch.randn(rows, 8)).sum().backward()
            plans.append(run.plan)
        with torch.no_grad():
            module(torch.randn(10**4, 8))
        with pytest.raises(BudgetError, match=r"saves .* of which it may take .*; give memory="):
            module(torch.randn(10**4, 8))
    assert plans[0] is plans[1] and plans[1] is not plans[2]


def _left() -> tuple[int, int]:
    return len(list(Path("/proc/self/fd").iterdir())), threading.active_count()


class Broken(nn.Module):
    """Raises what it is told to in its forward pass, or its backward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.forward_error: BaseException | None = None
        self.backward_error: BaseException | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.forward_error is not None and not x.is_meta:
            raise self.forward_error
        if self.backward_error is not None and not x.is_meta:
            x.register_hook(self._fail)  # type: ignore[no-untyped-call]
        return x * 2

    def _fail(self, gradient: Tensor) -> None:
        assert self.backward_error is not None
        raise self.backward_error


@pytest.mark.parametrize("kind", thorough([RuntimeError, KeyboardInterrupt], RuntimeError))
def test_whatever_happens_nothing_is_left(kind: type[BaseException], tmp_path: Path) -> None:
    broken = Broken()
    module = _dense(nn.Dropout(0.5), nn.Linear(32, 32), broken, nn.Tanh())
    x = torch.randn(900, 8)
    least, _ = _least(module, 900, 8, dtype=torch.float32)

    def run(backward: bool = True) -> Any:
        with ooc.offload(module, memory=least, spill_dir=tmp_path, hardware=SLOW_PROCESSOR) as run:
            loss = module(x).sum()
            assert run.plan is not None and run.plan.ssd_bytes
            if backward:
                loss.backward()
        return loss

    run()
    before = _left()
    for broken.forward_error, broken.backward_error in ((kind("in forward"), None), (None, kind("in backward"))):
        with pytest.raises(kind, match="in "):
            run()
        gc.collect()
        assert _left() == before and "forward" not in vars(module) and list(tmp_path.iterdir()) == []
    broken.forward_error = broken.backward_error = None
    loss = run(backward=False)
    assert _left() == before
    with pytest.raises(ModelError, match="backward pass has to run within"):
        loss.backward()


@pytest.mark.parametrize("what", ["gradients", "modes"])
def test_it_is_planned_anew_for_other_gradients_and_modes(what: str, tmp_path: Path) -> None:
    """As where layers are trained later than others."""
    module, x = nn.Sequential(nn.Linear(8, 64), nn.Dropout(0.5), nn.ReLU(), nn.Linear(64, 64)), torch.randn(900, 8)

    def change(later: bool) -> None:
        for one in module[:2] if what == "gradients" else ():
            one.requires_grad_(later)
        if what == "modes":
            module[1].train(later)

    grown = []
    with ooc.offload(module, memory="1G", spill_dir=tmp_path) as run:
        for later in (False, True):
            change(later)
            module(x).sum().backward()
            assert run.plan is not None
            grown.append(sum(run.plan.most))
    assert grown[0] < grown[1]


def test_the_labels_of_few_classes_may_be_saved_by_a_loss(tmp_path: Path) -> None:
    """They are 8 bytes a row, more than what a log-softmax of two classes makes."""
    module, x, y = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 2)), torch.randn(2000, 8), torch.ones(2000)
    with ooc.offload(module, memory="1G", spill_dir=tmp_path):
        found = torch.autograd.grad(F.cross_entropy(module(x), y.long()), [*module.parameters()])
    expected = torch.autograd.grad(F.cross_entropy(module(x), y.long()), [*module.parameters()])
    assert all(map(torch.equal, found, expected))


def test_a_loss_may_save_half_of_what_a_budget_leaves(tmp_path: Path) -> None:
    """As where labels are a part of many more, or a penalty is added."""
    module, x, y = _dense(Block()), torch.randn(300, 8), torch.ones(4000, dtype=torch.int64)

    def gradients(penalty: int) -> tuple[Tensor, ...]:
        torch.manual_seed(0)
        outputs = module(x)
        loss = F.cross_entropy(outputs, y[:300]) + penalty * outputs.exp().square().mean()
        return torch.autograd.grad(loss, [*module.parameters()])

    least, most = _least(module, 300, 8, dtype=torch.float32)
    for memory, penalty in ((least, 0), (most + 200_000, 1)):
        with ooc.offload(module, memory=memory, spill_dir=tmp_path):
            found = [gradients(penalty) for _ in range(2)]
        assert all(all(map(torch.equal, one, gradients(penalty))) for one in found)
    with ooc.offload(module, memory=least, spill_dir=tmp_path), pytest.raises(BudgetError, match="follows the module"):
        left, right = torch.cat([module(x)] * 64, dim=1).chunk(2, dim=1)
        (left * right).mean()  # which saves two parts of what is made here
    with (
        ooc.offload(module, memory=least - 2 * x.nbytes, spill_dir=tmp_path),
        torch.autocast("cpu", torch.bfloat16),
        pytest.raises(BudgetError, match=r"what torch\.autocast saves cannot be counted"),
    ):
        module(x)


def test_a_part_of_a_model_may_be_offloaded(tmp_path: Path) -> None:
    into, part, out = nn.Linear(8, 32), nn.Sequential(Block(), Block()), nn.Linear(32, 4)
    model, x = nn.Sequential(into, part, out), torch.randn(300, 8)
    seen: list[Tensor] = []
    part[0].register_forward_hook(lambda module, given, made: seen.append(made))

    def step() -> list[Tensor]:
        torch.manual_seed(0)
        return [*torch.autograd.grad(model(x).square().mean(), [*model.parameters()])]

    expected = step()
    with ooc.offload(part, memory="1G", spill_dir=tmp_path):
        found = [step() for _ in range(2)]
        with pytest.raises(OptionError, match="block is entered; offload one"), ooc.offload(into, memory="1G"):
            pass
    assert all(all(map(torch.equal, one, expected)) for one in found) and len(seen) == 3


class OfData(nn.Sequential):
    """Takes PyG's data."""

    def forward(self, data: Any, act: Callable[[Tensor], Tensor] = torch.relu) -> Tensor:
        h: Tensor = (data["a"] if isinstance(data, HeteroData) else data).x
        for layer in self:
            h = act(layer(h))
        return h


@pytest.mark.parametrize("kind", [Data, Batch, HeteroData])
def test_data_stays_where_it_is_and_a_plan_holds_for_more_of_its_size(kind: type[Any], tmp_path: Path) -> None:
    """PyG moves data in place, as torch does modules."""
    model, x, act = OfData(nn.Linear(8, 600), nn.Linear(600, 4)), torch.randn(300, 8), nn.PReLU()
    model[0].forward = own = partial(nn.Linear.forward, model[0])  # as others' hooks do
    x.requires_grad_(kind is Data)
    data = HeteroData(a={"x": x}) if kind is HeteroData else Data(x=x)
    data = Batch.from_data_list([data]) if kind is Batch else data
    wanted = [*model.parameters(), *[x] * x.requires_grad]
    expected = torch.autograd.grad(model(data).square().mean(), wanted)
    with ooc.offload(model, memory="1G", spill_dir=tmp_path) as run:
        plans = []
        for _ in range(2):
            found = torch.autograd.grad(model(copy.copy(data)).square().mean(), wanted)
            assert all(map(torch.equal, found, expected))
            plans.append(run.plan)
        assert plans[0] is plans[1] and plans[0] is not None and plans[0].most[:2] == (0, 0)  # x is the caller's
        model(data, act).sum().backward()
        assert run.plan is not plans[0] and act.weight.grad is not None
        with pytest.raises(OptionError, match="block is entered already"), run:
            pass
    assert model[0].forward is own and act.weight.is_cpu and (data["a"] if kind is HeteroData else data).x.is_cpu


@pytest.mark.parametrize("what", ["bias", "data", "modes", "frozen"])
def test_what_is_computed_again_is_as_it_was(what: str, tmp_path: Path) -> None:
    """Torch's own backward pass does not look at a bias: nothing tells that it has changed."""
    module, x = _dense(Block(), Block()), torch.randn(900, 8)
    least, most = _least(module, 900, 8, dtype=torch.float32)
    with ooc.offload(module, memory=(least + most) // 2, spill_dir=tmp_path, hardware=SLOW_DISK) as run:
        loss = module(x).sum()
        assert run.plan is not None and Fate.RECOMPUTE in run.plan.fates
        for block in module[1:3]:  # type: ignore[index]
            if what == "bias":
                block.wide.bias.detach().add_(1)
            if what == "data":
                block.wide.bias.data = block.wide.bias.data + 1
            block.train(what != "modes").requires_grad_(what != "frozen")
        with pytest.raises(ModelError, match=r"of [12] were changed between the forward and the backward"):
            loss.backward()


def test_what_cannot_be_done_is_refused(tmp_path: Path) -> None:
    module, x = _dense(nn.Tanh()), torch.randn(900, 8)
    with ooc.offload(module, memory="1G", spill_dir=tmp_path):
        kept = module(x)
        with pytest.raises(ModelError, match="called again before the backward pass"):
            module(x)
        kept.sum().backward()
        module(x).sum().backward()
    tight, _ = _least(module, 900, 8, dtype=torch.float32)
    with ooc.offload(module, memory=tight, spill_dir=tmp_path):
        outputs = module(x)
        with pytest.raises(BudgetError, match="a loss does, may save as much as"):
            (torch.stack([outputs] * 40).exp() * outputs).sum()

    class Reads(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * float(x.sum())

    reads = nn.Sequential(nn.Linear(8, 8), Reads())
    with ooc.offload(reads, memory="1G", spill_dir=tmp_path), pytest.raises(ModelError, match="meta device"):
        reads(x)
    packed = nn.utils.rnn.pack_padded_sequence(torch.randn(5, 2, 8), torch.tensor([5, 3]))
    with (
        ooc.offload(nn.GRU(8, 8), memory="1G", spill_dir=tmp_path) as run,
        pytest.raises(ModelError, match="GRU does not run on the meta device: batch_sizes should always be on CPU"),
    ):
        run.module(packed)
    gru = nn.Sequential(nn.GRU(8, 32, batch_first=True))  # on the CPU torch makes a copy of its input
    said, most = r"what GRU \(0\) saves of a sequence cannot be counted", _runs(gru, 640, 5, 8).kept_bytes
    with ooc.offload(gru, memory=most, spill_dir=tmp_path), pytest.raises(BudgetError, match=said):
        gru(torch.randn(640, 5, 8, requires_grad=True))
    with pytest.raises(ModelError, match="call it once before"):
        ooc.offload(nn.LazyLinear(4))
    with pytest.raises(OptionError, match="offload the module that it was given"):
        ooc.offload(torch.compile(reads))
    with pytest.raises(OptionError, match="a module on meta cannot be offloaded"):
        ooc.offload(nn.Linear(8, 8, device="meta"))
    with pytest.raises(OptionError, match="memory= is both budgets together"):
        ooc.offload(gru, memory="1G", host_budget="1G")


def test_what_is_changed_in_place_after_it_was_saved_is_told_as_ever(tmp_path: Path) -> None:
    linear = nn.Sequential(nn.Linear(8, 600))
    with ooc.offload(linear, memory="1G", spill_dir=tmp_path):
        outputs = linear(torch.randn(9, 8))
        loss = outputs.square().sum()
        outputs.detach().zero_()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


def test_layers_are_found_by_how_a_module_is_built() -> None:
    assert list(layers_of(Encoder()).values()) == ["into", "encoder.layers.0", "encoder.layers.1"]
    assert "2.0" in layers_of(_dense(nn.ReLU(), nn.Sequential(nn.Tanh()))).values()
    names = layers_of(Graph(GraphSAGE(8, 16, 2, 4, norm="layer_norm"))).values()
    assert {"model.convs.0", "model.convs.1", "model.norms.0", "model.act"} <= set(names)
    assert layers_of(nn.Linear(2, 2)) == {}


def test_copies_of_a_module_are_its_own(tmp_path: Path) -> None:
    """As averages and the best weights so far, made within the block by ``copy.deepcopy`` or ``torch.save``."""
    x = torch.randn(40, 8)
    module = nn.Sequential(nn.Linear(8, 32), Block(), nn.Linear(32, 4)).eval()
    module[2].forward = MethodType(lambda own, x: F.linear(x, 2 * own.weight), module[2])
    with ooc.offload(module, memory="10M", spill_dir=tmp_path):
        before = module(x).detach()
        copied = AveragedModel(module)
        torch.save(module[:2], tmp_path / "part.pt")
        with torch.no_grad():
            module[0].weight.zero_()
        assert torch.equal(copied(x), before)
        copied(x).sum().backward()
        assert module[0].weight.grad is None
    loaded = torch.load(tmp_path / "part.pt", weights_only=False)
    assert torch.equal(copied(x), before) and torch.equal(module[2](loaded(x)), before)
    assert not {"forward", "__reduce_ex__"} & {*vars(module), *vars(module[1])}
