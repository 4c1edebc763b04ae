"""Runs as ``show`` and ``list`` describe them."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

import cli
from pipeworker.errors import UsageError
from pipeworker.job.option_parsing import make_options
from pipeworker.record import run_record
from pipeworker.record.run_record import RunRecord, write_summary
from pipeworker.record.rundir import RunDir
from pipeworker.runs import listing, show
from pipeworker.runs.info import Run
from pipeworker.wire.lines import Verdict
from support.in_process.checkpoints import complete as checkpoint

PROCESS = {
    "started": "2026-05-04T03:02:01+00:00",
    "command": ["/bin/pipeworker", "launch", "--stages", "2", "net.py"],
    "versions": {"pipeworker": "0.1", "torch": "2.13.0", "python": "3.12.1"},
    "host": "here",
    "platform": "Linux",
    "pid": 7,
    "torchrun": None,
    "git": {"commit": "c0ffee", "dirty": True},
}
VERDICT = Verdict("done", 0, 4, 2.5, (3 << 20, 5 << 20), 0.25, None)

NOW = {"time": 1.0, "generation": 1, "restarts": 0, "doing": "stepping", "workers": []}


@pytest.fixture
def begin(tmp_path: Path) -> Callable[..., RunDir]:
    """Return a function that makes a run that has just begun."""
    (tmp_path / "net.py").write_text("")

    def begin(name: str = "run", process: dict[str, Any] | None = None, **options: Any) -> RunDir:
        made = RunDir(tmp_path / "runs" / name)
        made.path.mkdir(parents=True)
        chosen = make_options(str(tmp_path / "net.py"), 2, {"threads": 1, **options})
        run_record.write(made, json.loads(chosen.to_json()), {**PROCESS, **(process or {})})
        return made

    return begin


def train(made: RunDir, steps: int, evaluate: int = 0) -> None:
    """Write rows of `steps` steps, and evaluations, of which the second is best."""
    found = [
        {"step": step, "loss": 1 / step, "samples_per_second": 9.5} for step in range(1, steps + 1)
    ]
    made.metrics.write_text("".join(json.dumps(row) + "\n" for row in found))
    if evaluate:
        passes = [
            {"step": step, "loss": abs(step - 2 * evaluate) + 0.5, "accuracy": 0.25}
            for step in range(evaluate, steps + 1, evaluate)
        ]
        made.evaluation.write_text("".join(json.dumps(row) + "\n" for row in passes))


def test_the_speed_is_the_median_of_the_last_hundred_steps(begin: Callable[..., RunDir]) -> None:
    made = begin()
    rows = [{"step": s, "loss": 1.0, "samples_per_second": float(s)} for s in range(1, 201)]
    made.metrics.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert lines(made)["speed"] == "150.5 samples/s"
    more = {"samples_per_second": 9.0, "seconds": 0.5, "tokens": 64}
    odd = {"samples_per_second": 10**400, "seconds": 0.0, "tokens": "x"}
    with made.metrics.open("a") as file:
        file.writelines(json.dumps({"step": s, **more}) + "\n" for s in range(201, 300))
        file.write(json.dumps({"step": 300, **odd}) + "\n")
    assert lines(made)["speed"] == "9.0 samples/s, 128.0 tokens/s"


def test_figures_that_are_not_finite_are_null(begin: Callable[..., RunDir], tmp_path: Path) -> None:
    """JSON has no NaN, and other programs reject it."""
    made = begin()
    made.metrics.write_text('{"step": 1, "loss": NaN, "grad_norm": Infinity}\n')
    made.evaluation.write_text('{"step": 1, "loss": NaN}\n')
    write_summary(made, VERDICT, 2)
    shown = CliRunner().invoke(cli.main, ["show", "--json", str(made.path)]).output
    listed = CliRunner().invoke(cli.main, ["list", "--json", str(tmp_path / "runs")]).output
    for text in (shown, listed):
        assert not any(word in text for word in ("NaN", "Infinity"))
        assert json.loads(text)["last"] == {"step": 1, "loss": None, "grad_norm": None}
    assert lines(made)["loss"] == "nan"


@pytest.fixture
def locked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make all runs look as if another process held their locks."""
    monkeypatch.setattr("pipeworker.record.lock.is_locked", lambda _: True)


