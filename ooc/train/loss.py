# SPDX-License-Identifier: Apache-2.0
"""Losses as sums over rows, so that any division of the rows gives the loss and gradient of all of them together.

torch's losses keep their exact meaning: a mean divides by what torch divides by. Weighted cross-entropy is divided by
the sum of the training rows' class weights; losses of [r, L] targets by rows times columns, or, if labels are missing
(NaN, which adds nothing), by the number of labels. Any other callable may return one loss a row, [r], whose mean is
taken over all training rows, or a scalar, which must be the mean of the losses of its rows. This cannot be known from
outside; it is tried on a few rows at a time, with every class and all kinds of targets, and on thousands of rows. A
scalar that is no such mean is refused.

A loss is called from several threads at once, with different rows.
"""

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ooc.errors import ModelError, StoreError
from ooc.kernels.tensors import fractions
from ooc.model.told_sizes import ReportedSizes, SizeReporting, logarithms_of_reported_sizes
from ooc.storage.array import AnyArray
from ooc.storage.store import Store, Task

RowsLoss = Callable[[Any, Tensor], Tensor]
"""A function of outputs [r, C], or a tuple of several, and labels [r] or [r, L], to a scalar or, for a user's callable,
[r]."""
RowsGradient = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
"""A function of the same to the sum over these rows, a scalar, and its gradient [r, C] with respect to the outputs."""
TileGradient = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor] | None]
"""A function of a tile's outputs [R, C], their classes [R] and which rows count, bool [R], to the sum over those rows
and its gradient [R, C], divided as the loss is; None if ``RowsGradient`` must be used, which says what is wrong."""

_ELEMENTWISE = (nn.BCEWithLogitsLoss, nn.MSELoss, nn.L1Loss, nn.SmoothL1Loss, nn.HuberLoss)
_OF_CLASSES = (nn.CrossEntropyLoss, nn.NLLLoss)
_DEFAULTS: dict[Task, type[nn.Module]] = {
    Task.CLASSES: nn.CrossEntropyLoss,
    Task.MULTILABEL: nn.BCEWithLogitsLoss,
    Task.VALUES: nn.MSELoss,
}
_MEANT: dict[Task, tuple[Any, ...]] = {
    Task.MULTILABEL: (nn.BCEWithLogitsLoss, F.binary_cross_entropy_with_logits),
    Task.VALUES: (*_ELEMENTWISE[1:], F.mse_loss, F.l1_loss, F.smooth_l1_loss, F.huber_loss),
}
"""torch's losses of tasks other than classification."""
_BLOCK_ROWS = 1 << 16
_TRIED_ROWS, _LEAST_TRIALS = 5, 6
_MOST_TRIED, _TRIED_OUTPUTS = 1 << 12, 1 << 17
"""Rows tried at once, if they are not too wide: a loss over the hardest hundred looks like a mean on five rows."""
_TRIED_MISSING = 0.3
"""The fraction of labels tried as missing, if some of a node's labels may be missing."""
_TRIED_SPREADS = (1.0, 4.0)
"""The spreads of outputs, in turn: a loss may treat confident answers differently."""
_OF_AUTOGRAD, _OF_CROSS_ENTROPY = 30, 5
"""Operators that take as long as the gradient of a few rows on one core: 150 us for torch's BCE, 23 us without
autograd."""
_SUM = 2
"""torch's number of the reduction "sum"."""

aten = torch.ops.aten

BY_ROWS: Callable[[Tensor], float] = len
BY_LABELS: Callable[[Tensor], float] = torch.numel
"""The weight of some labels if every row counts one, or every label of a row."""

CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class Loss:
    """The loss of a training. ``gradient`` sums over the rows it is given, by ``operators`` operators; the loss is the
    sum over all training rows divided by ``divisor``, to which the labels of some rows contribute ``weight``; None: the
    divisor is 1 for any rows. ``of_tile``: all of it in one call, on the CPU."""

    gradient: RowsGradient
    divisor: float
    operators: int = _OF_AUTOGRAD
    weight: Callable[[Tensor], float] | None = BY_ROWS
    of_tile: TileGradient | None = None


