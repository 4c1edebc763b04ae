"""Runs side by side: ``list``, ``compare`` and ``prune``."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

import cli
from pipeworker.job.option_parsing import make_options
from pipeworker.record import run_record
from pipeworker.record.checkpoint.folder import held, remove_unless_held
from pipeworker.record.lock import RunLock
from pipeworker.record.rundir import RunDir
from pipeworker.runs.info import Run
from support.in_process.checkpoints import complete


def begin(folder: Path, name: str, losses: list[float], **options: Any) -> RunDir:
    """Make a run with these losses, and an evaluation after every second step."""
    made = RunDir(folder / "runs" / name)
    made.path.mkdir(parents=True)
    job_file = folder / "net.py"
    job_file.write_text("")
    chosen = make_options(str(job_file), 2, {"threads": 1, **options})
    day = len([*made.path.parent.iterdir()])
    process = {
        "started": f"2026-05-0{day}T12:00:00+00:00",
        "versions": {"torch": f"2.1{day}", "python": "3.12"},
        "host": "here",
    }
    run_record.write(made, json.loads(chosen.to_json()), process)
    rows = [{"step": step, "loss": loss} for step, loss in enumerate(losses, 1)]
    made.metrics.write_text("".join(json.dumps(row) + "\n" for row in rows))
    evaluations = [{**row, "accuracy": 1 - row["loss"]} for row in rows if row["step"] % 2 == 0]
    made.evaluation.write_text("".join(json.dumps(row) + "\n" for row in evaluations))
    return made


def run(*words: str) -> str:
    done = CliRunner().invoke(cli.main, words)
    assert done.exit_code == 0, done.output
    return done.output


def refused(*words: str) -> str:
    done = CliRunner().invoke(cli.main, words)
    assert done.exit_code == 2
    return done.output.removeprefix("error: ").rstrip()


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make three runs; return the folder that has ``runs``."""
    monkeypatch.chdir(tmp_path)
    begin(tmp_path, "a", [0.9, 0.8, 0.7, 0.6], seed=1, arguments=("--rate", "0.1"))
    begin(tmp_path, "b", [0.9, 0.8, 0.5, 0.25], seed=2, arguments=("--rate", "0.3"))
    made = begin(tmp_path, "c", [0.9], seed=2, precision="bf16", arguments=("--rate", "0.1"))
    made.evaluation.unlink()
    (made.path / "big").write_bytes(bytes(5 << 20))
    return tmp_path


def cells(*words: str) -> list[list[str]]:
    return [line.split() for line in run("list", *words).splitlines()]


def test_a_list_shows_what_differs(folder: Path) -> None:
    head, *lines = run("list").splitlines()
    assert head.split() == [
        *("run", "status", "steps", "loss", "evaluation", "stages"),
        *("precision", "seed", "arguments", "time", "disk", "started"),
    ]
    a, b, c = lines
    for line, seed, precision, rate in (
        (a, 1, "fp32", 0.1),
        (b, 2, "fp32", 0.3),
        (c, 2, "bf16", 0.1),
    ):
        assert f"{precision} {seed} --rate {rate}" in " ".join(line.split())
    assert a.split()[3:6] == ["0.6000", "loss", "0.6000"]
    assert c.split()[-3:-2] == ["5.0M"]
    # Nothing differs in a single run.
    assert "seed" not in run("list", "runs/a").splitlines()[0]
    found = [json.loads(line) for line in run("list", "--json").splitlines()]
    assert found[2]["disk_bytes"] > 5 << 20 > found[0]["disk_bytes"] > 0