def lines(made: RunDir) -> dict[str, str]:
    """Return the lines of ``show`` by their names."""
    found: dict[str, str] = {}
    name = ""
    for line in filter(None, show.show(made.path).splitlines()):
        name = line[:14].strip() or name
        found[name] = f"{found[name]}\n{line[14:]}" if name in found else line[14:]
    return found


def test_the_command_has_every_character_of_its_words(begin: Callable[..., RunDir]) -> None:
    words = ["/bin/pipeworker", "launch", "b\udcff.py", "--", "a\nb"]
    found = lines(begin(process={"command": words}, arguments=("a\nb",)))
    assert found["command"] == r"pipeworker launch $'b\xff.py' -- $'a\x0ab'"
    assert found["arguments"] == r"$'a\x0ab'"


def test_a_run_that_is_done(begin: Callable[..., RunDir], tmp_path: Path) -> None:
    made = begin(schedule="gpipe", clip_grad_norm=1.5, steps=4, arguments=("a b", "c"), csv=True)
    train(made, 4, evaluate=1)
    checkpoint(made, 2, evaluation={"step": 2, "loss": 0.5})
    checkpoint(made, 4)
    (made.checkpoints.path / "step-00000009").mkdir()  # not complete
    write_summary(made, VERDICT, 2)
    path, started = made.path, lines(made)["started"]
    assert lines(made) == {
        "run": str(path),
        "job file": str(tmp_path / "net.py"),
        "copy of it": str(path / "job.py"),
        "command": "pipeworker launch --stages 2 net.py",
        "arguments": "'a b' c",
        "options": "--stages 2 --microbatches 8 --steps 4 --clip-grad-norm 1.5 --seed 0 --csv",
        "versions": "pipeworker 0.1, torch 2.13.0, python 3.12.1",
        "platform": "Linux",
        "git": "c0ffee, with uncommitted changes",
        "started": started,
        "status": "done",
        "steps": "4 of 4",
        "loss": "0.2500",
        "speed": "9.5 samples/s",
        "evaluation": "loss 2.5000  accuracy 0.2500  after step 4, the last\n"
        "loss 0.5000  accuracy 0.2500  after step 2, the best",
        "time": "2.5 s",
        "bubble": "25.0% measured",
        "memory": "3, 5 MB by worker",
        "checkpoints": "step-00000002  loss 0.5000 in evaluation, the best\nstep-00000004",
        "weights": str(made.checkpoints.at(4)),
        "to export": f"pipeworker export {path} weights.safetensors",
        "best weights": str(made.checkpoints.at(2)),
        "to export it": f"pipeworker export --best {path} best.safetensors",
        "to resume": f"pipeworker launch --resume --run-dir {path} --steps 8 {tmp_path}/net.py",
    }
    assert started.startswith("2026-05-0")
    assert started.endswith(" on here")


def test_the_same_as_json(begin: Callable[..., RunDir], tmp_path: Path) -> None:
    made = begin()
    train(made, 4, evaluate=2)
    checkpoint(made, 4, evaluation={"step": 4, "loss": 0.5})
    write_summary(made, VERDICT, 2)
    found = json.loads(show.show(made.path, as_json=True))
    assert found["run"] == str(made.path)
    assert {k: found[k] for k in PROCESS} == PROCESS
    assert found["changed_options"] == {"stages": 2, "microbatches": 8, "seed": 0}
    assert found["options"].items() > found["changed_options"].items()
    assert (found["status"], found["steps"], found["loss"]) == ("done", 4, 0.25)
    assert found["best_evaluation"] == {"step": 4, "loss": 0.5, "accuracy": 0.25}
    best = {"step": 4, "name": "loss", "value": 0.5, "path": "checkpoints/step-00000004"}
    assert (found["best"], found["best_weights"]) == (best, str(made.checkpoints.at(4)))
    assert found["checkpoints"] == [
        {
            "step": 4,
            "path": str(made.checkpoints.at(4)),
            "evaluation": {"step": 4, "loss": 0.5},
        }
    ]
    assert found["weights"] == str(made.checkpoints.at(4))
    assert found["export"].startswith("pipeworker export ")
    summary = json.loads(made.summary.read_text())
    assert {k: found[k] for k in summary if k != "stages"} == {
        k: v for k, v in summary.items() if k != "stages"
    }


