# SPDX-License-Identifier: Apache-2.0
"""``ooc predict``: apply a run's weights to a store, exactly and within a memory budget."""

import re
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ooc.cli import print_json, restore_garbage_collection
from ooc.cli.arguments.configuration import config_option
from ooc.cli.arguments.options import COUNT_OR_ZERO, FORCE, JSON, SIZE, WEIGHTS, ChoiceType, WholeType, with_verbosity
from ooc.cli.arguments.settings import MODEL, TrainSettings, edge_type, settle_memory, with_one_memory
from ooc.errors import OptionError
from ooc.progress.figures import format_count
from ooc.progress.reporter import Reporter, Verbosity
from ooc.sizes import format_size
from ooc.suggestions import did_you_mean_path

if TYPE_CHECKING:
    import numpy.typing as npt

    from ooc.train.prediction import Predictions


@click.command(
    short_help="Predict with a run's weights.", params=[config_option()], context_settings={"show_default": True}
)
@click.argument("run", type=click.Path(path_type=Path))
@click.argument("store", required=False, type=click.Path(path_type=Path))
@click.option(
    "--what", type=ChoiceType("logits", "labels", "embeddings", "scores"), default="labels", help="What to predict."
)
@click.option(
    "--layer",
    type=COUNT_OR_ZERO,
    help="For embeddings: which hidden layer's; 0: the embedding of the nodes that was trained. [default: the last]",
)
@click.option("--type", "node_type", metavar="NAME", help="For embeddings of a graph with types: of which nodes.")
@click.option(
    "--nodes",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Only these, by the source's ids, or these graphs: .npy, or text with one a line. [default: all]",
)
@click.option(
    "--pairs",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="For scores, of a model of links: pairs of nodes [2, E], heads above tails, by the source's ids, in .npy.",
)
@click.option(
    "--out", type=click.Path(path_type=Path), help="A file in .npy, .zarr, .parquet or .csv. [default: RUN/WHAT.csv]"
)
@click.option("--model", type=MODEL, metavar="FILE.py:NAME", help="The run's model, where it is one of your own.")
@WEIGHTS
@click.option("--memory", type=SIZE, help="RAM to work in. [default: the run's]")
@click.option("--gpu-budget", type=SIZE, help="As in ooc train, of which --memory is the sum. [default: the run's]")
@click.option("--host-budget", type=SIZE, help="As in ooc train, of which --memory is the sum. [default: the run's]")
@click.option("--threads", type=WholeType(min=1, max=1024), help="Compute threads. [default: torch's choice]")
@click.option("--spill-dir", type=click.Path(path_type=Path), help="Where scratch files go. [default: OUT's folder]")
@FORCE
@click.option("--dry-run", is_flag=True, help="Only say what would be written and what it would take.")
@with_verbosity
@JSON
def command(
    run: Path,
    store: Path | None,
    what: str,
    layer: int | None,
    node_type: str | None,
    nodes: Path | None,
    pairs: Path | None,
    out: Path | None,
    model: str | None,
    weights: str,
    threads: int | None,
    spill_dir: Path | None,
    force: bool,
    dry_run: bool,
    verbosity: Verbosity,
    as_json: bool,
    **sizes: int | None,
) -> None:
    """Predict for the nodes, or many graphs, of STORE (that of the run, when left out) with the model trained in RUN.

    Rows of OUT are in the order of the nodes before conversion, or as listed in --nodes; .csv and .parquet have
    the id that the source gave the node as first column, and its names of the classes. With --nodes only rows that
    these depend on are computed, as far as the store's order lets them be told apart. OUT is written whole or not at
    all.
    """
    from ooc.cli.arguments.recipe import build_embedding, graph_bounds, rebuild_model
    from ooc.models import Pooled
    from ooc.storage.store import open_store
    from ooc.train.batched.graphs import GraphPrediction
    from ooc.train.links.trainer import PairScores
    from ooc.train.prediction import Prediction
    from ooc.train.resources import Resources
    from ooc.train.rows_file import check_target
    from ooc.train.runs.run import RunFolder
    from ooc.train.runs.state import learnt_rows, load_weights

    if (pairs is not None) != (what == "scores"):
        raise OptionError("--what scores and --pairs FILE go together")
    folder = RunFolder.open(run)
    out = out if out is not None else folder.path / f"{what}.csv"
    check_target(out, force=force)
    settle_memory(click.get_current_context(), sizes)
    given_now = with_one_memory({name: size for name, size in sizes.items() if size is not None})
    settings = TrainSettings.from_config({**folder.config, **given_now}, folder.path)
    budgets = settings.gpu_budget, settings.host_budget
    opened = open_store(store if store is not None else settings.store)
    rebuilt = rebuild_model(settings, load_weights(folder, weights), folder, own=model)
    if isinstance(rebuilt, Pooled) and not opened.num_graphs:
        raise OptionError(f"{run} was trained on many graphs, {opened.path} is one")
    embedding, learnt = build_embedding(settings), None
    if store is None or embedding is not None:
        folder.check_store(opened)  # a store not named must be the run's, and always with an embedding
    if embedding is not None:
        learnt = learnt_rows(folder, weights, embedding, opened)
    with Reporter(verbosity=verbosity) as reporter:
        spill_dir = spill_dir or out.absolute().parent
        means: dict[str, Any] = {"spill_dir": spill_dir, "threads": threads, "listener": reporter}
        resources = Resources.parse(*budgets, memory=settings.memory, **means).within_memory()
        wanted = None if nodes is None else read_nodes(nodes, texts=opened.id_type.kind == "S")
        given: dict[str, Any] = {"ignore_edge_data": settings.edge_data_left_out}
        made: Predictions
        if what == "scores":
            given |= {"learnt": learnt, "edge_type": edge_type(settings)}
            assert pairs is not None
            made = PairScores(rebuilt, opened, resources, _read_array(pairs), **given)
        elif not opened.num_graphs:
            given |= {"layer": layer, "node_type": node_type, "learnt": learnt}
            made = Prediction(rebuilt, opened, resources, what, nodes=wanted, **given)
        elif layer is not None or node_type is not None:
            raise OptionError("--layer and --type are of embeddings of nodes, not of graphs")
        else:
            made = GraphPrediction(rebuilt, opened, resources, graph_bounds(settings), what, graphs=wanted, **given)
        with closing(made) as prediction:
            if not dry_run:
                restore_garbage_collection()
                prediction.write(out, force=force)
    rows, *columns = prediction.shape
    on_device, on_host, scratch = prediction.taken
    if as_json:
        facts = {"out": str(out), "what": what, "shape": [rows, *columns], "dtype": str(prediction.dtype)}
        taken = {"device_peak_bytes": on_device, "host_peak_bytes": on_host, "scratch_bytes": scratch}
        print_json({**facts, **taken, "written": not dry_run})
        return
    if dry_run or verbosity > Verbosity.ERROR:
        count = format_count(rows, f"{prediction.called}s")
        click.echo(f"{out}: {what} of {count}" + "".join(f", {n} columns" for n in columns))
    if dry_run:
        memory = format_size(on_device + on_host)
        click.echo(f"not written: it would take {memory} of memory and {format_size(scratch)} of scratch")