def task_meant(loss: RowsLoss | None, labels: Sequence[Tensor]) -> Task | None:
    """Return the task of ``labels`` [n] or [n, L] if a fraction among them, or the loss, determines it; None: their
    form does."""
    pieces = (piece for y in labels if y.is_floating_point() for piece in torch.split(y.reshape(-1), _BLOCK_ROWS))
    if any(bool(((piece != piece.trunc()) & ~piece.isnan()).any()) for piece in pieces):
        return Task.VALUES
    task = next((task for task, kinds in _MEANT.items() if loss in kinds or type(loss) in kinds), None)
    one_column = all(y.dim() < 2 or y.shape[1] == 1 for y in labels)
    return task if one_column or task is Task.VALUES else None


def resolve_loss(
    loss: RowsLoss | None,
    store: Store,
    *,
    columns: Sequence[int],
    dtype: torch.dtype,
    place: torch.device = CPU,
    flat_outputs: bool = False,
    flat_labels: bool | None = None,
) -> Loss:
    """Return ``loss`` for a model on the store whose results have these ``columns``; None: the usual loss for the
    store's labels.

    ``place``: where outputs are computed; a torch loss is copied there, with its weights. ``flat_outputs``: the model
    gives one number a node, [N] and not [N, 1]; ``flat_labels``: so does the data the store was made of, if known.
    Raises ModelError for a loss that is no mean or sum over rows, or that does not take such labels.
    """
    task, outputs = store.task, sum(columns)
    is_usual, loss = loss is None, _DEFAULTS[task]() if loss is None else loss
    if isinstance(loss, type):
        raise ModelError(f"loss {loss.__name__} is a class; give {loss.__name__}()")
    if not callable(loss):
        raise ModelError(f"loss {loss!r} is not supported; give a torch loss or a callable on (outputs, labels)")
    if isinstance(loss, nn.Module):
        _check_module(loss, dtype)
    kind = type(loss)
    if kind is nn.BCELoss or loss is F.binary_cross_entropy:
        raise ModelError(
            f"loss {_name_of(loss)} takes probabilities, and labels and scores are read from logits; leave the sigmoid "
            "out of the model and give BCEWithLogitsLoss()"
        )
    shapes = None if flat_labels is None or is_usual else (flat_outputs, flat_labels)
    another = "give another loss, or a callable on (outputs, labels) that turns one into the other"
    unlike = f"the store's task is {task.value!r}; {another}"
    spread = _spread(_name_of(loss), *shapes) if shapes else ""
    if isinstance(loss, (nn.CrossEntropyLoss, nn.NLLLoss)) and kind in _OF_CLASSES:
        if task is not Task.CLASSES:
            raise ModelError(f"loss {kind.__name__} takes one class a node, {unlike}")
        return _cross_entropy(loss, store, outputs, place)
    if isinstance(loss, _ELEMENTWISE) and kind in _ELEMENTWISE:
        if task is Task.CLASSES:
            raise ModelError(f"loss {kind.__name__} takes a row of targets a node, {unlike}")
        labels = store.array("y").columns
        if outputs != labels:
            raise ModelError(f"the model has {outputs} outputs, loss {kind.__name__} needs {labels}, one a label")
        for name, buffer in loss.named_buffers():
            if buffer.numel() != 1 and not buffer.shape[-1] == buffer.numel() == labels:
                raise ModelError(
                    f"loss {kind.__name__}: its {name} {list(buffer.shape)} is not one number a label, [{labels}]; "
                    "weights of nodes may be a column of y, for a loss of your own"
                )
        if spread and kind is not nn.BCEWithLogitsLoss:  # torch refuses that
            raise ModelError(spread)
        count, total = store.split_sizes["train"] * labels, _reduced(loss, place, "sum")
        weight: Callable[[Tensor], float] | None = BY_LABELS
        if store.num_incomplete:
            weight = lambda labels: float((~labels.isnan()).sum())  # noqa: E731
            count = sum(int(task.known(some).sum()) for some in _training_labels(store))
            total = _summed_where_known(loss, place)
        if getattr(loss, "reduction", "") != "mean":
            count, weight = 1, None
        return Loss(_by_autograd(total), float(count), weight=weight)
    loss = _moved(loss, place) if isinstance(loss, nn.Module) else loss
    if shapes and (flat_outputs or flat_labels != (task is Task.CLASSES)):
        try:
            return _tried(loss, _in_shapes(loss, *shapes), store, columns, dtype, place)
        except ModelError as error:
            if error.__cause__ is None:  # otherwise torch itself refuses such shapes
                raise ModelError(spread) if spread else error from None
    return _tried(loss, loss, store, columns, dtype, place)