@pytest.mark.usefixtures("locked")
def test_the_restarts_of_a_run_that_is_running_are_not_known(begin: Callable[..., RunDir]) -> None:
    found = Run.read(begin().path).to_json()
    assert (found["status"], found["restarts"], found["causes"]) == ("running", None, [])


@pytest.mark.usefixtures("locked")
def test_the_time_of_a_run_that_began_later_than_now_is_not_known(
    begin: Callable[..., RunDir],
) -> None:
    made = begin(process={"started": "2999-01-01T00:00:00+00:00"})  # the clock was set back since
    assert Run.read(made.path).summary["seconds"] is None


@pytest.mark.usefixtures("locked")
def test_a_run_that_is_running(begin: Callable[..., RunDir]) -> None:
    made = begin(steps=9)
    train(made, 3)
    found = lines(made)
    assert (found["status"], found["steps"]) == ("running", "3 of 9")
    assert found["weights"] == "none: no checkpoint is complete yet"
    assert found["to save now"] == f"pipeworker checkpoint {made.path}"
    assert not {"to resume", "to export", "error", "memory", "bubble"} & found.keys()
    assert float(found["time"].split()[0]) > 1e6


@pytest.mark.usefixtures("locked")
def test_top_has_strict_json(begin: Callable[..., RunDir], monkeypatch: pytest.MonkeyPatch) -> None:
    made = begin()
    made.metrics.write_text('{"step": 1, "loss": NaN}\n')
    made.now.write_text(json.dumps(NOW))
    monkeypatch.setattr("pipeworker.record.rundir.is_locked", lambda _: True)
    shown = CliRunner().invoke(cli.main, ["top", "--json", str(made.path)]).output
    assert json.loads(shown, parse_constant=pytest.fail)["last"]["loss"] is None


@pytest.mark.parametrize("form", ["--json", "--once"])
def test_top_reports_a_job_that_ends_before_it_answers(
    begin: Callable[..., RunDir], monkeypatch: pytest.MonkeyPatch, form: str
) -> None:
    made = begin()
    monkeypatch.setattr("pipeworker.record.rundir.is_locked", lambda _: True)
    done = CliRunner().invoke(cli.main, ["top", form, str(made.path)])
    assert done.exit_code == 2
    assert done.stderr.startswith(f"error: {made.path}: the job has ended; pipeworker show")


def test_a_run_that_was_killed(begin: Callable[..., RunDir], tmp_path: Path) -> None:
    made = begin()
    found = lines(made)
    assert (found["status"], found["steps"]) == ("lost", "0")
    assert found["error"].startswith("its processes ended without a summary")
    assert found["weights"] == "none: no checkpoint is complete"
    line = f"pipeworker launch --resume --run-dir {made.path} {tmp_path}/net.py"
    assert found["to resume"] == line


def test_a_run_that_failed_and_was_resumed(begin: Callable[..., RunDir]) -> None:
    made = begin(seed=3)
    options = {**RunRecord.read(made).options, "stages": 1, "balance": [3]}
    RunRecord.read(made).add_resume(options, {**PROCESS, "host": "there"}, 7)
    causes = ("stage 1 was killed", "stage 0 is silent")
    write_summary(made, Verdict("failed", 1, 8, 1.0, (), 0.0, "lost\nall", causes), 1)
    found = lines(made)
    assert found["options"] == "--stages 1 --microbatches 8 --balance 3 --seed 3"
    assert found["resumed"].endswith(" on there, after step 7, --stages 1 --balance 3")
    assert found["restarts"] == "2\nstage 1 was killed\nstage 0 is silent"
    assert (found["status"], found["error"]) == ("failed", "lost\nall")
    assert found["time"] == "1.0 s since it was resumed"


