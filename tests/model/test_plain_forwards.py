# SPDX-License-Identifier: Apache-2.0
"""Forwards of PyG's models that are written anew, and PyG without these models."""

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest
from torch_geometric.nn import attention
from torch_geometric.nn.attention import PerformerAttention

from ooc.model.lowering import plain_forwards


def _imported_anew() -> ModuleType:
    spec = importlib.util.spec_from_file_location("plain_forwards_again", Path(plain_forwards.__file__))
    assert spec is not None and spec.loader is not None
    found = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(found)
    return found


def test_global_attention_is_left_out_where_pyg_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """As before 2.7, where nothing could be imported."""
    assert len(_imported_anew().GLOBAL_ATTENTIONS) == (3 if hasattr(attention, "PolynormerAttention") else 1)
    monkeypatch.delattr("torch_geometric.nn.attention.PolynormerAttention", raising=False)
    found = _imported_anew()
    assert [*found.GLOBAL_ATTENTIONS] == [PerformerAttention]
    with found.plain_forwards():
        pass
