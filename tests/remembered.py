# SPDX-License-Identifier: Apache-2.0
"""What is found out about a model before it trains, found once for all tests: most train models that are made alike."""

import copy
import inspect
import os
import pickle
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, partial
from hashlib import sha256
from io import BytesIO
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch
from torch_geometric.nn import MessagePassing

from ooc.model.layers import opaque
from ooc.model.layers.conformance import check_sizes, probe_layer
from ooc.model.layers.layer import Layer
from ooc.model.layers.opaque import Content, digest
from ooc.model.lowering import symbolic
from ooc.model.lowering.symbolic import Calls
from ooc.model.lowering.whole import with_arguments
from ooc.plan import Hardware, Limits, Workload
from ooc.plan.layout.layout import Layout
from ooc.plan.planner import Chosen, choose_workload
from ooc.plan.problem import NOTHING, Problem, Variants
from ooc.plan.solver import minimum_memory
from ooc.stages.edge_counts import EdgeCounts
from ooc.train import job

Key = TypeVar("Key")
Value = TypeVar("Value")
_MOST_KNOWN = 100


def remember(patch: pytest.MonkeyPatch, folder: Path) -> None:
    """Have models and layers that are made alike traced and tried once, and what is alike planned once. A test that
    looks on puts its own in place. ``folder``: of all processes that run tests, for what trying tells."""
    patch.setattr(symbolic, "Calls", traced_once)
    folder.mkdir(exist_ok=True)
    for tried in probe_layer, check_sizes:
        patch.setattr(opaque, tried.__name__, TriedOnce(tried, folder))
    patch.setattr(job, "choose_workload", planned := PlannedOnce())
    patch.setattr(job, "minimum_memory", planned.minimum_memory)


_WHOLE = with_arguments(torch.nn.Module, ["x"]).__class__.__name__


class _Content(Content):
    """With a class that is made for each model anew by what it is made of."""

    def reducer_override(self, one: Any) -> Any:
        if isinstance(one, type) and one.__name__ == _WHOLE:
            return tuple, ((*one.__bases__, *inspect.signature(one.forward).parameters),)  # type: ignore[attr-defined]
        return super().reducer_override(one)


_traced: dict[bytes, tuple[Calls, list[int], list[int]]] = {}
"""By the digest of what was traced: its calls, and which of its parameters are cut off, and which are reached."""


def traced_once(
    module: torch.nn.Module,
    name: str,
    inputs: Sequence[torch.Tensor],
    *,
    training: bool,
    fewest: tuple[int, int],
    rows: int = 1,
    opened: MessagePassing | None = None,
    whole: Sequence[Any] = (),
) -> Calls:
    """The calls of a module, found once for modules that are the same but for weights, whatever their ``name``. They
    name its parts; what else they refer to, tensors that forward makes, belongs to one module."""
    fewer = [*map(min, fewest, (symbolic._NODES, symbolic._EDGES))]
    key = digest(module, inputs, training, [*whole, fewer], pickler=_Content)
    own = list(module.parameters())
    if key is None or key not in _traced:
        options: dict[str, Any] = {"rows": rows, "opened": opened, "whole": whole}
        calls = Calls(module, name, inputs, training=training, fewest=fewest, **options)
        if key is None or any(attribute.startswith("_tensor_constant") for attribute in vars(module)):
            return calls
        kinds = calls.cut_off, calls.reached
        _traced[key] = calls, *([k for k, one in enumerate(own) if any(one is o for o in kind)] for kind in kinds)
    known, cut_off, reached = _traced[key]
    calls = copy.copy(known)
    calls.cut_off, calls.reached = [own[k] for k in cut_off], [own[k] for k in reached]
    return calls


class PlannedOnce:
    """The plan of a workload, made once for the same limits; and of what is alike one workload is planned for all
    limits, so that what needs the least memory is looked for once."""

    def __init__(self) -> None:
        self._workloads: OrderedDict[bytes, Workload] = OrderedDict()
        self._plans: OrderedDict[tuple[bytes, bytes], tuple[bytes | None, Chosen]] = OrderedDict()

    def __call__(self, variants: Variants, limits: Limits, hardware: Hardware) -> Chosen:
        known = cache(lambda recomputed: self._of_all(variants(recomputed)))
        (key, _), of_machine = known(NOTHING), _pickled((limits, hardware))
        if key is None or of_machine is None:
            return choose_workload(variants, limits, hardware)
        asked = key, of_machine
        if asked not in self._plans or known(self._plans[asked][1].recomputed)[0] != self._plans[asked][0]:
            chosen = choose_workload(lambda recomputed: known(recomputed)[1], limits, hardware)
            self._plans[asked] = known(chosen.recomputed)[0], chosen
        return _latest(self._plans, asked)[1]

    def minimum_memory(self, problem: Problem) -> Layout:
        """Looked for once for all budgets, which it does not depend on."""
        return minimum_memory(Problem(self._of_all(problem.workload)[1], problem.limits, problem.hardware))

    def _of_all(self, workload: Workload) -> tuple[bytes | None, Workload]:
        """Its digest, and the one workload that stands for all such."""
        key = _pickled(replace(workload))  # without what has been found of it
        if key is None:
            return None, workload
        self._workloads.setdefault(key, workload)
        return key, _latest(self._workloads, key)


class _Counting(pickle.Pickler):
    """Of what is counted in a store when it is asked for, which store that is, and as it is now."""

    def reducer_override(self, one: Any) -> Any:
        if not isinstance(one, partial) or not isinstance(counts := getattr(one.func, "__self__", None), EdgeCounts):
            return NotImplemented
        (direction,), store = one.args, counts.store
        if store is None or not direction.of_edges:
            raise pickle.PicklingError("what may be at most is no file's")
        indices = Path(store.topology(direction.value)[1].path).resolve()
        return tuple, ((one.func.__name__, str(indices), indices.stat().st_ino, indices.stat().st_mtime_ns),)


def _pickled(one: Any) -> bytes | None:
    """A digest; None where it cannot be told."""
    try:
        _Counting(content := BytesIO()).dump(one)
    except (AttributeError, TypeError, pickle.PicklingError):
        return None
    return sha256(content.getvalue()).digest()


def _latest(known: OrderedDict[Key, Value], key: Key) -> Value:
    """What is known by ``key``, which is forgotten when a hundred others have been asked for since."""
    known.move_to_end(key)
    if len(known) > _MOST_KNOWN:
        known.popitem(last=False)
    return known[key]


class TriedOnce:
    """What ``tried`` tells of a layer, found once for layers that are the same but for weights, as those of trainers
    are that differ in their budgets alone. What one process has found others read, its children among them."""

    def __init__(self, tried: Callable[..., Any], folder: Path) -> None:
        self._tried, self._folder = tried, folder
        self._known: dict[bytes, Any] = {}
        """By the digest of what was tried."""

    def __call__(self, layer: Layer, module: torch.nn.Module, *given: Any, **options: Any) -> Any:
        key = digest(self._tried.__name__, module, layer.kind, given, options, pickler=_Content)
        if key is None:
            return self._tried(layer, module, *given, **options)
        path = self._folder / key.hex()
        if key not in self._known and path.exists():
            self._known[key] = pickle.loads(path.read_bytes())
        if key not in self._known:
            self._known[key] = self._tried(layer, module, *given, **options)
            beside = path.with_name(f"{path.name}.{os.getpid()}")
            beside.write_bytes(pickle.dumps(self._known[key]))
            beside.replace(path)
        return self._known[key]