def _read_array(path: Path) -> "npt.NDArray[Any]":
    """Return the array in the ``.npy`` file at ``path``; raise OptionError where the file holds none."""
    import numpy as np

    try:
        return np.asarray(np.load(path, allow_pickle=False))
    except (OSError, ValueError, EOFError) as error:
        why = "it is no whole .npy file of numbers or text" if not isinstance(error, OSError) else str(error)
        raise OptionError(f"{path} cannot be read: {why}{did_you_mean_path(path)}") from error


def read_nodes(path: Path, *, texts: bool = False) -> "npt.NDArray[Any]":
    """Return the node ids in an ``.npy`` file, or in a text file with one id a line. Ids are whole numbers, or texts
    where ``texts``; raise OptionError for anything else."""
    import numpy as np

    if path.suffix == ".npy":
        ids = _read_array(path)
        if ids.ndim != 1 or ids.dtype.kind not in ("U" if texts else "iu"):
            raise OptionError(f"{path} holds {ids.dtype}{list(ids.shape)}, not a list of node ids")
        return ids
    try:
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except (OSError, ValueError) as error:
        reason = f"{getattr(error, 'strerror', None) or error}{did_you_mean_path(path)}"
        raise OptionError(f"{path}: {reason}; nodes are given in a file, one id a line") from error
    there = {number: line for number, line in enumerate(lines, start=1) if line.strip()}
    if texts:
        return np.array([*there.values()], dtype=np.object_)
    for number, line in there.items():
        if not re.fullmatch(r"-?[0-9]{1,19}", line.strip()) or not -(2**63) <= int(line) < 2**63:
            raise OptionError(f"{path}, line {number}: {line.strip()!r:.60} is no node id")
    return np.array([int(line) for line in there.values()], dtype=np.int64)