@pytest.mark.parametrize(
    ("process", "options", "line"),
    [
        ({"torchrun": "none"}, {"replicas": 3}, "torchrun --nproc-per-node 6 -m pipeworker "),
        (
            {"command": ["/bin/pipeworker", "launch", "--hosts", "a:1,b:1", "--sync", "--", "--x"]},
            {},
            "pipeworker launch --hosts a:1,b:1 --sync --resume ",
        ),
        (
            {"command": ["x", "--hosts-file=f", "--dry", "net.py"]},
            {},
            "pipeworker launch --hosts-file=f --resume",
        ),
        (
            {"command": ["x", "launch", "--on", "ray", "--nodes", "2", "--set", "gpus=1", "n.py"]},
            {},
            "pipeworker launch --on ray --nodes 2 --set gpus=1 --resume",
        ),
        ({"command": ["{job}"]}, {}, "in {job}: pipeworker.train(..., resume=True, run_dir="),
        (
            {"command": ["{job}"]},
            {"own_loop": True},
            "in {job}: pipeworker.Pipeline(..., resume=True, run_dir=",
        ),
        ({"command": []}, {}, "pipeworker launch --resume"),
    ],
)
def test_a_run_is_resumed_by_the_command_that_began_it(
    begin: Callable[..., RunDir],
    tmp_path: Path,
    process: dict[str, Any],
    options: dict[str, Any],
    line: str,
) -> None:
    job = str(tmp_path / "net.py")
    if process.get("command") == ["{job}"]:
        process = {"command": [job]}
    made = begin(process=process, **options)
    assert lines(made)["to resume"].startswith(line.replace("{job}", job))


def test_a_run_is_resumed_by_the_command_that_resumed_it_last(
    begin: Callable[..., RunDir],
) -> None:
    made = begin(process={"torchrun": "none"})
    record = run_record.RunRecord.read(made)
    now = {**PROCESS, "command": ["pipeworker", "launch", "--hosts", "a:2"], "torchrun": None}
    record.add_resume(record.options, now, 3)
    assert lines(made)["to resume"].startswith("pipeworker launch --hosts a:2 --resume")


def test_the_steps_of_a_script_that_only_loaded_a_checkpoint(begin: Callable[..., RunDir]) -> None:
    made = begin()
    write_summary(made, replace(VERDICT, steps=7), 2)
    assert lines(made)["steps"] == "7"
    assert json.loads(table_of("--json", str(made.path)))["steps"] == 7