@pytest.mark.parametrize(
    ("status", "options", "stopped_early", "shown"),
    [
        ("done", {}, None, "2/2"),
        ("done", {"epochs": 2}, None, "2/2"),
        ("done", {"steps": 5}, None, "2/5"),
        ("done", {"epochs": 2}, "after 2 evaluations", "2"),
        ("done", {"own_loop": True}, None, "2"),
        ("interrupted", {"epochs": 2}, None, "2"),
    ],
)
def test_the_passes_of_a_run_that_is_done_are_all_of_its_steps(
    tmp_path: Path, status: str, options: dict[str, Any], stopped_early: str | None, shown: str
) -> None:
    made = begin(tmp_path, "a", [0.9, 0.8], **options)
    ending = {"status": status, "steps": 2, "seconds": 1.0, "stopped_early": stopped_early}
    facts = {"restarts": 0, "causes": [], "peak_memory_bytes": [], "bubble": 0.0, "error": None}
    made.summary.write_text(json.dumps(ending | facts))
    assert run("list", str(made.path), "--columns", "steps").split() == ["steps", shown]


def test_a_list_is_sorted_and_has_the_columns_that_are_asked_for(folder: Path) -> None:
    words = ("--columns", "run,evaluation.accuracy,clip-grad-norm")
    assert cells(*words, "--sort", "-loss") == [
        ["run", "evaluation.accuracy", "clip-grad-norm"],
        ["c"],
        ["a", "0.4000"],
        ["b", "0.7500"],
    ]
    for sort, order in (("evaluation", "cba"), ("-disk", "cab"), ("precision", "cab")):
        assert sorted(order) == ["a", "b", "c"]
        names = [row[0] for row in cells("--columns", "run", "--sort", sort)[1:]]
        if sort == "-disk":
            assert names[0] == "c"
        else:
            assert "".join(names) == order
    listed = run("list", "--json", "--sort", "-started").splitlines()
    assert [json.loads(line)["run"] for line in listed] == ["runs/c", "runs/b", "runs/a"]
    assert refused("list", "--sort", "los") == "--sort los: no such column; did you mean loss?"
    unknown = refused("list", "--columns", "x!")
    assert unknown.startswith("--columns x!: no such column; use run, ")
    assert unknown.endswith(", evaluation.NAME or an option")
    assert refused("list", "--json", "--columns", "run").startswith("--columns: the objects of")


def test_two_runs_are_compared(folder: Path) -> None:
    text = run("compare", "runs/a", "runs/b")
    shown = [line.split() for line in text.splitlines()]
    for row in (
        ["options", "that", "differ", "a", "b"],
        ["seed", "1", "2"],
        ["arguments", "--rate", "0.1", "--rate", "0.3"],
        ["torch", "2.11", "2.12"],
        ["best", "evaluation", "0.6000", "0.2500"],
        ["loss", "after", "step", "a", "b"],
        ["3", "0.7000", "0.5000"],
        ["evaluation", "loss", "after", "step", "a", "b"],
        ["4", "0.6000", "0.2500"],
    ):
        assert row in shown
    assert "python" not in text
    assert "the job files are the same" in text
    assert "the losses are equal before step 3, and differ there" in text
    found = json.loads(run("compare", "--json", "runs/a", "runs/c"))
    assert found["options"] == {"precision": ["fp32", "bf16"], "seed": [1, 2]}
    assert found["arguments"] == [["--rate", "0.1"]] * 2
    assert found["first_difference"] is None
    assert found["results"]["best_evaluation"] == [0.6, None]
    assert found["curves"]["loss"][0] == {"step": 1, "values": [0.9, 0.9]}
    assert found["curves"]["loss"][-1] == {"step": 4, "values": [0.6, None]}
    (folder / "runs" / "c" / "metrics.jsonl").unlink()
    assert "no step was done by both" in run("compare", "runs/a", "runs/c")
    assert refused("compare", "runs/a", "runs").endswith("give one that has a run.json")
    record = json.loads(Path("runs/b/run.json").read_text())
    record["options"]["epochs"] = 3
    record["options"]["best"] = "max:accuracy"
    Path("runs/b/run.json").write_text(json.dumps(record))
    shown = [line.split() for line in run("compare", "runs/a", "runs/b").splitlines()]
    assert ["epochs", "-", "3"] in shown
    assert ["best", "evaluation", "loss", "0.6000", "accuracy", "0.7500"] in shown


