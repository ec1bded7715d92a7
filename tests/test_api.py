# SPDX-License-Identifier: Apache-2.0
"""``import ooc``: what users need under one roof, and nothing else."""

import ast
import importlib
import pydoc
import subprocess
import sys
from pathlib import Path

import click
import pytest

import ooc
from ooc import errors
from ooc.cli import as_command_options


def test_what_there_is_shows_and_loads() -> None:
    names = {
        *("Embedding", "GraphLoader", "GraphTrainer", "LinkPredictor", "LinkTrainer", "Links", "NeighborLoader"),
        *("Store", "Trainer", "__version__", "convert", "dataset", "offload", "open", "plan_chain", "remote_backend"),
        *(
            name
            for name, value in vars(errors).items()
            if isinstance(value, type) and issubclass(value, errors.OocError)
        ),
    }
    assert set(dir(ooc)) == names
    for name in names:
        assert getattr(ooc, name) is not None
    assert ooc.BudgetError is errors.BudgetError


def test_messages_of_damaged_files_stay_readable() -> None:
    assert str(ooc.StoreError("a" * 900)) == "a" * 900
    assert str(ooc.StoreError("a" * 9000 + "b" * 9000)) == f"{'a' * 800} […] {'b' * 400}"


def test_importing_its_modules_hides_no_name() -> None:
    for module in ("ooc.conversion.conversion", "ooc.sources.names", "ooc.train.trainer", "ooc.storage.store"):
        importlib.import_module(module)
    assert callable(ooc.convert) and callable(ooc.dataset) and callable(ooc.open) and callable(ooc.remote_backend)
    assert isinstance(ooc.Trainer, type) and isinstance(ooc.Store, type)


def test_a_name_that_is_none_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'ooc' has no attribute 'Trainr'"):
        _ = ooc.Trainr  # type: ignore[attr-defined]


def test_help_fits_a_screen() -> None:
    text = pydoc.plain(pydoc.render_doc(ooc))
    assert len(text.splitlines()) <= 52
    for name in dir(ooc):
        assert name in text or name == "__version__"


def test_importing_and_looking_loads_neither_torch_nor_numpy() -> None:
    program = "import sys, ooc; dir(ooc); ooc.OocError; assert not {'torch', 'numpy'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", program], check=True)


@pytest.mark.parametrize(
    ("message", "printed"),
    [
        ("give host_budget='39M'", "give --host-budget 39M"),
        ("give gpu_budget='5000' and host_budget='1G'", "give --gpu-budget 5000 and --host-budget 1G"),
        ("x.ooc exists; give force=True to replace it", "x.ooc exists; give --force to replace it"),
        ("give another spill_dir= or larger budgets", "give another --spill-dir or larger budgets"),
        ("GATConv wants edge_dim=3 for /data/host_budget.npy", "GATConv wants edge_dim=3 for /data/host_budget.npy"),
        ("give download=True, or drop_duplicates=False", "give --yes, or --duplicates keep"),
    ],
)
def test_errors_name_pythons_arguments_and_the_command_its_options(message: str, printed: str) -> None:
    names = ("host_budget", "gpu_budget", "force", "spill_dir")
    command = click.Command("c", params=[click.Option(["--" + name.replace("_", "-")]) for name in names])
    assert as_command_options(message, command) == printed


def test_no_message_but_the_commands_speaks_of_options() -> None:
    """Options are the command line's; what Python raises names its own arguments."""
    folder = Path(ooc.__file__).parent
    for path in folder.rglob("*.py"):
        source = path.read_text(encoding="utf-8")
        if path.is_relative_to(folder / "cli") or "--" not in source:
            continue
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.Raise):
                texts = [part.value for part in ast.walk(node) if isinstance(part, ast.Constant)]
                named = [text for text in texts if isinstance(text, str) and " --" in f" {text}" and "ooc " not in text]
                assert not named, f"{path}: {named}"
