# SPDX-License-Identifier: Apache-2.0
"""Torch's operators on a GPU that is none, computed on the host: Python loads it for ``tools/with_cuda_stand_in host``.

The memory of that GPU is the host's. So an operator is carried out twice: as CUDA's, which allocates what it returns,
checks what it is given and launches what does nothing; and as the CPU's, on tensors of the same memory, whose results
are written where CUDA's would be. Operators whose results are as large as their values say are the CPU's alone.
"""

import ctypes
import os
import threading
from typing import Any

_SIZED_BY_VALUES = frozenset(
    ("bincount", "histc", "index", "masked_select", "nonzero", "repeat_interleave", "unique_consecutive", "unique_dim")
) | {"_unique2"}
_OF_MEMORY = frozenset(("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "resize_", "set_"))
"""Whose results have no values."""


def install() -> None:
    """Compute so in every thread from now on."""
    import torch
    from torch import Tensor, _tensor_str
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_leaves, tree_map

    def on_host(tensor: Tensor) -> Tensor:
        """The same memory, as a tensor of the CPU."""
        if tensor.layout is torch.sparse_csr:
            parts = (on_host(part) for part in (tensor.crow_indices(), tensor.col_indices(), tensor.values()))
            return torch.sparse_csr_tensor(*parts, tensor.shape)
        if tensor.device.type != "cuda":
            return tensor
        if not tensor.numel():
            return torch.empty(tensor.shape, dtype=tensor.dtype)
        reach = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        memory = (ctypes.c_char * (reach * tensor.element_size())).from_address(tensor.data_ptr())
        return torch.frombuffer(memory, dtype=tensor.dtype).as_strided(tensor.shape, tensor.stride())

    def is_there(value: Any) -> bool:
        if isinstance(value, Tensor):
            return value.device.type == "cuda"
        return isinstance(value, torch.device) and value.type == "cuda"

    def of_host(value: Any) -> Any:
        if isinstance(value, Tensor):
            return on_host(value)
        if isinstance(value, torch.Generator):
            return None
        return torch.device("cpu") if is_there(value) else value

    def write(target: Any, computed: Any) -> None:
        if isinstance(target, Tensor) and target.layout is torch.strided and target.shape == computed.shape:
            on_host(target).copy_(computed)

    class OnHost(TorchDispatchMode):
        def __torch_dispatch__(self, operator: Any, types: Any, given: Any = (), named: Any = None) -> Any:
            named = named or {}
            name, schema = operator._schema.name.partition("::")[2], operator._schema
            changes = any(one.alias_info is not None and one.alias_info.is_write for one in schema.arguments)
            is_view = not changes and any(one.alias_info is not None for one in schema.returns)
            if not any(map(is_there, tree_leaves((given, named)))) or is_view or name in _OF_MEMORY:
                return operator(*given, **named)
            if name in ("_local_scalar_dense", "is_pinned", "record_stream"):
                return operator(*given, **named)
            theirs = tree_map(of_host, (given, {key: value for key, value in named.items() if key != "pin_memory"}))
            if name in _SIZED_BY_VALUES:
                return tree_map(lambda found: found.cuda(), operator(*theirs[0], **theirs[1]))
            made = operator(*given, **named)
            if name == "_to_copy":  # where what it makes is on the host, as well
                write(made, theirs[0][0])
                return made
            computed = operator(*theirs[0], **theirs[1])
            if not changes:
                for target, value in zip(tree_leaves(made), tree_leaves(computed), strict=False):
                    write(target, value)
            return made

    def enter() -> None:
        OnHost().__enter__()

    run, text_of = threading.Thread.run, _tensor_str._str

    def run_so(self: threading.Thread) -> None:
        enter()
        run(self)

    def text_so(self: Any, **options: Any) -> str:
        return text_of(self.cpu() if is_there(self) else self, **options)  # torch leaves the mode to print

    enter()
    threading.Thread.run = run_so  # type: ignore[method-assign]
    _tensor_str._str = text_so


if os.environ.get("CUDA_STAND_IN") == "host":
    install()
