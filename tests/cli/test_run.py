# SPDX-License-Identifier: Apache-2.0
"""A run folder survives being killed between any two of its writes."""

import json
import math
import os
import re
import resource
import shutil
import signal
import time
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
import torch

from ooc.engine.record import EpochRecord
from ooc.errors import RunError
from ooc.storage.array import TEMPORARY_SUFFIX
from ooc.train.runs.run import EMBEDDING, RunFolder, SeedRuns, holds_run
from ooc.train.runs.state import load_weights


def record(epoch: int, **changes: Any) -> EpochRecord:
    values: dict[str, Any] = {
        "epoch": epoch,
        "loss": 1.0 / (epoch + 3),
        "train_score": 0.5,
        "valid_score": None,
        "test_score": 0.25,
        "time_s": 0.1,
        "eval_s": 0.0,
        "ssd_read_bytes": 10,
        "ssd_write_bytes": 20,
        "host_peak_bytes": 30,
        "device_peak_bytes": 40,
        "io_wait_s": 0.01,
    }
    return EpochRecord(**(values | changes))


def state(epoch: int) -> dict[str, Any]:
    return {
        "epoch": epoch,
        "model": {"weight": torch.full((2, 3), float(epoch))},
        "optimizer": {"state": {0: {"step": torch.tensor(float(epoch))}}, "param_groups": [{"lr": 0.1}]},
        "record": record(epoch).as_dict(),
        "best": {"epoch": 0, "valid_score": None},
        "stale_epochs": 0,
        "seed": 7,
    }


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]


def names(path: Path) -> list[str]:
    return sorted(entry.name for entry in path.iterdir())


def test_nothing_is_written_before_start(tmp_path: Path) -> None:
    RunFolder.create(tmp_path / "run", {"lr": 0.1})
    assert not (tmp_path / "run").exists()


def test_round_trip(tmp_path: Path) -> None:
    with RunFolder.create(tmp_path / "a" / "run", {"lr": 0.1}) as run:
        run.start()
        for epoch in (1, 2):
            run.save(state(epoch))
            run.append(record(epoch))
        run.save_best(state(1))
    assert names(tmp_path / "a" / "run") == [
        "best.pt",
        "checkpoint.pt",
        "config.json",
        "metrics.jsonl",
    ]
    with RunFolder.open(tmp_path / "a" / "run") as run:
        assert run.config == {"lr": 0.1}
        loaded = run.load()
        assert loaded is not None and loaded["epoch"] == 2
        assert torch.equal(loaded["model"]["weight"], torch.full((2, 3), 2.0))
        assert run.records() == [record(1), record(2)]
        best = run.load_best()
        assert best is not None and best["epoch"] == 1


@pytest.mark.parametrize(
    "metrics",
    [
        "",
        record(1).to_line(),
        record(1).to_line() + record(2).to_line()[:25],
        record(1).to_line() + record(2).to_line() + record(3).to_line(),
        record(1).to_line() + record(2).to_line() + record(3).to_line()[:-1],
    ],
    ids=["lost", "line missing", "line torn", "line too many", "line too many, torn"],
)
def test_metrics_are_mended_to_match_the_checkpoint(tmp_path: Path, metrics: str) -> None:
    """Whatever was written last before the kill, the metrics end with the checkpoint's epoch."""
    with RunFolder.create(tmp_path / "run", {}) as run:
        run.save(state(2))
    (tmp_path / "run" / "metrics.jsonl").write_text(metrics)
    with RunFolder.open(tmp_path / "run") as run:
        run.load()
        run.append(record(3))
    expected = [2, 3] if not metrics else [1, 2, 3]
    assert [line["epoch"] for line in lines(tmp_path / "run")] == expected


def test_killed_before_the_first_checkpoint(tmp_path: Path) -> None:
    with RunFolder.create(tmp_path / "run", {"seed": 3}) as run:
        run.append(record(1))
    with RunFolder.open(tmp_path / "run") as run:
        assert run.load() is None
        assert run.records() == []
        assert run.config["seed"] == 3


