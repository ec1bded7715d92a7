# SPDX-License-Identifier: Apache-2.0
"""A PyG ``Data`` object, or a dataset of one, as a source.

The only module of conversion that knows torch, and only when used.
"""

from typing import Any

from ooc.errors import SourceError
from ooc.sources.formats.arrays import EDGE_DATA_NAMES, ArrayOptions, array_source
from ooc.sources.reading import Request
from ooc.sources.source import Source
from ooc.storage.array import AnyArray

_TAKEN = (
    *("edge_index", "x", "y", "train_mask", "val_mask", "valid_mask", "test_mask"),
    *("train_idx", "val_idx", "valid_idx", "test_idx"),
    *EDGE_DATA_NAMES,
)


def is_pyg_data(source: object) -> bool:
    """Whether ``source`` looks like a ``torch_geometric.data.Data`` or ``Dataset``, without importing them."""
    return any(base.__module__.startswith("torch_geometric.data") for base in type(source).__mro__)


def pyg_source(data: Any, request: Request) -> Source:
    """The graph of ``data``, or of the one graph in the dataset ``data``; SourceError for anything else.

    Tensors are read in place: the caller's memory, not the budget's.
    """
    if any(base.__name__ == "Dataset" for base in type(data).__mro__):
        if len(data) != 1:
            raise SourceError(f"the PyG dataset {type(data).__name__} holds {len(data)} graphs; give one of them")
        data = data[0]
    if type(data).__name__ != "Data":
        raise SourceError(f"a PyG {type(data).__name__} cannot be converted, only a homogeneous Data")
    if getattr(data, "adj_t", None) is not None and data.edge_index is None:
        raise SourceError("the PyG Data has adj_t, but no edge_index")
    arrays: dict[str, AnyArray] = {}
    for name in _TAKEN:
        tensor = getattr(data, name, None)
        if tensor is not None:
            arrays[name] = _array(tensor, name)
    return array_source(arrays, ArrayOptions(request=request, name="the PyG Data", format="pyg"))


def _array(tensor: Any, name: str) -> AnyArray:
    import torch

    if not isinstance(tensor, torch.Tensor) or tensor.layout is not torch.strided:
        raise SourceError(f"the PyG Data's {name} is no dense tensor")
    tensor = tensor.detach().cpu()
    array: AnyArray = (tensor.float() if tensor.dtype is torch.bfloat16 else tensor).numpy()
    return array
