# SPDX-License-Identifier: Apache-2.0
"""What tests of devices have in common."""

from collections.abc import Iterator

import pytest

from ooc.model.layers import opaque
from ooc.train import loss


@pytest.fixture(autouse=True)
def rows_of_edges() -> Iterator[pytest.MonkeyPatch]:
    """Layers that run as they are make rows of edges on the CPU, too, as on a device: so both have the same bits."""
    tried = opaque.probe_layer
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(opaque, "probe_layer", lambda *given, **options: tried(*given, **options | {"on_cpu": False}))
        yield patch


@pytest.fixture(autouse=True)
def losses_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cross-entropy is computed by torch's operators on the CPU, too, for the same reason."""
    monkeypatch.setattr(loss, "_compiled_cross_entropy", lambda: None)
