# SPDX-License-Identifier: Apache-2.0
"""Tables about conversions: what one would take (``--dry-run``), and what can be converted (``--list``)."""

import shutil
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table

from ooc.conversion.budget import check_folder
from ooc.conversion.forecast import Chosen, Forecast, Subject, forecast, measure, subject_of, subject_of_dataset
from ooc.conversion.output import check_target, resolved
from ooc.report.progress import format_duration
from ooc.sizes import format_size
from ooc.sources.names import DATASETS, Dataset, named
from ooc.sources.reading import Request
from ooc.sources.registry import FORMATS, open_source


def print_forecast(
    source: str,
    *,
    root: Path,
    out: Path | None,
    force: bool,
    form: str | None,
    request: Request,
    symmetrize: bool | None,
    self_loops: bool,
    row_normalize: bool,
    ordered: bool,
    dtype: str,
    console: Console,
) -> None:
    """A table of the stages, and what they need together; nothing stays in the folder where OUT would be.

    A dataset's files need not be here. Raises as ``ooc.convert`` does for a source that cannot be read and an ``out``
    that cannot be written.
    """
    dataset, usual = named(source), False
    place = dataset.find(root) if dataset is not None else Path(source)
    if dataset is not None and place is None:
        subject, where = subject_of_dataset(dataset), "as published; its files are not here"
    else:
        assert place is not None
        opened = open_source(place if dataset is not None else source, format=form, request=request)
        subject, usual, where = subject_of(opened), opened.symmetrize, str(place)
        for note in opened.notes:
            console.print(note, highlight=False, markup=False, soft_wrap=True)
    target = resolved(out if out is not None else Path(f"{subject.name}.ooc"))
    folder = target.parent
    check_folder(folder)
    check_target(target, force=force)
    chosen = Chosen(
        symmetrize=usual if symmetrize is None else symmetrize,
        self_loops=self_loops,
        row_normalize=row_normalize,
        ordered=ordered,
        dtype=dtype,
    )
    found = forecast(subject, measure(folder), chosen)
    console.print(_table(found))
    for line in _lines(subject, found, where=where, folder=folder, budget_bytes=request.budget_bytes):
        console.print(line, highlight=False, soft_wrap=True)


def _table(found: Forecast) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("stage")
    for column in ("reads", "writes", "time"):
        table.add_column(column, justify="right", no_wrap=True)
    for stage in found.stages:
        sizes = (format_size(stage.read_bytes), format_size(stage.written_bytes))
        table.add_row(stage.name, *sizes, format_duration(stage.seconds))
    read = sum(stage.read_bytes for stage in found.stages)
    written = sum(stage.written_bytes for stage in found.stages)
    table.add_section()
    table.add_row("all", format_size(read), format_size(written), format_duration(found.seconds))
    return table


def _lines(subject: Subject, found: Forecast, *, where: str, folder: Path, budget_bytes: int) -> list[str]:
    counts = f"{subject.num_nodes:,} nodes, {subject.num_edges:,} edges, {subject.num_features} features"
    free = shutil.disk_usage(folder).free
    room = "" if free >= found.disk_bytes else f", {format_size(found.disk_bytes - free)} too little"
    short = "" if budget_bytes >= found.least_memory_bytes else ": too little"
    return [
        f"{subject.name}: {counts} ({where})",
        f"source: {format_size(subject.input_bytes)}, {format_size(subject.raw_bytes)} unpacked; "
        f"store: about {format_size(found.store_bytes)}",
        f"disk: {format_size(found.disk_bytes)} at most in {folder}, {format_size(free)} are free{room}",
        f"memory: at least {format_size(found.least_memory_bytes)}; "
        f"it would keep to {format_size(budget_bytes)}{short}",
        "times are estimates from what this machine's disk and processor did in a few seconds just now",
    ]


# ---- what can be converted --------------------------------------------------------------------------------------


def print_list(console: Console) -> None:
    """The formats and what each needs; the names and what they stand for."""
    formats = _listing("format", "what SOURCE is")
    for form, reader in FORMATS.items():
        formats.add_row(form, reader.needs)
    console.print(formats)
    names = _listing("name", "nodes", "edges", "features", "where it lies under --root")
    for column in names.columns[1:4]:
        column.justify = "right"
    for dataset in DATASETS.values():
        counts = (f"{count:,}" for count in (dataset.nodes, dataset.edges, dataset.features))
        names.add_row(dataset.name, *counts, _where(dataset))
    console.print(names)


def _listing(*columns: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for column in columns:
        table.add_column(column)
    return table


def _where(dataset: Dataset) -> str:
    """The usual place, and the file it can be downloaded as."""
    first, packed = dataset.places[0], dataset.files[0]
    return f"{first}/ or {packed.path}" if len(dataset.files) == 1 and packed.unpacked is None else f"{first}/"