def test_runs_with_few_common_steps_or_without_losses_have_them_compared(folder: Path) -> None:
    """The curves show few steps, and a loss that is not finite is null."""
    for name, steps in (("long", range(1, 51)), ("other", range(50, 101))):
        lines = [json.dumps({"step": step, "loss": None}) + "\n" for step in steps]
        begin(folder, name, []).metrics.write_text("".join(lines))
    equal = "the losses of all steps that both have done are equal"
    assert equal in run("compare", "runs/long", "runs/other")
    assert equal in run("compare", "runs/long", "runs/long")
    found = json.loads(run("compare", "--json", "runs/long", "runs/other"))
    assert found["common_steps"] == 1


def test_what_two_runs_have_in_common_is_shown(folder: Path) -> None:
    lines = run("compare", "runs/a", "runs/a").splitlines()
    for line in (
        "the options are the same",
        "versions and hosts are the same",
        "the job files are the same",
        "the losses of all steps that both have done are equal",
    ):
        assert line in lines
    for name, dirty in (("a", False), ("b", True)):
        path = Path("runs", name, "run.json")
        record = {**json.loads(path.read_text()), "git": {"commit": "c0ffee", "dirty": dirty}}
        path.write_text(json.dumps({**record, "job_sha256": name}))
    lines = run("compare", "runs/a", "runs/b").splitlines()
    assert ["git", "c0ffee", "c0ffee,", "changed"] in [line.split() for line in lines]
    assert "job files differ: diff runs/a/job.py runs/b/job.py" in lines
    shown = [line.split() for line in run("compare", "runs/a", "runs/c").splitlines()]
    assert ["git", "c0ffee", "-"] in shown


def test_a_long_curve_is_compared_at_ten_steps(folder: Path) -> None:
    begin(folder, "long", [1 / step for step in range(1, 101)])
    found = json.loads(run("compare", "--json", "runs/long", "runs/c"))
    steps = [point["step"] for point in found["curves"]["loss"]]
    assert steps == [1, 12, 23, 34, 45, 56, 67, 78, 89, 100]
    assert len(found["curves"]["evaluation loss"]) == 10


def test_speeds_are_compared_if_they_are_known(folder: Path) -> None:
    assert "samples/s" not in run("compare", "runs/a", "runs/b")
    speeds = {"samples_per_second": 8.5, "seconds": 0.5, "tokens": 100}
    rows = [{"step": step, "loss": 0.5, **speeds} for step in (1, 2)]
    (folder / "runs" / "a" / "metrics.jsonl").write_text(
        "".join(f"{json.dumps(r)}\n" for r in rows)
    )
    shown = [line.split() for line in run("compare", "runs/a", "runs/b").splitlines()]
    assert ["samples/s", "8.5", "-"] in shown
    assert ["tokens/s", "200.0", "-"] in shown
    results = json.loads(run("compare", "--json", "runs/a", "runs/b"))["results"]
    assert results["samples_per_second"] == [8.5, None]


def names(run_dir: RunDir) -> list[str]:
    return sorted(path.name for path in run_dir.checkpoints.path.iterdir())


def test_prune_keeps_the_newest_and_the_best_checkpoint(folder: Path) -> None:
    made = RunDir(folder / "runs" / "a")
    for step, loss in ((1, 0.9), (2, 0.1), (3, 0.7), (4, 0.8), (5, 0.9)):
        complete(made, step, evaluation={"step": step, "loss": loss})
    (made.checkpoints.at(5) / "state-00001-of-00001.json").unlink()  # 4 is the newest that is whole
    (made.checkpoints.path / "damaged-step-00000003").mkdir()
    (made.checkpoints.path / "left-step-00000004").mkdir()
    (made.checkpoints.path / ".step-00000006.partial").mkdir()
    (made.checkpoints.path / ".step-00000008.partial.0a1b2c3d.gone").mkdir()
    outside = folder / "outside"
    outside.mkdir()
    (outside / "file").touch()
    (made.checkpoints.path / "step-00000007").symlink_to(outside)
    (made.checkpoints.path / "mine").mkdir()
    before = names(made)
    text = run("prune", "runs", "--keep-weights", "--dry-run")
    assert names(made) == before
    assert text.splitlines()[0].startswith(
        "a: would remove .step-00000006.partial (0B), .step-00000008.partial.0a1b2c3d.gone (0B), "
        "damaged-step-00000003 (0B), left-step-00000004 (0B), step-00000001 ("
    )
    assert text.splitlines()[-1].startswith("would free ")
    size = text.split()[-4]
    assert run("prune", "runs", "--keep-weights").splitlines()[-1] == f"freed {size} in 1 run"
    assert names(made) == [
        *("mine", "step-00000002", "step-00000004", "step-00000005", "step-00000007")
    ]
    assert run("prune", "runs", "--keep-weights") == "freed 0B in 0 runs\n"
    assert (outside / "file").exists()
    assert run("prune", "runs/a", "--remove-weights").startswith("a: removed step-00000002 (")
    assert names(made) == ["mine", "step-00000007"]
    assert (outside / "file").exists()
    assert made.metrics.exists()