def takes_results(loss: RowsLoss | None) -> bool:
    """Whether all of a model's results are passed to the loss, if there are several: to a user's own, but not to
    torch's, which take one."""
    return loss is not None and type(loss) not in (*_ELEMENTWISE, *_OF_CLASSES)


def of_results(outputs: Any, *, every: bool) -> Tensor:
    """Return a model's output, with one number a row as [r, 1]; of several results the first, or ``every`` one side by
    side."""
    several = isinstance(outputs, (tuple, list))
    first: Tensor = outputs[0] if several else outputs
    if several and every:
        return torch.cat(list(outputs), dim=1)
    return first[:, None] if first.dim() == 1 else first


def _name_of(loss: RowsLoss) -> str:
    return getattr(loss, "__name__", type(loss).__name__)


def _spread(name: str, flat_outputs: bool, flat_labels: bool) -> str:
    """Return what is wrong with outputs and labels of different shapes, [r] and [r, 1]; "" if they are alike."""
    if flat_outputs == flat_labels:
        return ""
    outputs, labels, other = ("[N, 1]", "[N]", "None") if flat_labels else ("[N]", "[N, 1]", "0")
    return (
        f"loss {name} of what the model gives, {outputs}, and y, {labels}, would be of all pairs of nodes, [N, N], by "
        f"torch's rules; give data.y[:, {other}]"
    )


def _in_shapes(loss: RowsLoss, flat_outputs: bool, flat_labels: bool) -> RowsLoss:
    """Return ``loss`` for outputs and labels with the model's and data's own shapes, [r] or [r, 1]."""

    def shaped(outputs_rC: Any, labels: Tensor) -> Tensor:
        labels = labels.reshape(len(labels), -1)
        return loss(outputs_rC[:, 0] if flat_outputs else outputs_rC, labels[:, 0] if flat_labels else labels)

    return shaped


def _check_all_used(name: str, loss: RowsLoss, results: Sequence[Tensor], labels: Tensor) -> None:
    """Raise ModelError if the loss does not use one of several results: in PyG, what that depends on would have no
    gradient at all, and an optimizer would leave it alone."""
    with torch.enable_grad():
        leaves = tuple(part.clone().requires_grad_() for part in results)
        found = torch.autograd.grad(loss(leaves, labels).sum(), leaves, allow_unused=True)
    for number, gradient in enumerate(found):
        if gradient is None:
            raise ModelError(f"loss {name} makes nothing of result {number}; let forward leave it out")


def _check_module(loss: nn.Module, dtype: torch.dtype) -> None:
    name = type(loss).__name__
    if any(True for _ in loss.parameters()):
        raise ModelError(f"loss {name} has parameters of its own, which nothing would train")
    for kind, buffer in loss.named_buffers():
        if buffer.is_floating_point() and buffer.dtype != dtype:
            raise ModelError(f"loss {name}: its {kind} is {buffer.dtype}, the model is {dtype}")
    is_torchs = type(loss).__module__.startswith("torch.")
    if is_torchs and getattr(loss, "reduction", "mean") not in ("mean", "sum"):
        raise ModelError(f"loss {name} with reduction={loss.reduction!r} is not supported; use 'mean' or 'sum'")


def _moved(loss: Any, place: torch.device) -> Any:
    """Return the loss with its weights on ``place``; the user's object is not changed."""
    return loss if place.type == "cpu" else copy.deepcopy(loss).to(place)


def _reduced(loss: Any, place: torch.device, reduction: str) -> RowsLoss:
    """Return the torch loss with another ``reduction``; the user's object is not changed."""
    reduced: Any = copy.copy(_moved(loss, place))
    reduced.reduction = reduction
    return reduced  # type: ignore[no-any-return]


def _summed_where_known(loss: Any, place: torch.device) -> RowsLoss:
    """Return the element-wise torch loss, summed over the labels that are not NaN."""
    each = _reduced(loss, place, "none")

    def total(outputs_rC: Tensor, labels_rC: Tensor) -> Tensor:
        missing_rC = labels_rC.isnan()
        losses_rC = each(outputs_rC, labels_rC.masked_fill(missing_rC, 0))
        return losses_rC.masked_fill(missing_rC, 0).sum()

    return total


def _training_labels(store: Store) -> Iterator[AnyArray]:
    """Yield the labels of the training rows, some at a time."""
    train = store.array("split/train")
    for start, labels in store.array("y").blocks(_BLOCK_ROWS):
        yield labels[train.read(start, start + len(labels))]