def test_a_run_that_came_to_nothing_can_be_discarded(tmp_path: Path) -> None:
    (tmp_path / "runs").mkdir()
    run = RunFolder.create(tmp_path / "runs" / "a" / "b", {})
    run.save_best(state(1))
    run.close()
    run.discard()
    assert names(tmp_path / "runs") == []


def test_a_run_that_cannot_be_taken_back_can_be_gone_on_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = RunFolder.create(tmp_path / "a", {})
    run.start()
    (tmp_path / "a" / EMBEDDING).mkdir()
    monkeypatch.setattr(shutil, "rmtree", lambda path, ignore_errors: None)  # as where no file can be opened
    run.discard()
    RunFolder.open(tmp_path / "a")


def test_a_run_with_an_epoch_is_not_discarded(tmp_path: Path) -> None:
    with RunFolder.create(tmp_path / "run", {}) as run:
        run.discard()
        run.save(state(1))
        run.discard()
    with RunFolder.open(tmp_path / "run") as run:
        assert run.load() is not None
        run.discard()
    assert names(tmp_path / "run") == ["checkpoint.pt", "config.json", "metrics.jsonl"]


def test_a_closed_run_can_be_used_again(tmp_path: Path) -> None:
    with RunFolder.create(tmp_path / "run", {}) as run:
        run.append(record(1))
        run.close()
        run.append(record(2))
        assert run.records() == [record(1), record(2)]


