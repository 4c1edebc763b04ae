"""Options that nobody says on the command line: the environment's, and those of a file."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner, Result

import cli
from launcher.defaults import Defaults, slips
from launcher.options import backends_here, devices_here
from pipeworker.errors import UsageError
from pipeworker.job.options import Options
from pipeworker.past import page
from pipeworker.session.begin import Asked
from pipeworker.session.place import Place
from pipeworker.session.show.view import View
from pipeworker.timings import VARIABLE
from pipeworker.wire.keys import TOKEN_VARIABLE

Launch = Callable[..., Options]


def run(*words: str, command: click.Command = cli.main) -> Result:
    return CliRunner().invoke(command, words, prog_name="pipeworker")


@pytest.fixture
def launch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Launch:
    """`launch` with a job file in a folder of its own: what it is begun with."""
    monkeypatch.chdir(tmp_path)
    Path("jobs").mkdir()
    Path("jobs/job.py").touch()
    begun: list[Options] = []
    monkeypatch.setattr("launcher.local.run", lambda it, *_: begun.append(it.options))

    def launch(*words: str) -> Options:
        result = run("launch", *words, "jobs/job.py")
        assert result.exit_code == 0, result.output
        return begun[-1]

    return launch


def refused(*words: str) -> str:
    result = run("launch", "--stages", "2", *words, "jobs/job.py")
    assert result.exit_code == 2
    assert not Path("runs").exists()
    return result.output.removeprefix("error: ").rstrip()


def project(text: str) -> None:
    Path("pyproject.toml").write_text(f"[tool.other]\nx = 1\n\n[tool.pipeworker]\n{text}\n")


def test_the_command_line_comes_before_the_environment_before_a_file(
    launch: Launch, monkeypatch: pytest.MonkeyPatch
) -> None:
    project("stages = 2\nsteps = 3\nkeep = 4\nseed = 5")
    monkeypatch.setenv("PIPEWORKER_STEPS", "6")
    monkeypatch.setenv("PIPEWORKER_KEEP", "7")
    made = launch("--keep", "8")
    assert (made.stages, made.steps, made.keep, made.seed) == (2, 6, 8, 5)
    assert made.accumulate == 1


def test_steps_and_epochs_are_instead_of_each_other(
    launch: Launch, monkeypatch: pytest.MonkeyPatch
) -> None:
    project("stages = 2\nsteps = 3")
    monkeypatch.setenv("PIPEWORKER_EPOCHS", "4")
    made = launch()
    assert (made.steps, made.epochs) == (None, 4)
    made = launch("--steps", "5")
    assert (made.steps, made.epochs) == (5, None)
    monkeypatch.delenv("PIPEWORKER_EPOCHS")
    project("stages = 2\nsteps = 3\nepochs = 4")
    assert "--steps 3 and --epochs 4: choose one" in run("launch", "jobs/job.py").output
    assert launch("--epochs", "5").steps is None


def test_a_file_says_each_kind_of_value(launch: Launch) -> None:
    project(
        'balance = [2, 1]\ncheckpoint_every = 10\nprecision = "bf16"\nstop-on-nan = true\n'
        "clip-grad-norm = 1\nworker-timeout = 2.5"
    )
    made = launch("--stages", "2")
    assert (made.balance, made.checkpoint_every, made.precision) == ((2, 1), "10", "bf16")
    assert (made.stop_on_nan, made.clip_grad_norm, made.worker_timeout) == (True, 1.0, 2.5)
    assert not launch("--stages", "2", "--no-stop-on-nan").stop_on_nan


def test_paths_are_seen_from_the_file(launch: Launch, tmp_path: Path) -> None:
    Path("jobs/pipeworker.toml").write_text('run-dir = "runs/1"\ninit-from = "weights.pt"')
    Path("jobs/weights.pt").touch()
    assert launch("--stages", "2").init_from == str(tmp_path / "jobs/weights.pt")
    assert Path("jobs/runs/1/run.json").exists()


def test_the_file_beside_the_job_comes_first_and_no_other_is_read(launch: Launch) -> None:
    project("seed = 1\nkeep = 5")
    assert launch("--stages", "2").seed == 1
    Path("pipeworker.toml").write_text("seed = 2")
    assert launch("--stages", "2").seed == 2
    Path("jobs/pyproject.toml").write_text("[tool.other]\nx = 1")
    assert launch("--stages", "2").seed == 2  # there is no table of ours in that one
    Path("jobs/pipeworker.toml").write_text("seed = 3")
    made = launch("--stages", "2")
    assert (made.seed, made.keep) == (3, 2)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("stepss = 3", "no option is stepss: did you mean steps?"),
        ("xyz = 3", "no option is xyz: did you mean one of `pipeworker launch -h`?"),
        ('steps = "3"', "steps = '3': it must be a whole number"),
        ("seed = true", "seed = True: it must be a whole number"),
        ("stop-on-nan = 1", "stop-on-nan = 1: it must be true or false"),
        ("balance = [1.5]", "balance = [1.5]: it must be a string, a whole number or a list"),
        ('precision = "fp8"', "precision = 'fp8': 'fp8' is not one of 'fp32', 'bf16', 'fp16'"),
        ("resume = true", "resume can only be said on the command line"),
        ('hosts = "a:2"', "hosts can only be said on the command line"),
        ("steps = [", "is not TOML: "),
        (f"steps = {'[' * 10_000}", "is not TOML: "),
    ],
)
def test_a_mistake_in_a_file_is_said_with_file_and_key(
    launch: Launch, text: str, message: str
) -> None:
    Path("pipeworker.toml").write_text(text)
    said = refused()
    assert said.startswith("pipeworker.toml")
    assert message in said


def test_a_file_that_cannot_be_read_is_said(launch: Launch) -> None:
    Path("pipeworker.toml").mkdir()
    assert refused() == "cannot read pipeworker.toml: Is a directory"
    Path("pipeworker.toml").rmdir()
    Path("pyproject.toml").write_text("tool = 3")
    assert refused() == "pyproject.toml: tool is no table"


def test_a_value_that_is_out_of_range_is_said_with_where_it_is(
    launch: Launch, monkeypatch: pytest.MonkeyPatch
) -> None:
    project("keep = 0")
    assert refused() == "--keep 0: must be 1 or more (pyproject.toml, [tool.pipeworker])"
    monkeypatch.setenv("PIPEWORKER_SEED", "-1")
    assert refused("--keep", "1") == "--seed -1: must be 0 or more (PIPEWORKER_SEED)"
    monkeypatch.setenv("PIPEWORKER_SEED", "one")
    assert "'--seed' (PIPEWORKER_SEED): 'one' is not a valid integer" in refused()
    assert refused("--keep", "0", "--seed", "1") == "--keep 0: must be 1 or more"


def test_a_run_that_goes_on_has_its_options_already(
    launch: Launch, monkeypatch: pytest.MonkeyPatch
) -> None:
    project("stages = 2\nseed = 5\nsteps = 3")
    begun = launch("--run-dir", "run")
    project("stages = 3\nseed = 6\nsteps = 4")
    monkeypatch.setenv("PIPEWORKER_PRECISION", "bf16")
    monkeypatch.setenv("PIPEWORKER_RUN_DIR", "run")
    for words in (("--resume",), ("--go-on",)):
        assert launch(*words) == begun
    assert launch("--go-on", "--steps", "9").steps == 9
    result = run("launch", "--resume", "--seed", "6", "jobs/job.py")
    assert "--seed: 5, now 6" in result.output
    assert launch("--go-on", "--run-dir", "other").seed == 6


def test_jobs_elsewhere_are_told_what_the_environment_and_a_file_say(
    launch: Launch, monkeypatch: pytest.MonkeyPatch
) -> None:
    project("stages = 2\nseed = 5\nstop-on-nan = true")
    monkeypatch.setenv("PIPEWORKER_KEEP", "7")
    line = ("launch", "--on", "slurm", "--dry-run", "--run-dir", "r", "jobs/job.py")
    script = run(*line).stdout
    for words in ("--stages 2", "--seed 5", "--stop-on-nan", "--keep 7"):
        assert f" {words} " in script
    again = run(*line[:-1], "--resume", "--keep", "8", line[-1]).stdout
    assert " --keep 8 " in again
    assert "--seed" not in again


def test_ranks_of_torchrun_read_them_too(launch: Launch, monkeypatch: pytest.MonkeyPatch) -> None:
    project("stages = 2\nseed = 5")  # the one of launch is not for them
    monkeypatch.setenv("PIPEWORKER_KEEP", "7")
    for name, value in {"RANK": "0", "WORLD_SIZE": "3", "MASTER_ADDR": "a"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MASTER_PORT", "1")
    found: list[Asked] = []

    def joins(place: Place, asked: Asked, view: View) -> int:
        found.append(asked)
        return 0

    monkeypatch.setattr("launcher.torchrun.run", joins)
    assert run("jobs/job.py", command=cli.worker).exit_code == 0
    made = found[0].anew()
    assert (made.stages, made.seed, made.keep) == (3, 5, 7)
    Path("pyproject.toml").write_text("[tool.pipeworker]\nstage = 2")
    assert "did you mean stages?" in run("jobs/job.py", command=cli.worker).output


def test_variables_of_options_are_no_other_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for command in (cli.launch, cli.worker):
        prefix = command.context_settings["auto_envvar_prefix"]
        names = {f"{prefix}_{str(one.name).upper()}" for one in command.params}
        assert "PIPEWORKER_STEPS" in names
        assert not names & {TOKEN_VARIABLE, VARIABLE}
        assert not [name for name in names if name.startswith("PIPEWORKER_TESTS")]


def test_what_is_of_one_start_is_not_in_the_environment(
    launch: Launch, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("RESUME", "ON", "DRY_RUN", "HOSTS", "NODES"):
        monkeypatch.setenv(f"PIPEWORKER_{name}", "1")
    assert launch("--stages", "2").stages == 2


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("MICROBATCH", "is PIPEWORKER_MICROBATCHES meant?"),
        ("SETPS", "is PIPEWORKER_STEPS meant?"),
        ("CHECKPOINT", "is PIPEWORKER_CHECKPOINT_EVERY or PIPEWORKER_CHECKPOINT_BUSY meant?"),
        ("HOSTS", "--hosts can only be said on the command line"),
        ("SETTINGS", "--set can only be said on the command line"),
        ("STEPS", ""),
        ("TIMINGS", ""),
        ("TESTS_SERVER", ""),  # somebody else's
        ("", ""),
    ],
)
def test_a_variable_that_is_misspelt_is_said(name: str, said: str) -> None:
    variable = f"PIPEWORKER_{name}"
    found = [*slips([variable, name, "PATH"], cli.launch.params)]
    assert found == ([f"{variable} is not read: {said}"] if said else [])


def test_a_misspelt_variable_ends_nothing(launch: Launch, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIPEWORKER_SETPS", "3")
    assert launch("--stages", "2").steps is None
    said = "warning: PIPEWORKER_SETPS is not read: is PIPEWORKER_STEPS meant?\n"
    assert said in run("launch", "--stages", "2", "jobs/job.py").stderr


def test_what_nobody_typed_is_recorded_with_where_it_is_from(
    launch: Launch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As far as it counts."""
    project("stages = 3\nkeep = 4\nseed = 5\nepochs = 7")
    monkeypatch.setenv("PIPEWORKER_KEEP", "6")
    launch("--steps", "8", "--run-dir", "run")
    origins = json.loads(Path("run/run.json").read_text())["origins"]
    where = "pyproject.toml, [tool.pipeworker]"
    assert origins == {"stages": where, "keep": "PIPEWORKER_KEEP", "seed": where}
    assert lines_of("run") == [
        "not typed     PIPEWORKER_KEEP: --keep 6",
        f"              {where}: --seed 5 --stages 3",
    ]
    launch("--stages", "2", "--seed", "0", "--keep", "1", "--run-dir", "typed")
    assert json.loads(Path("typed/run.json").read_text())["origins"] == {"epochs": where}


