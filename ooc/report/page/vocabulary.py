# SPDX-License-Identifier: Apache-2.0
"""What matrices and passes are to a graph neural network: the plan's short names in the field's words."""

import re

_MATRICES = (
    (r"x", "input features"),
    (r"x/(\w+)", "{} of the input features that are not zero"),
    (r"y", "labels"),
    (r"split/(\w+)", r"mask of the {} nodes"),
    (r"ax(\d*)(\..*)?", "input features, aggregated over in-neighbours once and kept"),
    (r"mx(\d+)(\..*)?", "input features, scaled for the first aggregation"),
    (r"m(\d+)\w*", "messages of layer {}, before they are aggregated"),
    (r"p(\d+)\w*", "aggregated messages of layer {}"),
    (r"dp(\d+)\w*", "gradient of the aggregated messages of layer {}"),
    (r"dm(\d+)\w*", "gradient of the messages of layer {}"),
    (r"dt(\d+)\w*", "gradient of what targets bring to layer {}"),
    (r"pt(\d+)\w*", "what targets pull in layer {}"),
    (r"q(\d+)\w*", "scaled aggregate of layer {}, for its weight's gradient"),
    (r"z(\d+)\w*", "pre-activations of layer {}"),
    (r"s(\d+)\w*", "signs of the activations of layer {}, a bit each"),
    (r"dh(\d+)\w*", "gradient of the activations of layer {}"),
    (r"h(\d+)\w*", "activations of layer {}"),
    (r"emb", "embedding of every node, which is trained"),
    (r"emb\.(\w+)", "what the embedding's optimizer keeps: {}"),
    (r"nodes/(.+)/x", "input features of nodes {}"),
    (r"nodes/(.+)/emb", "embedding of nodes {}, which is trained"),
    (r"demb.*", "gradient of the embedding"),
    (r"in-edges", "in-neighbours of every node (topology)"),
    (r"out-edges", "out-neighbours of every node (topology)"),
    (r"(in|out)-(\w+)", "what edges carry, by {} ends"),
)
_PASSES = (
    (r"messages (\d+)", "messages of layer {}"),
    (r"forward (\d+)\w*$", "layer {} forward"),
    (r"forward (\d+)\w* for backward (\d+)", "layer {} forward again, for a backward pass"),
    (r"backward (\d+)\w*", "layer {} backward"),
    (r"pull dm(\d+)\w*", "aggregate over out-neighbours, layer {} backward"),
    (r"pull m(\d+)\w*", "aggregate over in-neighbours, layer {}"),
    (r"pull dp(\d+)\w*", "aggregate over out-neighbours, layer {} backward"),
    (r"step", "the embedding's optimizer step"),
    (r"loss", "last layer, loss and their gradient"),
)


def describe_matrix(name: str) -> str:
    """``"z2"`` → ``"pre-activations of layer 2"``; one of unknown name is itself."""
    described = _described(name.partition(".")[0], _MATRICES)
    return (
        f"{described}, computed again"
        if "." in name and described and not name.startswith(("ax", "mx"))
        else (described or name)
    )


def describe_pass(title: str) -> str:
    """``"pull m3, slab by slab"`` → ``"aggregate over in-neighbours, layer 3"``; one of unknown title is itself."""
    return _described(title, _PASSES, whole=False) or title


def _described(name: str, known: tuple[tuple[str, str], ...], *, whole: bool = True) -> str:
    for pattern, text in known:
        found = re.fullmatch(pattern, name) if whole else re.match(pattern, name)
        if found is not None:
            return text.format(*found.groups())
    return ""
