# SPDX-License-Identifier: Apache-2.0
"""What tests of devices have in common."""

from collections.abc import Iterator

import pytest

from ooc.model.layers import opaque
from tests.engine.fake_device import compute_losses_by_torch


@pytest.fixture(autouse=True)
def rows_of_edges() -> Iterator[pytest.MonkeyPatch]:
    """Layers that run as they are make rows of edges on the CPU, too, as on a device: so both have the same bits."""
    tried = opaque.probe_layer
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(opaque, "probe_layer", lambda *given, **options: tried(*given, **options | {"on_cpu": False}))
        yield patch


@pytest.fixture(autouse=True)
def losses_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a device's are."""
    compute_losses_by_torch(monkeypatch)
