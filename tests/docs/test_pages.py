# SPDX-License-Identifier: Apache-2.0
"""What README.md and docs/ show can be run as it stands, and what they name is there."""

import re
import runpy
import shlex
from pathlib import Path

import click
import pytest

from ooc import cli

CHECKOUT = Path(__file__).parents[2]
README = (CHECKOUT / "README.md").read_text()
PAGES = {
    str(path.relative_to(CHECKOUT)): path.read_text()
    for path in (CHECKOUT / "README.md", CHECKOUT / "CHANGELOG.md", *sorted((CHECKOUT / "docs").glob("*.md")))
}
OPTIONS = PAGES["docs/commands.md"]


def _commands(page: str) -> list[list[str]]:
    """The command lines of a page, as words. Two spaces end one: remarks follow."""
    lines = re.findall(r"^    (ooc (?:\w+)(?: \S+)*)", re.sub(r"\\\n +", "", page), re.MULTILINE)
    return [shlex.split(line.partition(" > ")[0]) for line in lines if "SOURCE" not in line and "STORE" not in line]


COMMANDS = _commands(README)
DOCS_COMMANDS = [words for name, page in PAGES.items() if name.startswith("docs/") for words in _commands(page)]


@pytest.mark.parametrize("words", COMMANDS + DOCS_COMMANDS, ids=" ".join)
def test_commands_are_understood(words: list[str]) -> None:
    command = cli.cli.get_command(cli.cli.make_context("ooc", ["--help"], resilient_parsing=True), words[1])
    assert command is not None
    if "--list" in words:  # acts while it is parsed
        assert "--list" in {name for parameter in command.params for name in parameter.opts}
        return
    if "--config" in words:  # whose file is read while it is parsed
        place = words.index("--config")
        words = words[:place] + words[place + 2 :]
    command.make_context(words[1], words[2:])


def test_the_commands_of_the_readme_run_one_after_the_other(here: Path) -> None:
    """As they stand there, but on a graph a thousandth of the size and for two epochs."""
    for words in COMMANDS:
        smaller = [word.replace("000000", "000") for word in words[1:]]
        if "--epochs" in smaller:
            smaller[smaller.index("--epochs") + 1] = "2"
        assert cli.main(smaller) == 0, words
    assert len(COMMANDS) >= 3 and (here / "labels.npy").exists()


def test_the_readme_is_read_to_the_end() -> None:
    assert README.count("\n") <= 150


def test_every_option_of_training_is_in_its_table() -> None:
    from ooc.cli.train import command

    listed = {
        name for row in re.findall(r"^\| (`--.*?) \|", OPTIONS, re.MULTILINE) for name in re.findall(r"--[\w-]+", row)
    }
    assert listed == {option for parameter in command.params for option in parameter.opts if option.startswith("--")}


def test_the_table_of_training_shows_the_choices_and_defaults_there_are() -> None:
    """``--option a\\|b`` are all of its choices, and a default in backquotes is the option's."""
    from ooc.cli.train import command

    options = {name: parameter for parameter in command.params for name in parameter.opts}
    rows = re.findall(r"^\| (`--.*?) \| (.*?) \|", OPTIONS, re.MULTILINE)
    shown = re.findall(r"`(--[\w-]+) (\S+?\\\|\S+?)`", "\n".join(names for names, _ in rows))
    assert len(shown) > 8
    for name, choices in shown:
        kind = options[name].type
        assert isinstance(kind, click.Choice), name
        assert choices.split("\\|") == list(kind.choices), name
    for names, defaults in rows:
        for name, default in zip(re.findall(r"--[\w-]+", names), defaults.split(", "), strict=False):
            if re.fullmatch(r"`\w+`|[\d.]+", default):
                assert str(options[name].default).removesuffix(".0") == default.strip("`"), name


def test_every_command_is_listed() -> None:
    assert set(re.findall(r"`ooc (\w+) ", README)) >= set(cli.COMMANDS)


def test_the_metrics_named_are_those_there_are() -> None:
    from ooc.train.metrics import Metric

    [row] = re.findall(r"^\| `--metric`.*\| (.*) \|$", OPTIONS, re.MULTILINE)
    assert re.findall(r"`([\w-]+)`", row) == [metric.value for metric in Metric]


def test_convolutions_with_a_formula_are_exact_on_the_page_of_layers() -> None:
    from ooc.model.layers.convolutions import _LOWERINGS

    exact = set(re.findall(r"^\| `(\w+)` \| (?:formula|general path)[^|]*\|", PAGES["docs/layers.md"], re.MULTILINE))
    assert exact >= {kind.__name__ for kind in _LOWERINGS}


