# SPDX-License-Identifier: Apache-2.0
"""Names that there are none of are refused with those that there are, and with the one that was probably meant."""

import pytest

from ooc.errors import OptionError
from ooc.storage.store import Task
from ooc.suggestions import check_choice
from ooc.train.metrics import resolve_metric


@pytest.mark.parametrize(
    ("name", "hint"), [("hpo", "; did you mean hop?"), ("Hop", "; did you mean hop?"), ("degree", ""), (7, "")]
)
def test_a_name_that_is_none_is_refused(name: str, hint: str) -> None:
    with pytest.raises(OptionError) as caught:
        check_choice("order", name, ("none", "hop"))
    assert str(caught.value) == f"order {name!r} is not one of none, hop{hint}"


def test_one_that_is_there_is_taken_and_trainers_propose_a_name() -> None:
    check_choice("order", "hop", ("none", "hop"))
    with pytest.raises(OptionError, match=r"metric 'acuracy' is not one of accuracy, .*; did you mean accuracy"):
        resolve_metric("acuracy", Task.CLASSES, 2)