def lines_of(folder: str) -> list[str]:
    """What `show` has of what was not typed."""
    text = page.show(Path(folder)).partition("not typed")
    return (text[1] + text[2].partition("\nversions")[0]).splitlines()


def test_no_file_says_nothing(tmp_path: Path) -> None:
    assert Defaults.find([tmp_path, tmp_path / "none"]) == Defaults()
    (tmp_path / "pipeworker.toml").write_bytes(b"\xff")
    with pytest.raises(UsageError, match="is not TOML"):
        Defaults.find([tmp_path])


# What is meant, and what is offered.


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("job.py", "--", "x y"), "job.py is no command: did you mean `pipeworker launch job.py"),
        (
            ("--stages", "2", "job.py"),
            "--stages is an option of launch: did you mean `pipeworker l",
        ),
        (("lanch", "job.py"), "No such command 'lanch'"),
        (("--stags",), "No such option"),
    ],
)
def test_launch_that_is_left_out_is_meant(words: tuple[str, ...], said: str) -> None:
    result = run(*words)
    assert result.exit_code == 2
    assert said in result.output


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("launch", "--stages", "2", "job.py"), "under torchrun leave out launch: torchrun … -m"),
        (("export", "run"), "export is no matter for torchrun: say `pipeworker export`"),
        (("--stages", "2", "job.py"), "--stages is an option of launch: torchrun says where"),
        (("--stags", "2"), "No such option"),
    ],
)
def test_under_torchrun_launch_is_too_much(
    words: tuple[str, ...], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = run(*words, command=cli.worker)
    assert result.exit_code == 2
    assert said in result.output


@pytest.mark.parametrize("words", [(), ("launch",), ("init",), ("export",), ("checkpoint",)])
def test_help_is_given_for_h(words: tuple[str, ...]) -> None:
    short, long = run(*words, "-h"), run(*words, "--help")
    assert short.exit_code == 0
    assert short.output == long.output
    assert "-h, --help" in short.output


def test_every_option_is_explained_in_a_group() -> None:
    text = run("launch", "-h").output
    for option in cli.launch.params:
        if isinstance(option, click.Option):
            assert option.opts[-1] in text
            assert option.help, option.name
    assert "4 × stages × replicas" in " ".join(text.split())
    assert ("nccl" in text) is ("cuda" in devices_here())
    groups = [line for line in text.splitlines() if line.endswith(":") and line[:1] != " "]
    assert groups == [
        *("Workers:", "Other hosts:", "Training:", "Numbers:", "Schedule and memory:"),
        *("Checkpoints and recovery:", "A run that goes on:", "Output:", "Other:"),
    ]
    text = run("-h", command=cli.worker).output
    assert "--steps N" in text
    assert "--stages" not in text


def test_a_device_is_offered_where_there_is_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = tmp_path / "torch" / "lib"
    library.mkdir(parents=True)

    class Found:
        origin = str(tmp_path / "torch" / "__init__.py")

    def find(name: str) -> Any:
        return Found if name == "torch" else None

    monkeypatch.setattr("launcher.options.find_spec", find)
    (tmp_path / "nvidiactl").touch()
    assert devices_here(tmp_path) == ("auto", "cpu")
    (library / "libtorch_cuda.so").touch()
    assert devices_here(tmp_path) == ("auto", "cpu", "cuda")
    (tmp_path / "nvidiactl").unlink()
    assert devices_here(tmp_path) == ("auto", "cpu")
    assert devices_here(tmp_path, "darwin arm64") == ("auto", "cpu", "mps")
    assert backends_here(("auto", "cpu", "mps")) == ("auto", "gloo", "tls")
    assert backends_here(("auto", "cpu", "cuda")) == ("auto", "gloo", "nccl", "tls")