def test_leftover_temporary_files_are_no_run(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    for name in ("config.json", "metrics.jsonl"):
        (tmp_path / "run" / f"{name}{TEMPORARY_SUFFIX}").write_text("{")
    with RunFolder.create(tmp_path / "run", {"seed": 3}) as run:
        run.start()
    assert names(tmp_path / "run") == ["config.json", f"metrics.jsonl{TEMPORARY_SUFFIX}"]


def test_an_existing_run_is_not_begun_again(tmp_path: Path) -> None:
    with RunFolder.create(tmp_path / "run", {}) as run:
        run.start()
    with pytest.raises(RunError, match=r"holds a run already.*resume=True"):
        RunFolder.create(tmp_path / "run", {})


def test_other_files_are_not_written_among(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("x")
    with pytest.raises(RunError, match="exists and is no run"):
        RunFolder.create(tmp_path, {})
    with pytest.raises(RunError, match="no run at"):
        RunFolder.open(tmp_path)
    with pytest.raises(RunError, match="exists and is no run"):
        RunFolder.create(tmp_path / "thesis.tex", {})


def test_contradicting_options_are_refused_by_name(tmp_path: Path) -> None:
    with RunFolder.create(tmp_path / "run", {"weight_decay": 0.1, "epochs": 5}) as run:
        run.start()
    with pytest.raises(RunError, match=r"begun with --weight-decay 0\.1, not 0\.2"):
        RunFolder.open(tmp_path / "run", given={"weight_decay": 0.2}, changeable={"epochs"})
    given = {"weight_decay": 0.1, "epochs": 9}
    with RunFolder.open(tmp_path / "run", given=given, changeable={"epochs"}) as run:
        run.start()
    assert json.loads((tmp_path / "run" / "config.json").read_text()) == given


def test_two_processes_cannot_share_a_run(tmp_path: Path) -> None:
    with RunFolder.create(tmp_path / "run", {}) as run:
        run.start()
        with (
            RunFolder.open(tmp_path / "run") as other,
            pytest.raises(RunError, match=rf"another process \({os.getpid()}\) is using .*; give another folder"),
        ):
            other.start()
    with RunFolder.open(tmp_path / "run") as other:
        other.start()


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04 torn", b"\x80\x02garbage"])
def test_a_damaged_checkpoint_is_an_error(tmp_path: Path, content: bytes) -> None:
    with RunFolder.create(tmp_path / "run", {}) as run:
        run.start()
    (tmp_path / "run" / "checkpoint.pt").write_bytes(content)
    with RunFolder.open(tmp_path / "run") as run, pytest.raises(RunError, match=r"checkpoint\.pt is damaged"):
        run.load()


@pytest.mark.parametrize("checksums", [True, False], ids=["usual", "torch told to leave checksums out"])
def test_a_flipped_bit_is_an_error(tmp_path: Path, checksums: bool) -> None:
    """torch reads on over it: a weight would be another one. Wherever it is, the state is refused or the same."""
    torch.serialization.set_crc32_options(checksums)
    try:
        with RunFolder.create(tmp_path / "run", {}) as run:
            run.save_best(state(1))
    finally:
        torch.serialization.set_crc32_options(True)
    path = tmp_path / "run" / "best.pt"
    sound = path.read_bytes()
    weights = sound.index(state(1)["model"]["weight"].numpy().tobytes())
    refused = 0
    for place in [*range(0, len(sound), 29), *range(weights, weights + 24)]:
        damaged = bytearray(sound)
        damaged[place] ^= 1 << place % 8
        path.write_bytes(damaged)
        try:
            loaded = RunFolder.open(tmp_path / "run").load_best()
        except RunError as error:
            assert re.search(r"best\.pt is damaged|is no checkpoint", str(error))
            refused += 1
        else:
            assert not weights <= place < weights + 24
            assert loaded is not None and torch.equal(loaded["model"]["weight"], state(1)["model"]["weight"])
    assert refused > 24
    path.write_bytes(sound)
    assert RunFolder.open(tmp_path / "run").load_best() is not None


def test_a_damaged_line_among_the_metrics_is_an_error(tmp_path: Path) -> None:
    """Lines after it would be dropped. What is damaged need not be the syntax."""
    with RunFolder.create(tmp_path / "run", {}) as run:
        run.save(state(3))
    path = tmp_path / "run" / "metrics.jsonl"
    whole = record(2).to_line(), "[2]\n"
    for damage in (('"loss":', '"lozs":'), ("{", ""), ('"epoch": 2', '"epoch": "2"'), ("0.5", '"a"'), whole):
        lines = [record(epoch).to_line() for epoch in (1, 2, 3)]
        lines[1] = lines[1].replace(*damage)
        path.write_text("".join(lines))
        with RunFolder.open(tmp_path / "run") as run, pytest.raises(RunError, match=r"metrics\.jsonl, line 2 is dama"):
            run.load()
        assert path.read_text() == "".join(lines)
    path.write_text(lines[0] + lines[2])
    with RunFolder.open(tmp_path / "run") as run:
        run.load()
        assert [done.epoch for done in run.records()] == [1, 3]


@pytest.mark.parametrize("changes", [{"record": None}, {"record": {"epoch": 1}}, {"epoch": "x"}])
def test_a_state_that_is_of_no_training_is_an_error(tmp_path: Path, changes: dict[str, Any]) -> None:
    with RunFolder.create(tmp_path / "run", {}) as run:
        run.save({**state(1), **changes})
        run.append(record(1))
        with pytest.raises(RunError, match="no checkpoint of a training"):
            run.load()


def test_a_pickled_program_is_not_run(tmp_path: Path) -> None:
    class Harmful:
        def __reduce__(self) -> tuple[Any, ...]:
            return (os.mkdir, (str(tmp_path / "harm"),))

    with RunFolder.create(tmp_path / "run", {}) as run:
        run.start()
    torch.save({"epoch": 1, "model": Harmful()}, tmp_path / "run" / "checkpoint.pt")
    with RunFolder.open(tmp_path / "run") as run, pytest.raises(RunError, match="damaged"):
        run.load()
    assert not (tmp_path / "harm").exists()


@pytest.mark.parametrize(
    ("name", "content"), [("config.json", '{"lr": '), ("config.json", '["lr"]'), ("starts.jsonl", '{"device": ')]
)
def test_a_damaged_configuration_is_an_error(tmp_path: Path, name: str, content: str) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / name).write_text(content)
    with pytest.raises(RunError, match=rf"{name} is damaged"):
        RunFolder.open(tmp_path).starts()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "there are no runs of several seeds at"),
        ('{"seeds": 3, "config": {}}', r"seeds\.json is damaged"),
        ('{"seeds": ["a"], "config": {}}', r"seeds\.json is damaged"),
        ('{"seeds": [1], "config": 3}', r"seeds\.json is damaged"),
        ('{"seeds": [1, 2], "config": {}}', "was begun with seed 2, too; seeds may be added, not left out"),
    ],
)
def test_runs_of_several_seeds_are_there_and_sound(tmp_path: Path, content: str | None, message: str) -> None:
    if content is not None:
        (tmp_path / "seeds.json").write_text(content)
    with pytest.raises(RunError, match=message):
        SeedRuns.open(tmp_path, [1])
    SeedRuns(tmp_path, [1], {}).discard()  # what it has not begun
    assert (tmp_path / "seeds.json").exists() == (content is not None)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ([1], "is no checkpoint"),
        ({"epoch": 1}, "no checkpoint"),
        ({"epoch": 1, "model": {"w": 1}}, "no checkpoint of a training"),
    ],
)
def test_what_else_torch_may_have_saved_is_refused(tmp_path: Path, content: Any, message: str) -> None:
    with RunFolder.create(tmp_path / "run", {}) as run:
        run.start()
    torch.save(content, tmp_path / "run" / "checkpoint.pt")
    with pytest.raises(RunError, match=message):
        RunFolder.open(tmp_path / "run").load()
    with pytest.raises(RunError, match=r"is no checkpoint|holds no weights"):
        load_weights(RunFolder.open(tmp_path / "run"), "last")


