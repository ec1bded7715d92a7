# SPDX-License-Identifier: Apache-2.0
"""``ooc convert --list``: what can be converted."""

from rich import box
from rich.console import Console
from rich.table import Table

from ooc.conversion.formats import FORMATS
from ooc.conversion.names import DATASETS, Dataset


def print_list(console: Console) -> None:
    """The formats and what each needs; the names and what they stand for."""
    formats = _table("format", "what SOURCE is")
    for form, reader in FORMATS.items():
        formats.add_row(form.value, reader.needs)
    console.print(formats)
    names = _table("name", "nodes", "edges", "features", "where it lies under --root")
    for column in names.columns[1:4]:
        column.justify = "right"
    for dataset in DATASETS.values():
        counts = (f"{count:,}" for count in (dataset.nodes, dataset.edges, dataset.features))
        names.add_row(dataset.name, *counts, _where(dataset))
    console.print(names)


def _table(*columns: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for column in columns:
        table.add_column(column)
    return table


def _where(dataset: Dataset) -> str:
    """The usual place, and the file it can be downloaded as."""
    first, packed = dataset.places[0], dataset.files[0]
    return f"{first}/ or {packed.path}" if len(dataset.files) == 1 and packed.unpacked is None else f"{first}/"
