# SPDX-License-Identifier: Apache-2.0
"""Print tables about conversions: what one would take (``--dry-run``), and what can be converted (``--list``)."""

import json
import shutil
from collections.abc import Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from rich.console import Console

from ooc.conversion.budget import Options, Sizes, budget_bytes_of, check_folder, describe_demand
from ooc.conversion.conversion import chosen_options
from ooc.conversion.forecast import Rates, forecast, sizes_of_dataset
from ooc.conversion.held_out_links import HeldOut
from ooc.conversion.output import check_target, resolved
from ooc.plan import UNMEASURED
from ooc.profile import known_hardware
from ooc.progress.figures import format_duration
from ooc.report.console import print_table, say
from ooc.sizes import format_size
from ooc.sources.names import DATASETS, Dataset, named
from ooc.sources.reading import Request
from ooc.sources.registry import FORMATS, open_source
from ooc.storage.array import CHUNK_BYTES


def print_forecast(
    source: str,
    out: Path | None,
    *,
    root: Path,
    format: str | None,
    split: int | str | None,
    order: str,
    host_budget: int | None,
    drop_edge_data: bool,
    columns: Mapping[str, str],
    force: bool,
    console: Console,
    as_json: bool = False,
    **options: Any,
) -> None:
    """Print a conversion's stages and total demand, with ``as_json`` as one object; leave nothing in OUT's folder.

    A dataset's files need not be here. Options are those of ``ooc.convert``, and so are errors for a source that cannot
    be read or an ``out`` that cannot be written.
    """
    budget = budget_bytes_of(host_budget)
    feature_form = options.pop("feature_form")
    held_out = options.pop("hold_out_links")
    names = [field.name for field in fields(Options) if field.name not in ("sparse_features", "hold_out")]
    wanted: dict[str, Any] = {name: options.pop(name) for name in names}
    if held_out is not None:
        HeldOut.parse(held_out)  # only as a check; held-out links change the sizes too little to count
    given = {name: value for name, value in options.items() if value is not None}
    dataset = named(source)
    place = Path(source) if dataset is None else dataset.find(root)
    if dataset is not None and place is None:
        sizes, where = sizes_of_dataset(dataset), "as published; its files are not here"
        wanted |= {name: False for name, value in wanted.items() if value is None}
        chosen = Options(**wanted, sparse_features=feature_form == "sparse")
    else:
        request = Request(
            split=split, budget_bytes=budget, drop_edge_data=drop_edge_data, options=given, columns=columns
        )
        opened = open_source(source if dataset is None else place, format=format, request=request)
        sizes, where = Sizes.of(opened), str(place)
        chosen = chosen_options(opened, feature_form=feature_form, **wanted)
        for note in () if as_json else opened.notes:
            console.print(note, highlight=False, markup=False, soft_wrap=True)  # wrapped already
        where += "" if opened.prepare is None else "; estimated, the conversion counts"
    target = resolved(out if out is not None else Path(f"{sizes.name}.ooc"))
    check_folder(target.parent)
    check_target(target, force=force)
    machine = known_hardware(target.parent)
    read, write = machine.disk.read_bytes_per_s, machine.disk.write_bytes_per_s
    rates = Rates(read_bytes_per_s=read.at(CHUNK_BYTES), write_bytes_per_s=write.at(CHUNK_BYTES))
    found = forecast(sizes, rates, chosen, ordered=order == "hop")
    if as_json:
        free = {"target": str(target), "disk_free_bytes": shutil.disk_usage(target.parent).free, "memory_bytes": budget}
        counts = {name: getattr(sizes, name) for name in ("name", "num_nodes", "num_edges", "num_features")}
        print(json.dumps(counts | free | asdict(found) | {"seconds": found.seconds}, indent=2))
        return
    rows: list[tuple[str, ...]] = [
        (stage.name, format_size(stage.read_bytes), format_size(stage.written_bytes), format_duration(stage.seconds))
        for stage in found.stages
    ]
    moved = (sum(getattr(stage, name) for stage in found.stages) for name in ("read_bytes", "written_bytes"))
    rows.append(("all", *map(format_size, moved), format_duration(found.seconds)))
    print_table(("stage", "reads", "writes", "time"), rows, console)
    free_bytes = shutil.disk_usage(target.parent).free
    for line in (
        f"{sizes.name}: {sizes.num_nodes:,} nodes, {sizes.num_edges:,} edges, {sizes.num_features} features ({where})",
        f"source: {format_size(sizes.input_bytes)}, {format_size(sizes.raw_bytes)} unpacked; "
        f"store: about {format_size(found.store_bytes)}",
        *describe_demand(target, found.disk_bytes, free_bytes, found.least_memory_bytes, budget),
        "times are estimates" + "; ooc profile measures this disk" * (machine == UNMEASURED),
    ):
        say(console, line)


def print_list(console: Console) -> None:
    """Print the formats with their requirements, and the named datasets with their sizes."""
    rows = [(form, reader.needs) for form, reader in FORMATS.items()]
    print_table(("format", "what SOURCE is"), rows, console)
    named_rows = [
        (dataset.name, *(f"{count:,}" for count in (dataset.nodes, dataset.edges, dataset.features)), _places(dataset))
        for dataset in DATASETS.values()
    ]
    print_table(("name", "nodes", "edges", "features", "where it lies under --root"), named_rows, console)


def _places(dataset: Dataset) -> str:
    """Return the dataset's usual folder, and the file it is downloaded as where that file can be used as it is."""
    first, packed = dataset.places[0], dataset.files[0]
    return f"{first}/ or {packed.path}" if len(dataset.files) == 1 and packed.unpacked is None else f"{first}/"