def _cross_entropy(loss: nn.CrossEntropyLoss | nn.NLLLoss, store: Store, outputs: int, place: torch.device) -> Loss:
    kind = type(loss)
    if loss.weight is not None and len(loss.weight) != outputs:
        raise ModelError(f"loss {kind.__name__} has {len(loss.weight)} class weights, the model {outputs} outputs")
    plain = loss.weight is None and loss.ignore_index < 0
    of_rows: Callable[[Tensor], float] | None = BY_ROWS
    divisor = float(store.split_sizes["train"])
    if not plain:  # torch divides the mean over rows by the class weights
        of_rows = partial(_weight_of_classes, loss)
        counts = training_classes(store)
        if 0 <= loss.ignore_index < store.num_classes:
            counts[loss.ignore_index] = 0
        weights = torch.ones(store.num_classes) if loss.weight is None else loss.weight[: store.num_classes]
        divisor = float(counts.double() @ weights.double())
    if not divisor > 0:
        raise ModelError(f"loss {kind.__name__}: weights and ignore_index leave no training row anything to add")
    if loss.reduction != "mean":
        divisor, of_rows = 1.0, None
    if isinstance(loss, nn.NLLLoss) or loss.label_smoothing:
        return Loss(_by_autograd(_reduced(loss, place, "sum")), divisor, weight=of_rows)
    weight = None if loss.weight is None else loss.weight.to(place)
    gradient = partial(_cross_entropy_gradient, weight=weight, ignore_index=loss.ignore_index)
    compiled = _compiled_cross_entropy() if place.type == "cpu" else None
    of_tile = compiled and partial(compiled, weight_C=weight, ignored=loss.ignore_index, divisor=divisor)
    return Loss(gradient, divisor, _OF_CROSS_ENTROPY, of_rows, of_tile)


def _compiled_cross_entropy() -> Callable[..., tuple[Tensor, Tensor] | None] | None:
    """Return the compiled loop for cross-entropy, if numba is installed."""
    try:
        from ooc.kernels.compiled.cross_entropy import cross_entropy
    except ImportError:
        return None
    return cross_entropy


def _weight_of_classes(loss: nn.CrossEntropyLoss | nn.NLLLoss, labels: Tensor) -> float:
    """Return what torch divides the mean over rows of these classes by."""
    labels = labels[labels != loss.ignore_index]
    return float(len(labels) if loss.weight is None else loss.weight.double()[labels].sum())


def _cross_entropy_gradient(
    outputs_rC: Tensor, labels: Tensor, *, weight: Tensor | None, ignore_index: int
) -> tuple[Tensor, Tensor]:
    """Return the gradient, with the same bits as autograd's calls; with its engine, a few rows take three times as
    long."""
    log_rC = torch.log_softmax(outputs_rC, dim=1)
    how = weight, _SUM, ignore_index
    total, total_weight = aten.nll_loss_forward.default(log_rC, labels, *how)
    d_log_rC = aten.nll_loss_backward.default(torch.ones_like(total), log_rC, labels, *how, total_weight)
    return total, aten._log_softmax_backward_data.default(d_log_rC, log_rC, 1, outputs_rC.dtype)


