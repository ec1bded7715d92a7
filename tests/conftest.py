# SPDX-License-Identifier: Apache-2.0
"""What holds for all tests: none sees a profile of the machine it happens to run on, and without an NVIDIA GPU the
kernels for one run in Triton's interpreter.

Triton asks for that when it is imported, which PyG does wherever triton is installed. So it is settled before any test
is, here; nothing but those kernels uses Triton.

Nor does an operator take several threads unless a test says so: of small tensors they spend most of their time waiting
for one another, many times what the operator takes.

And Python looks for garbage only among what tests make: collecting 5,000 tests imports half a million objects that
stay, and looking through them, over and over, was two fifths of collecting and a tenth of small trainings.
"""

import gc
import os
import sys
from collections.abc import Generator, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

from tests.examples import ORDINARY, THOROUGH, is_thorough

for name, count in ("ordinary", ORDINARY), ("thorough", THOROUGH):
    settings.register_profile(name, deadline=None, max_examples=count)  # a busy machine is no failure
settings.load_profile("ordinary")  # --hypothesis-profile is looked at later

os.environ.setdefault("OMP_NUM_THREADS", "1")  # torch reads it when it is imported
if not any(Path(path).exists() for path in ("/dev/nvidiactl", "/usr/lib/wsl/lib/libcuda.so.1")):
    os.environ.setdefault("TRITON_INTERPRET", "1")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    gc.disable()
    collected = yield
    gc.freeze()
    gc.set_threshold(10_000)
    gc.enable()
    return collected


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """An ordinary run leaves out what is marked ``thorough``, unless tests are asked for by name. And what may take
    longer than other tests begins first: at the end, one process would have it and others nothing."""
    if not is_thorough() and not any("::" in argument for argument in config.args):
        left = _left_out(items)
        config.hook.pytest_deselected(items=[*left])
        items[:] = [item for item in items if item not in left]
    items.sort(key=lambda item: item.get_closest_marker("timeout") is None)


def _left_out(items: list[pytest.Item]) -> dict[pytest.Item, None]:
    """Those marked ``thorough`` themselves, or by their ids in a mark of the function."""
    left, known, named = dict[pytest.Item, None](), set(), set()
    for item in items:
        case = item.callspec.id if hasattr(item, "callspec") else ""
        function = item.nodeid.removesuffix(f"[{case}]")
        known.add((function, case))
        for mark in item.iter_markers("thorough"):
            named |= {(function, one) for one in mark.args}
            if not mark.args or case in mark.args:
                left[item] = None
    if named - known:
        raise pytest.UsageError(f"marked thorough, and not there: {sorted(named - known)}")
    return left


def pytest_deselected(items: list[pytest.Item]) -> None:
    """For the process that xdist's workers report to: it collects nothing."""
    output = getattr(items[0].config, "workeroutput", None) if items else None
    if output is not None:
        output["deselected"] = output.get("deselected", 0) + len(items)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Of the summary, what is counted alone matters; every worker leaves out the same."""
    count = getattr(node, "workeroutput", {}).get("deselected", 0)
    node.config.pluginmanager.get_plugin("terminalreporter").stats["deselected"] = [node] * count


@pytest.fixture(scope="session", autouse=True)
def _made_once() -> Iterator[None]:
    """PyG compiles the template that its convolutions are made by for every layer anew, a twentieth of a test that
    trains a small model; and torch.fx, for every trace, what stands for each function of ``math``."""
    made = (
        ("torch_geometric.template", "FileSystemLoader Environment"),
        ("torch.fx._symbolic_trace", "_create_wrapped_func"),
    )
    with pytest.MonkeyPatch.context() as patch:
        for module, names in made:
            for name in names.split() if module in sys.modules else ():
                patch.setattr(sys.modules[module], name, cache(getattr(sys.modules[module], name)))
        if "torch.fx._symbolic_trace" in sys.modules:
            from tests.patched_modules import patch_once

            patch_once(patch)
        yield


@pytest.fixture(scope="session", autouse=True)
def _remembered_models(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Where there are models: tests of plans alone do without PyG."""
    folder = tmp_path_factory.getbasetemp()
    with pytest.MonkeyPatch.context() as patch:
        if "torch_geometric" in sys.modules:
            from tests.remembered import remember

            remember(patch, (folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder) / "tried layers")
        yield


@pytest.fixture(scope="session", autouse=True)
def _empty_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    before = os.environ.get("XDG_CACHE_HOME")
    os.environ["XDG_CACHE_HOME"] = str(tmp_path_factory.mktemp("cache"))
    yield
    if before is None:
        del os.environ["XDG_CACHE_HOME"]
    else:
        os.environ["XDG_CACHE_HOME"] = before


@pytest.fixture(scope="session", autouse=True)
def _no_waiting_for_the_disk() -> Iterator[None]:
    """Killing a process loses nothing that it has written; only a power cut would, and a small conversion waits for the
    disk for a third of its time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda descriptor: None)
        yield