def test_prune_keeps_checkpoints_that_are_intact(folder: Path) -> None:
    """Files of the newest one and of the best one have other bytes than were written."""
    made = RunDir(folder / "runs" / "a")
    for step, loss in ((1, 0.5), (2, 0.4), (3, 0.1), (4, 0.7), (5, 0.9)):
        complete(made, step, evaluation={"step": step, "loss": loss})
    for step in (3, 5):
        path = made.checkpoints.at(step) / "state-00001-of-00001.json"
        path.write_bytes(bytes(byte ^ 1 for byte in path.read_bytes()))
    run("prune", "runs", "--keep-weights")
    assert names(made) == ["step-00000002", "step-00000004", "step-00000005"]


def test_prune_removes_nothing_where_a_checkpoint_cannot_be_read_now(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may be the best one."""
    made = RunDir(folder / "runs" / "a")
    for step in (1, 2, 3):
        complete(made, step, evaluation={"step": step, "loss": float(step)})

    def fail(path: Path) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))

    monkeypatch.setattr("pipeworker.record.checkpoint.manifest.describe_file", fail)
    done = CliRunner().invoke(cli.main, ["prune", "runs", "--keep-weights"])
    freed, error = done.output.splitlines()
    assert freed == "freed 0B in 0 runs"
    assert error.startswith("error: runs/a/checkpoints/step-00000003/model-")
    assert "safetensors: cannot be read: Input/output error" in error
    assert done.exit_code == 2
    assert made.checkpoints.steps() == [1, 2, 3]


def test_prune_continues_after_a_run_whose_disk_fails(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = [RunDir(folder / "runs" / name) for name in "abc"]
    for run_dir in made:
        complete(run_dir, 1)
    bad = [run_dir.checkpoints.path.resolve() for run_dir in made[:2]]

    def fail(path: Path) -> bool:
        if path.resolve().parent in bad:
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))
        return remove_unless_held(path)

    monkeypatch.setattr("pipeworker.runs.prune.remove_unless_held", fail)
    done = CliRunner().invoke(cli.main, ["prune", "runs", "--remove-weights"])
    lines = done.output.splitlines()
    assert [line.partition(" (")[0] for line in lines if not line.startswith("freed")] == [
        "error: runs/a/checkpoints/step-00000001: cannot be written: Input/output error",
        "c: removed step-00000001",
        "error: runs/b/checkpoints/step-00000001: cannot be written: Input/output error",
    ]
    assert lines[-2].endswith(" in 1 run")
    assert done.exit_code == 1
    assert [run_dir.checkpoints.steps() for run_dir in made] == [[1], [1], []]


def test_prune_leaves_what_is_running_and_what_is_a_link_alone(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in "abc":
        complete(RunDir(folder / "runs" / name), 1)
    linked = folder / "runs" / "d"
    linked.symlink_to(folder / "runs" / "c")
    elsewhere = folder / "elsewhere"
    made = RunDir(folder / "runs" / "b")
    made.checkpoints.path.rename(elsewhere)
    made.checkpoints.path.symlink_to(elsewhere)

    def busy(path: Path, **_: object) -> RunLock:
        raise BlockingIOError

    text = run("prune", "runs", "--remove-weights", "--dry-run")
    assert "d: left alone" not in text.splitlines()[0]
    assert "b: left alone: runs/b/checkpoints is a link" in text
    assert "left alone: it is a link" in text
    with monkeypatch.context() as patched:
        patched.setattr("pipeworker.runs.prune.RunLock", busy)  # it began a moment ago
        assert run("prune", "runs/a", "--remove-weights").startswith("a: left alone: it is running")
    with monkeypatch.context() as patched:
        patched.setattr("pipeworker.record.lock.is_locked", lambda _: True)
        assert run("prune", "runs/a", "--remove-weights").startswith("a: left alone: it is running")
    run("prune", "runs", "--remove-weights")
    assert [path.name for path in elsewhere.iterdir()] == ["step-00000001"]
    assert names(RunDir(folder / "runs" / "a")) == []


def test_prune_leaves_a_checkpoint_that_another_job_reads(folder: Path) -> None:
    made = RunDir(folder / "runs" / "a")
    for step in (1, 2):
        complete(made, step)
    with held(made.checkpoints.at(1)):
        lines = run("prune", "runs", "--remove-weights").splitlines()
    assert lines[0] == "a: left alone: another job reads step-00000001"
    assert lines[1].startswith("a: removed step-00000002 (")
    assert names(made) == ["step-00000001"]


def test_files_that_checkpoints_share_count_once(folder: Path) -> None:
    made = RunDir(folder / "runs" / "b")
    for step in (1, 2, 3):
        shared = complete(made, step) / "frozen.safetensors"
        if step == 1:
            shared.write_bytes(bytes(5 << 20))
        else:
            shared.hardlink_to(made.checkpoints.at(1) / shared.name)
    assert 5 << 20 < Run.read(made.path).disk_bytes < 6 << 20
    assert "would free 5.0M" not in run("prune", "runs/b", "--keep-weights", "--dry-run")
    everything = run("prune", "runs/b", "--remove-weights", "--dry-run")
    assert everything.endswith("would free 5.0M in 1 run\n")
    assert "5.0M" not in run("prune", "runs/b", "--keep-weights")
    assert run("prune", "runs/b", "--remove-weights").endswith("freed 5.0M in 1 run\n")


def test_prune_names_what_it_cannot_use(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "runs" / "0").mkdir()
    path = complete(RunDir(folder / "runs" / "a"), 1).relative_to(folder)

    def fail(*_: object, **__: object) -> bool:
        raise OSError(errno.EIO, "Input/output error")

    for used, named in (("RunLock", "runs/a/.lock"), ("remove_unless_held", path)):
        with monkeypatch.context() as patched:
            patched.setattr(f"pipeworker.runs.prune.{used}", fail)
            done = CliRunner().invoke(cli.main, ["prune", "runs/a", "--remove-weights"])
        freed, last = done.output.splitlines()
        assert freed == "freed 0B in 0 runs"
        assert last.startswith(f"error: {named}: ")
        assert last.endswith("Input/output error")
        assert done.exit_code == 1
    first = run("prune", "runs", "--remove-weights").splitlines()[0]
    assert first.startswith("0: left alone: not the directory of a run; ")


def test_prune_says_what_it_would_keep(folder: Path) -> None:
    for words in ((), ("--keep-weights", "--remove-weights")):
        assert refused("prune", "runs", *words).startswith("prune: choose one of --keep-weights, ")


def test_a_run_without_a_copy_of_its_job_file_is_compared(folder: Path) -> None:
    """As one of a script that standard input or an interactive interpreter has read."""
    path = Path("runs/b/run.json")
    path.write_text(json.dumps({**json.loads(path.read_text()), "job": None, "job_sha256": None}))
    assert "a run has no copy of its job file" in run("compare", "runs/a", "runs/b").splitlines()
    found = json.loads(run("compare", "--json", "runs/a", "runs/b"))
    assert found["job_file"] == {"same": False, "copies": ["runs/a/job.py", None]}