def _by_autograd(total: RowsLoss) -> RowsGradient:
    """Return the gradient function of any loss that sums over its rows."""

    def gradient(outputs_rC: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        with torch.enable_grad():
            leaf_rC = outputs_rC.detach().requires_grad_()
            found = total(leaf_rC, labels)
            (gradient_rC,) = torch.autograd.grad(found, leaf_rC)
        return found.detach(), gradient_rC

    return gradient


def training_classes(store: Store) -> Tensor:
    """Return the number of training rows of each class, [C] int64, in a store of classes."""
    counts = torch.zeros(store.num_classes, dtype=torch.int64)
    for chosen in map(torch.from_numpy, _training_labels(store)):
        if len(chosen) and not 0 <= int(chosen.min()) <= int(chosen.max()) < store.num_classes:
            raise StoreError("y of the store is damaged: a row of a split has no class; see ooc verify")
        counts += torch.bincount(chosen, minlength=store.num_classes)
    return counts


def _tried(
    own: RowsLoss, shaped: RowsLoss, store: Store, columns: Sequence[int], dtype: torch.dtype, place: torch.device
) -> Loss:
    """Return a user's callable as a loss, after comparing its results on a few rows together with those on each alone.
    ``own``: the callable; ``shaped``: with outputs and labels in its own shapes. It gets several results, with these
    ``columns``, as a tuple."""

    def results_in(outputs_rC: Tensor) -> Sequence[Tensor]:
        return torch.split(outputs_rC, list(columns), dim=1)

    def loss(outputs_rC: Tensor, labels: Tensor) -> Tensor:
        return shaped(outputs_rC if len(columns) == 1 else results_in(outputs_rC), labels)

    name, task, outputs = _name_of(own), store.task, sum(columns)
    generator = torch.Generator().manual_seed(1)
    by_row: bool | None = None
    is_number, numbers = False, _numbers_of(own)
    trials = [*_tried_labels(store, dtype, generator)]
    if task is Task.VALUES and not _takes(loss, trials, torch.zeros(_TRIED_ROWS, outputs, dtype=dtype), place):
        trials = _some_labels(store, dtype)  # for example one column of classes
    many = min(_MOST_TRIED, max(_TRIED_ROWS + 1, _TRIED_OUTPUTS // outputs))
    trials += [torch.cat(trials)[torch.arange(many) % (_TRIED_ROWS * len(trials))]]
    for trial, labels in enumerate(trials):
        if store.num_incomplete:
            missing = torch.rand(labels.shape, generator=generator) < _TRIED_MISSING
            labels[missing.logical_and_(~missing.all(dim=1, keepdim=True))] = torch.nan
        outputs_rC = torch.randn(len(labels), outputs, generator=generator, dtype=dtype)
        outputs_rC *= _TRIED_SPREADS[trial % len(_TRIED_SPREADS)]
        together, apart = _together_and_apart(loss, name, outputs_rC.to(place), labels.to(place))
        if len(columns) > 1 and not trial:
            _check_all_used(name, shaped, results_in(outputs_rC.to(place)), labels.to(place))
        if together.isnan().any():  # no conclusion, for instance for logarithms of probabilities
            outputs_rC = fractions(outputs_rC)
            together, apart = _together_and_apart(loss, name, outputs_rC.to(place), labels.to(place))
        is_number |= bool(together.isfinite().any())
        by_row = together.dim() == 1 if by_row is None else by_row
        expected = (torch.cat([part for _, part in apart]) if by_row else _mean(apart)).to(together.dtype)
        alike = together.shape == expected.shape
        if not alike or not torch.allclose(together, expected, rtol=1e-4, atol=1e-6, equal_nan=True):
            weighing = ", or where it weighs classes torch.nn.CrossEntropyLoss(weight=…) be it"
            raise ModelError(
                f"loss {name} is not the mean of its rows' losses; let it return one loss a row, [r]"
                f"{weighing if task is Task.CLASSES else ''}"
            )
        if store.num_incomplete and together.isnan().any():
            raise ModelError(f"loss {name} is NaN where a label is missing, which is NaN in y; let it leave such out")

    if not is_number:
        raise ModelError(f"loss {name} is no finite number of any outputs and labels that it is tried with")
    ratio = max(1.0, store.split_sizes["train"] / len(labels))
    for reporting in SizeReporting:
        widths = dict.fromkeys((*labels.shape[1:], outputs), 1.0)
        try:
            with logarithms_of_reported_sizes(), ReportedSizes(len(labels), widths, ratio, reporting):
                found = loss(outputs_rC.to(place), labels.to(place))
        except Exception:  # the user's code may raise anything
            continue
        if found.shape == together.shape and not torch.allclose(found, together, rtol=0, atol=0, equal_nan=True):
            raise ModelError(f"loss {name} goes another way by how many rows it is given, which come some at a time")

    if _numbers_of(own) != numbers:
        raise ModelError(f"loss {name} changes what it is by being called, which is once for every tile of rows")

    def total(outputs_rC: Tensor, labels: Tensor) -> Tensor:
        value = loss(outputs_rC, labels)
        return value.sum() if value.dim() else value * len(labels)

    return Loss(_by_autograd(total), float(store.split_sizes["train"]))


def _numbers_of(loss: RowsLoss) -> dict[str, object]:
    """Return the plain attributes of a callable object, or of a method's object."""
    owner = getattr(loss, "__self__", loss)
    return {name: one for name, one in getattr(owner, "__dict__", {}).items() if isinstance(one, (bool, int, float))}


def _mean(apart: Sequence[tuple[int, Tensor]]) -> Tensor:
    """Return the mean over all rows, from the means over pieces."""
    rows = sum(count for count, _ in apart)
    return torch.stack([part.sum() * (count / rows) for count, part in apart]).sum()


def _together_and_apart(
    loss: RowsLoss, name: str, outputs_rC: Tensor, labels: Tensor
) -> tuple[Tensor, list[tuple[int, Tensor]]]:
    """Return the loss of all these rows, [r] or a scalar; and of each single row if they are few, or of pieces of many,
    each twice as high as the one before, since a loss may depend on its number of rows: heights and losses, [p] or
    [1]."""
    rows, outputs = outputs_rC.shape
    starts = [*range(rows)] if rows == _TRIED_ROWS else [2**power - 1 for power in range((rows + 1).bit_length())]
    pieces = [slice(start, stop) for start, stop in pairwise([*starts, rows]) if start < stop]
    try:
        with torch.enable_grad():
            leaf = outputs_rC.clone().requires_grad_()
            together = loss(leaf, labels)
            torch.autograd.grad(together.sum(), leaf)
            if loss(outputs_rC, labels).requires_grad:
                raise ModelError(
                    f"loss {name} is of more than outputs and labels: what else it is computed from, as of weights it "
                    "penalises, would get no gradient; an optimizer's weight_decay is one"
                )
        with torch.no_grad():
            apart = [(some.stop - some.start, loss(outputs_rC[some], labels[some])) for some in pieces]
    except (TypeError, ValueError, RuntimeError, IndexError, AttributeError) as error:
        reason = " ".join(str(error).split())
        shape = ", ".join(map(str, ("r", *labels.shape[1:])))
        given = f"outputs [r, {outputs}] and labels [{shape}] of r training rows"
        raise ModelError(f"loss {name} cannot take {given}: {reason}") from error
    if (together.dim() and together.shape != (rows,)) or any(one.numel() not in (1, height) for height, one in apart):
        raise ModelError(f"loss {name} gives {list(together.shape)} for {rows} rows; it must be [r] or a scalar")
    return together.detach(), [(height, one.reshape(-1)) for height, one in apart]


def _tried_labels(store: Store, dtype: torch.dtype, generator: torch.Generator) -> Iterator[Tensor]:
    """Yield labels of a few rows at a time, chosen so that rows or labels that count more than others show."""
    match store.task:
        case Task.CLASSES:
            yield from _tried_classes(store.num_classes, generator)
        case Task.MULTILABEL:
            shape = (_TRIED_ROWS, store.array("y").columns)
            for _ in range(_LEAST_TRIALS):
                # Rows of no label, of every label, of a few and of about half.
                shares = torch.rand(_TRIED_ROWS, 1, generator=generator)
                shares[0], shares[1], shares[2] = 0, 1, 1 / shape[1]
                yield (torch.rand(shape, generator=generator) < shares).to(dtype)
        case Task.VALUES:
            shape = (_TRIED_ROWS, store.array("y").columns)
            for _ in range(_LEAST_TRIALS):
                values = torch.randn(shape, generator=generator, dtype=dtype)
                yield values
                yield values.abs()  # for losses that take logarithms
                yield torch.randint(-1, 2, shape, generator=generator).to(dtype)  # -1 often means a missing value
                yield 10 * values


def _takes(loss: RowsLoss, trials: Sequence[Tensor], outputs_rC: Tensor, place: torch.device) -> bool:
    """Whether the loss can be computed for all these labels."""
    try:
        for labels in trials:
            loss(outputs_rC.to(place), labels.to(place))
    except Exception:  # the user's code may raise anything
        return False
    return True


def _some_labels(store: Store, dtype: torch.dtype) -> list[Tensor]:
    """Return labels of training rows, a few at a time."""
    labels = torch.from_numpy(next(some for some in _training_labels(store) if len(some)))
    rows = torch.linspace(0, len(labels) - 1, _TRIED_ROWS * _LEAST_TRIALS).long()
    return [*torch.split(labels[rows].to(dtype), _TRIED_ROWS)]


def _tried_classes(classes: int, generator: torch.Generator) -> Iterator[Tensor]:
    """Yield every class beside class 0, so that a class that counts more or less shows; and class 0 twice, so that
    weights by frequency show. It makes two calls a class: 0.01 s for 172 classes, 0.3 s for 3,000."""
    beside = _TRIED_ROWS - 2
    rounds = -(-_LEAST_TRIALS * beside // max(classes, 1))
    others = torch.cat([torch.randperm(classes, generator=generator) for _ in range(rounds)])
    for start in range(0, len(others), beside):
        part = others[start : start + beside]
        yield torch.cat((part.new_zeros(_TRIED_ROWS - len(part)), part))
