# SPDX-License-Identifier: Apache-2.0
"""``ooc export``: write a run's weights to a file that plain PyG loads."""

import json
from pathlib import Path

import click

from ooc.cli import print_json
from ooc.cli.arguments.options import FORCE, JSON, WEIGHTS, with_verbosity
from ooc.cli.arguments.settings import MODEL, model_name
from ooc.progress.reporter import Verbosity
from ooc.sizes import format_size


@click.command(short_help="Export a run's weights.", context_settings={"show_default": True})
@click.argument("run", type=click.Path(path_type=Path))
@click.argument("out", type=click.Path(path_type=Path))
@click.option("--model", type=MODEL, metavar="FILE.py:NAME", help="The run's model, where it is one of your own.")
@WEIGHTS
@FORCE
@with_verbosity
@JSON
def command(
    run: Path, out: Path, model: str | None, weights: str, force: bool, verbosity: Verbosity, as_json: bool
) -> None:
    """Write the weights of RUN to OUT, a .safetensors file or a .pt file for torch.load.

    They are the state_dict of the PyG model that the run's options describe, under PyG's own names.
    """
    from ooc.cli.arguments.recipe import build_embedding, rebuild_model
    from ooc.cli.arguments.settings import TrainSettings
    from ooc.storage.types import Types
    from ooc.train.runs.run import RunFolder
    from ooc.train.runs.state import export_weights, load_weights

    folder = RunFolder.open(run)
    settings = TrainSettings.from_config(folder.config, run)
    state = load_weights(folder, weights)
    rebuild_model(settings, state, folder, own=model)  # for its check that the weights fit the model
    described = {name: getattr(settings, name) for name in ("model", "layers", "hidden", "dropout", "norm", "jk")}
    export_weights(state, out, metadata={"format": "pt", "ooc": json.dumps(described)}, force=force)
    nbytes = sum(tensor.nbytes for tensor in state.values())
    if as_json:
        facts = {"out": str(out), "tensors": len(state), "bytes": nbytes, "model": settings.model}
        print_json(facts)
    elif verbosity > Verbosity.ERROR:
        if (embedding := build_embedding(settings)) is not None:
            for kind in embedding.widths(Types.of(folder.config["store_facts"])):
                of_type, out_file = (f"--type {kind} ", f"{kind}.npy") if kind else ("", "embedding.npy")
                rows = f"ooc predict {run} --what embeddings --layer 0 {of_type}--weights {weights} --out {out_file}"
                whose = f"nodes {kind!r}" if kind else "the nodes"
                click.echo(f"the embedding of {whose} is not among them; {rows} writes it", err=True)
        click.echo(f"{out}: {len(state)} tensors, {format_size(nbytes)}, of {model_name(settings.model)}")