def test_the_newest_run_is_listed_last(
    begin: Callable[..., RunDir], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, day, steps, options in (
        ("b", 1, 4, {"steps": 10}),
        ("a-longer-name", 2, 12, {}),
        ("c", 3, 0, {}),
    ):
        made = begin(name, {"started": f"2026-05-01T12:00:00.00000{day}+00:00"}, **options)
        train(made, steps)
        if steps:
            write_summary(made, VERDICT, 2)
    (tmp_path / "runs" / "other").mkdir()
    (tmp_path / "runs" / ".hidden").mkdir()
    (tmp_path / "runs" / "file").touch()
    broken = begin("broken")
    broken.summary.write_text("{")
    monkeypatch.chdir(tmp_path)
    head, *rows, damaged, no_run = table_of().splitlines()
    assert head.split() == [
        *("run", "status", "steps", "loss", "stages", "time", "disk", "started")
    ]
    assert [row.split()[:4] for row in rows] == [
        ["b", "done", "4/10", "0.2500"],
        ["a-longer-name", "done", "12/12", "0.0833"],
        ["c", "lost", "0", "2"],
    ]
    assert {row.index("2026-05") for row in rows} == {head.index("started")}
    assert (
        damaged
        == "broken: runs/broken/summary.json: cannot be read: it is not the summary of a run"
    )
    assert no_run == "other: not the directory of a run; give one that has a run.json"
    found = [json.loads(line) for line in table_of("--json").splitlines()]
    names = [Path(each["run"]).name for each in found]
    assert names == ["b", "a-longer-name", "c", "broken", "other"]
    assert [each.get("status") for each in found] == ["done", "done", "lost", None, None]
    assert (
        table_of("runs/b").splitlines()[1].split() == rows[0].split()
    )  # a run directory is accepted too


def table_of(*words: str) -> str:
    done = CliRunner().invoke(cli.main, ["list", *words])
    assert done.exit_code == 0, done.output
    return done.output


def test_the_name_of_a_listed_run_is_not_its_folder(
    begin: Callable[..., RunDir], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin("first")
    monkeypatch.chdir(tmp_path)
    for command in (("show", "first"), ("checkpoint", "first"), ("export", "first", "x.pt")):
        done = CliRunner().invoke(cli.main, command)
        assert done.exit_code == 2
        assert done.output.startswith("error: first: no")
        assert done.output.endswith(f"; did you mean {Path('runs', 'first')}?\n")


@pytest.mark.parametrize("command", ["evaluate", "show", "report"])
def test_the_run_of_a_checkpoint_is_named(
    begin: Callable[..., RunDir], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    begin("first")
    monkeypatch.chdir(tmp_path)
    checkpoint = Path("runs", "first", "checkpoints", "step-00000004")
    checkpoint.mkdir(parents=True)
    done = CliRunner().invoke(cli.main, [command, str(checkpoint)])
    assert done.exit_code == 2
    assert done.output.endswith(f"; did you mean its run, {Path('runs', 'first')}?\n")


@pytest.mark.parametrize("name", ["first", "fist", "runs/firts"])
@pytest.mark.parametrize(
    "words",
    [
        ("evaluate",),
        ("show",),
        ("launch", "--resume"),
        ("launch", "net.py", "--resume", "--run-dir"),
        ("launch", "net.py", "--stages", "1", "--init-from"),
    ],
    ids=" ".join,
)
def test_a_run_that_is_meant_is_named(
    begin: Callable[..., RunDir],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    words: tuple[str, ...],
    name: str,
) -> None:
    begin("first")
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(cli.main, [*words, name])
    assert done.exit_code == 2
    assert done.output.startswith("error: ")
    assert done.output.endswith(f"; did you mean {Path('runs', 'first')}?\n")
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["first"]


def test_a_folder_without_runs(tmp_path: Path) -> None:
    assert listing.list_runs(tmp_path) == f"no run is in {tmp_path}"
    with pytest.raises(UsageError, match=r"none: no such folder; give the folder of the runs"):
        listing.list_runs(tmp_path / "none")
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match=r"file: is a file; give the folder of the runs"):
        listing.list_runs(tmp_path / "file")
    done = CliRunner().invoke(cli.main, ["show", str(tmp_path)])
    assert done.exit_code == 2
    assert (
        done.output
        == f"error: {tmp_path}: not the directory of a run; give one that has a run.json\n"
    )


RUN = {"version": 1, "options": {}, "resumed": []}


@pytest.mark.parametrize(
    "files",
    [
        {"run.json": {**RUN, "resumed": [{"options": {"a": [1, {}]}}], "git": {"commit": "c"}}},
        {"run.json": {**RUN, "command": ["\0"], "options": {"job_file": "\ud800"}}},
        {"run.json": {**RUN, "host": "\x1b[31m", "started": "0001-01-01T00:00:00+14:00"}},
        {"metrics.jsonl": {"step": 3, "loss": "x", "samples_per_second": None}},
        {"metrics.jsonl": {"step": 3, "loss": math.nan}},
        {"evaluation.jsonl": {"step": 3, "loss": [1], "x": {}}},
        {"evaluation.jsonl": {"step": 3, "loss": 1, "x": None}},
        {"checkpoints/step-00000001/manifest.json": {"version": 2}},
    ],
    ids=str,
)
def test_files_changed_by_other_programs_are_shown_as_far_as_possible(
    tmp_path: Path, files: dict[str, Any]
) -> None:
    for name, value in {"run.json": RUN, **files}.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(json.dumps(value) + "\n")
    assert show.show(tmp_path).replace("\n", "").isprintable()
    assert json.loads(show.show(tmp_path, as_json=True))["status"] == "lost"
    assert len(listing.list_runs(tmp_path).splitlines()) == 2


STRANGE = json.dumps(
    {
        "status": "fine",
        "steps": 3,
        "restarts": 1,
        "causes": [],
        "seconds": 1.5,
        "peak_memory_bytes": [3],
        "bubble": 0.5,
        "error": None,
    }
)


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", "[" * 99_999, '{"status": 3}', "\udcff", STRANGE], ids=lambda t: t[:9]
)
def test_an_invalid_summary_is_rejected(begin: Callable[..., RunDir], text: str) -> None:
    made = begin()
    made.summary.write_text(text, errors="surrogateescape")
    with pytest.raises(
        UsageError, match=r"summary\.json: cannot be read: it is not the summary of a run"
    ):
        Run.read(made.path)