def test_a_failing_write_leaves_the_previous_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with RunFolder.create(tmp_path / "run", {}) as run:
        run.save(state(1))

        def full(descriptor: int) -> None:
            raise OSError(28, "No space left on device")

        with monkeypatch.context() as patch:
            patch.setattr(os, "fsync", full)
            with pytest.raises(RunError, match=r"checkpoint\.pt: No space left"):
                run.save(state(2))
        assert not list((tmp_path / "run").glob(f"*{TEMPORARY_SUFFIX}"))
        loaded = run.load()
        assert loaded is not None and loaded["epoch"] == 1


def test_a_checkpoint_takes_no_memory_of_its_own(tmp_path: Path) -> None:
    """Nor one that a full disk cuts short, which is named."""
    large = {**state(1), "model": {"weight": torch.zeros(500_000)}}
    with RunFolder.create(tmp_path / "a", {"seed": 7}) as run:
        tracemalloc.start()
        try:
            run.save(large)
            assert tracemalloc.get_traced_memory()[1] < 500_000
        finally:
            tracemalloc.stop()
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, limits[1]))
        try:
            with pytest.raises(RunError, match=r"checkpoint\.pt: File too large"):
                run.save(large)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        assert run.last() is not None and not list((tmp_path / "a").glob(f"*{TEMPORARY_SUFFIX}"))


def test_an_unwritable_place_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with (
        RunFolder.create(tmp_path / "file" / "run", {}) as run,
        pytest.raises(RunError, match="Not a directory"),
    ):
        run.start()


def test_kill_at_any_moment(tmp_path: Path) -> None:
    """A process that saves without pause is killed; what it leaves can be gone on with."""

    def save(ready: int) -> None:
        path = tmp_path / "run"
        run = RunFolder.open(path) if holds_run(path) else RunFolder.create(path, {})
        loaded = run.load()
        epoch = 0 if loaded is None else loaded["epoch"]
        os.write(ready, b"!")
        while True:
            epoch += 1
            run.append(record(epoch)) if epoch % 2 else run.save(state(epoch))
            run.save(state(epoch)) if epoch % 2 else run.append(record(epoch))

    for delay_s in (0.0, 0.031):
        ready, told = os.pipe()
        if (process := os.fork()) == 0:
            try:
                save(told)
            finally:
                os._exit(1)
        assert os.read(ready, 1) == b"!"
        time.sleep(delay_s)
        os.kill(process, signal.SIGKILL)
        assert os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) == -signal.SIGKILL
        os.close(ready)
        os.close(told)
        with RunFolder.open(tmp_path / "run") as run:
            loaded = run.load()
            epochs = [] if loaded is None else list(range(1, loaded["epoch"] + 1))
            assert [done.epoch for done in run.records()] == epochs


def test_a_loss_that_is_no_number_stays_json() -> None:
    line = record(1, loss=math.inf).to_line()
    assert json.loads(line)["loss"] is None
    assert math.isnan(EpochRecord.from_line(line).loss)
    with pytest.raises(ValueError, match="fields"):
        EpochRecord.from_line('{"epoch": 1}')