@pytest.mark.parametrize("name", PAGES)
def test_files_it_names_exist(name: str) -> None:
    page, folder = PAGES[name], (CHECKOUT / name).parent
    modules = re.findall(r"`((?:ooc|tools|tests)/[\w/.]+)[` ]", page)
    links = [link.partition("#")[0] for link in re.findall(r"\]\(([^)]+)\)", page) if "://" not in link]
    assert [module for module in modules if not (CHECKOUT / module).exists()] == []
    assert [link for link in links if link and not (folder / link).exists()] == []
    if name == "README.md":
        assert len(modules) > 10 and len(links) > 5


@pytest.mark.parametrize("name", PAGES)
def test_links_to_headings_lead_to_one(name: str) -> None:
    folder = (CHECKOUT / name).parent
    for path, heading in re.findall(r"\]\(([\w./-]*)#([\w-]+)\)", PAGES[name]):
        page = (folder / path).read_text() if path else PAGES[name]
        titles = [re.sub(r"[^\w -]", "", title.lower()) for title in re.findall(r"^#+ (.*)$", page, re.MULTILINE)]
        assert heading in [title.replace(" ", "-") for title in titles], f"{path}#{heading}"


@pytest.mark.parametrize("name", PAGES)
def test_no_heading_stands_twice(name: str) -> None:
    titles = re.findall(
        r"^#+ .*$", re.sub(r"^```.*?^```", "", PAGES[name], flags=re.MULTILINE | re.DOTALL), re.MULTILINE
    )
    assert sorted(titles) == sorted(set(titles))


def test_every_page_is_on_the_site() -> None:
    """What else its strict build refuses, such as links to nowhere, tools/test finds."""
    listed = re.findall(r"^ +- (?:\w+: )?([\w-]+\.md)$", (CHECKOUT / "mkdocs.yml").read_text(), re.MULTILINE)
    made = ["index.md", "changelog.md", "examples.md", "reference.md"]
    assert sorted(listed) == sorted([*made, *(Path(name).name for name in PAGES if name.startswith("docs/"))])


@pytest.mark.parametrize("name", PAGES)
def test_lines_are_no_longer_than_code(name: str) -> None:
    """But for tables, whose rows cannot be wrapped."""
    lines = PAGES[name].splitlines()
    assert [line for line in lines if len(line) > 120 and not line.startswith("|")] == []


@pytest.mark.parametrize("model", ["gcn", "residual"])
def test_the_accuracies_come_from_the_recipes_shown(model: str) -> None:
    recipe = runpy.run_path(str(CHECKOUT / "tools/bench_accuracy"))["RECIPES"][model]
    assert shlex.split(recipe) in [command[3:] for command in DOCS_COMMANDS if command[:2] == ["ooc", "train"]]


def test_the_python_example_runs(here: Path, capfd: pytest.CaptureFixture[str]) -> None:
    [program] = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    exec(compile(program, "README.md", "exec"), {})
    out, err = capfd.readouterr()
    assert out.count("\n") == 1 and "valid_score" in out and err.count("\nepoch ") == 4
    assert (here / "model.pt").exists()


def test_the_example_of_replacement_is_what_comes_out() -> None:
    """docs/memory.md: which blocks are kept, what is read and written, and what LRU would do instead."""
    from ooc.plan.program.replacement import Uses, belady
    from ooc.plan.program.sequence import Span, Use, spans_of
    from tests.plan.policies import Policy, count_hits

    page = PAGES["docs/memory.md"]
    uses: list[Span] = []
    given_up: list[tuple[int, str]] = []
    for step, what, lost in re.findall(r"^\| (\d+) \| (.*?) \| .*? \| (.*?) ?\|$", page, re.MULTILINE):
        for use, name, number in re.findall(r"(read|write) ([xz])(\d)", what):
            block = int(number) + (3 if name == "z" else 0)
            uses.append(Span(int(step), int(step), block, Use.READ if use == "read" else Use.WRITE))
        given_up += [(int(step), block) for block in re.findall(r"[xz]\d", lost)]
    epoch = Uses(spans_of(uses), 6, [3] * 6, lambda block: block < 3, cyclic=True)
    kept = belady(epoch)
    assert kept.carried == {0}
    # What is computed anew in every epoch is not wanted after its last use.
    lost = [(s.last, f"x{s.block}") for s, stays in zip(uses, kept.after, strict=True) if not stays and s.block < 3]
    assert lost == given_up
    best, recent = count_hits(epoch, Policy.BELADY), count_hits(epoch, Policy.LRU)
    assert (best.reads, best.reads - best.hits, best.writes) == (6, 2, 0)
    assert (recent.reads, recent.reads - recent.hits, recent.writes) == (6, 4, 1)
