"""Options that nobody says on the command line: the environment's, and those of a file."""

from __future__ import annotations

import errno
import json
from pathlib import Path
from typing import NoReturn

import pytest

import cli
from launcher.defaults import Defaults, check_variables
from pipeworker.display.style import Style
from pipeworker.errors import UsageError
from pipeworker.ranks.rank_info import RankInfo
from pipeworker.runs import show
from pipeworker.runs.begin import RunRequest
from pipeworker.timings import VARIABLE
from pipeworker.wire.keys import TOKEN_VARIABLE
from support.real_jobs.launcher import Launch, launcher, project, refused, run

launch = pytest.fixture(launcher)


pytestmark = pytest.mark.usefixtures("users_defaults", "users_device")


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


def test_a_file_sets_values_of_each_type(launch: Launch) -> None:
    project(
        'balance = [2, 1]\ncheckpoint_every = 10\nprecision = "bf16"\nstop-on-nan = true\n'
        "clip-grad-norm = 1\nworker-timeout = 2.5"
    )
    made = launch("--stages", "2")
    assert (made.balance, made.checkpoint_every, made.precision) == ((2, 1), "10", "bf16")
    assert (made.stop_on_nan, made.clip_grad_norm, made.worker_timeout) == (True, 1.0, 2.5)
    assert not launch("--stages", "2", "--no-stop-on-nan").stop_on_nan


def test_a_file_gives_arguments_that_typed_ones_replace(launch: Launch) -> None:
    project('stages = 2\narguments = ["--rate", 0.5, "--deep"]')
    assert launch("--run-dir", "run").arguments == ("--rate", "0.5", "--deep")
    assert "[tool.pipeworker]: -- --rate 0.5 --deep" in show.show(Path("run"))
    project('stages = 2\narguments = ["--rate", 3]')
    assert launch("--resume", "--run-dir", "run").arguments == ("--rate", "0.5", "--deep")
    assert run("launch", "jobs/job.py", "--", "--rate", "1").exit_code == 0
    assert launch("--resume", "--run-dir", "run").arguments == ("--rate", "0.5", "--deep")
    line = ("launch", "--on", "slurm", "--dry-run", "--run-dir", "run", "--stages", "2")
    assert "jobs/job.py -- --rate 3" in run(*line, "jobs/job.py").stdout
    assert "-- --rate" not in run(*line, "--resume", "jobs/job.py").stdout


def test_typed_arguments_come_before_those_of_a_file(launch: Launch, tmp_path: Path) -> None:
    project('stages = 2\narguments = ["--rate", 3]')
    path = tmp_path / "run"
    done = run("launch", "--run-dir", "run", "jobs/job.py", "--", "-x")
    assert done.exit_code == 0
    assert json.loads((path / "run.json").read_text())["arguments"] == ["-x"]


def test_config_names_another_file(launch: Launch) -> None:
    project("stages = 2\nseed = 1")
    Path("other").mkdir()
    Path("other/small.toml").write_text('stages = 3\ninit-from = "weights.pt"')
    Path("other/weights.pt").touch()
    made = launch("--run-dir", "1", "--config", "other/small.toml")
    assert (made.stages, made.seed) == (3, 0)
    assert made.init_from == str(Path("other/weights.pt").absolute())
    Path("other/pyproject.toml").write_text("[tool.pipeworker]\nstages = 4")
    assert launch("--run-dir", "2", "--config", "other/pyproject.toml").stages == 4
    script = run(
        *("launch", "--config", "other/small.toml", "--on", "slurm", "--dry-run"),
        *("--run-dir", "r", "jobs/job.py"),
    ).stdout
    assert "--stages 3" in script
    assert "--config" not in script
    assert refused("--config", "none.toml") == (
        "--config none.toml: no such file; give a file with options"
    )
    assert refused("--config", "other") == (
        "--config other: is a directory; give a file with options"
    )
    Path("other/pyproject.toml").write_text("[tool.else]")
    assert refused("--config", "other/pyproject.toml") == (
        "--config other/pyproject.toml: no table [tool.pipeworker]; give a file with options"
    )


def test_a_key_is_any_long_spelling_of_an_option(launch: Launch) -> None:
    for key in ("profile", "profile-steps", "profile_steps"):
        project(f'stages = 2\n{key} = "2:3"')
        assert launch("--run-dir", key).profile_steps == "2:3"


def test_paths_are_relative_to_the_file(launch: Launch, tmp_path: Path) -> None:
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
    assert launch("--stages", "2").seed == 2  # that file has no table of pipeworker
    Path("jobs/pipeworker.toml").write_text("seed = 3")
    made = launch("--stages", "2")
    assert (made.seed, made.keep) == (3, 2)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("stepss = 3", "stepss is not an option; did you mean steps?"),
        ("xyz = 3", "xyz is not an option; did you mean one of `pipeworker launch -h`?"),
        ("[pipeworker]\nsteps = 3", "[pipeworker] is not an option; remove this head"),
        ('steps = "3"', "steps = '3': must be a whole number"),
        ("seed = true", "seed = True: must be a whole number"),
        ("stop-on-nan = 1", "stop-on-nan = 1: must be true or false"),
        ("balance = [1.5]", "balance = [1.5]: must be a string, a whole number or a list"),
        ('precision = "fp8"', "precision = 'fp8': 'fp8' is not one of 'fp32', 'bf16', 'fp16'"),
        ('arguments = "a b"', "arguments = 'a b': must be a list of strings and numbers"),
        ('init-from = "a\\u0000b"', "init-from has 'a\\x00b'; remove the null character"),
        ('schedule = "a\\u0000b"', "schedule has 'a\\x00b'; remove the null character"),
        ('arguments = ["a\\u0000b"]', "arguments has 'a\\x00b'; remove the null character"),
        ("arguments = [true]", "arguments = [True]: must be a list of strings and numbers"),
        ('config = "x"', "config is only for the command line"),
        ("resume = true", "resume is only for the command line"),
        ('hosts = "a:2"', "hosts is only for the command line"),
        (r'run-dir = "a\u0000b"', r"run-dir has 'a\x00b'; remove the null character"),
        ("steps = [", ": not TOML: "),
        (f"steps = {'[' * 10_000}", ": not TOML: "),
    ],
)
def test_an_error_in_a_file_names_the_file_and_the_key(
    launch: Launch, text: str, message: str
) -> None:
    Path("pipeworker.toml").write_text(text)
    error = refused()
    assert error.startswith("pipeworker.toml")
    assert message in error
    assert not error.endswith(".")


def test_an_unreadable_file_is_an_error(launch: Launch) -> None:
    Path("pipeworker.toml").mkdir()
    assert (
        refused()
        == "pipeworker.toml: cannot be read: Is a directory; make it readable, or remove it"
    )
    Path("pipeworker.toml").rmdir()
    Path("pyproject.toml").write_text("tool = 3")
    assert refused() == "pyproject.toml: tool is not a table; write [tool.pipeworker]"


def test_a_folder_that_cannot_be_searched_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """As that of root, in which another user's command was started; it need not have the file."""

    def refuse(path: Path) -> NoReturn:
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr(Path, "read_bytes", refuse)
    monkeypatch.setattr(Path, "lstat", refuse)
    with pytest.raises(UsageError) as caught:
        Defaults.find([Path()])
    reason = f"{Path().absolute()}: cannot be searched for pipeworker.toml: Permission denied"
    assert str(caught.value) == f"{reason}; make it accessible, or change to another folder"


def test_a_link_into_a_folder_that_cannot_be_searched_is_named_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: Path) -> NoReturn:
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    (link := tmp_path / "pipeworker.toml").symlink_to("hidden/pipeworker.toml")
    monkeypatch.setattr(Path, "read_bytes", refuse)
    with pytest.raises(UsageError) as caught:
        Defaults.find([tmp_path])
    reason = f"{link}: cannot be read: Permission denied"
    assert str(caught.value) == f"{reason}; make it readable, or remove it"


def test_an_error_of_a_value_out_of_range_names_its_source(
    launch: Launch, monkeypatch: pytest.MonkeyPatch
) -> None:
    project("keep = 0")
    assert refused() == "--keep 0: must be 1 or more (pyproject.toml, [tool.pipeworker])"
    monkeypatch.setenv("PIPEWORKER_SEED", "-1")
    assert refused("--keep", "1") == "--seed -1: must be 0 or more (PIPEWORKER_SEED)"
    monkeypatch.setenv("PIPEWORKER_SEED", "one")
    assert "--seed (PIPEWORKER_SEED): 'one' is not a valid integer; see" in refused()
    assert refused("--keep", "0", "--seed", "1") == "--keep 0: must be 1 or more"
    monkeypatch.setenv("PIPEWORKER_CSV", "maybe")
    expected = "--csv (PIPEWORKER_CSV): 'maybe' is not a valid boolean; write true or false"
    assert refused("--seed", "1") == expected


@pytest.mark.parametrize(
    ("option", "value", "error"),
    [
        ("log-every", "0", "--log-every 0: must be an integer of 1 or more"),
        ("profile-steps", "x", "--profile x: must be the first and the last step to profile"),
        ("schedule", "x", "--schedule x: no such schedule or file"),
        ("init-strict", "false", "--no-init-strict: no file is given; add --init-from"),
    ],
)
def test_an_error_of_any_option_names_its_source(
    launch: Launch, monkeypatch: pytest.MonkeyPatch, option: str, value: str, error: str
) -> None:
    project(f"{option} = {value if option in ('log-every', 'init-strict') else repr(value)}")
    found = refused()
    assert found.startswith(error)
    assert found.endswith(" (pyproject.toml, [tool.pipeworker])")
    variable = f"PIPEWORKER_{option.upper().replace('-', '_')}"
    monkeypatch.setenv(variable, value)
    found = refused()
    assert found.startswith(error)
    assert found.endswith(f" ({variable})")


@pytest.mark.usefixtures("launch")
def test_an_error_of_two_options_names_the_sources_of_both(monkeypatch: pytest.MonkeyPatch) -> None:
    project("balance = '3,5'")
    error = "--schedule auto and --balance: each schedule that is tried has a balance of its own; "
    error += "leave --balance out, or name a schedule"
    file = "pyproject.toml, [tool.pipeworker]"
    assert refused("--schedule", "auto") == f"{error} ({file})"
    monkeypatch.setenv("PIPEWORKER_SCHEDULE", "auto")
    found = refused().removeprefix(error)
    assert file in found
    assert "PIPEWORKER_SCHEDULE" in found


@pytest.mark.usefixtures("launch")
def test_an_error_of_an_option_of_a_plan_names_its_source(monkeypatch: pytest.MonkeyPatch) -> None:
    project("stages = 2\nmicrobatches = 0")
    error = "error: --microbatches 0: must be 1 or more"
    assert run("plan", "jobs/job.py").output == f"{error} (pyproject.toml, [tool.pipeworker])\n"
    monkeypatch.setenv("PIPEWORKER_MICROBATCHES", "0")
    assert run("plan", "jobs/job.py").output == f"{error} (PIPEWORKER_MICROBATCHES)\n"
    assert run("plan", "--stages", "2").output == f"{error} (PIPEWORKER_MICROBATCHES)\n"


def test_a_resumed_run_keeps_its_options(launch: Launch, monkeypatch: pytest.MonkeyPatch) -> None:
    project("stages = 2\nseed = 5\nsteps = 3")
    first = launch("--run-dir", "run")
    project("stages = 3\nseed = 6\nsteps = 4")
    monkeypatch.setenv("PIPEWORKER_PRECISION", "bf16")
    monkeypatch.setenv("PIPEWORKER_RUN_DIR", "run")
    for words in (("--resume",), ("--auto-resume",)):
        assert launch(*words) == first
    assert launch("--auto-resume", "--steps", "9").steps == 9
    result = run("launch", "--resume", "--seed", "6", "jobs/job.py")
    assert "--seed (5, now 6)" in result.output
    assert launch("--auto-resume", "--run-dir", "other").seed == 6


def test_options_of_the_environment_and_a_file_reach_jobs_on_other_hosts(
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
    assert "--auto-resume" in script
    assert "--auto-resume" not in again  # as --resume is given
    assert "--seed" not in again


def test_ranks_of_torchrun_read_them_too(launch: Launch, monkeypatch: pytest.MonkeyPatch) -> None:
    project("stages = 2\nseed = 5")  # the one of launch is not for them
    monkeypatch.setenv("PIPEWORKER_KEEP", "7")
    for name, value in {"RANK": "0", "WORLD_SIZE": "3", "MASTER_ADDR": "a"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MASTER_PORT", "1")
    found: list[RunRequest] = []

    def joins(place: RankInfo, request: RunRequest, view: Style) -> int:
        found.append(request)
        return 0

    monkeypatch.setattr("launcher.torchrun.run", joins)
    assert run("jobs/job.py", command=cli.worker).exit_code == 0
    made = found[0].new_options()
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
    ("name", "hint"),
    [
        ("MICROBATCH", "did you mean PIPEWORKER_MICROBATCHES?"),
        ("SETPS", "did you mean PIPEWORKER_STEPS?"),
        ("CHECKPOINT", "did you mean PIPEWORKER_CHECKPOINT_EVERY or PIPEWORKER_CHECKPOINT_BUSY?"),
        ("HOSTS", "--hosts is only for the command line"),
        ("SETTINGS", "--set is only for the command line"),
        ("STEPS", ""),
        ("TIMINGS", ""),
        ("TESTS_SERVER", ""),  # not pipeworker's to check
        ("", ""),
    ],
)
def test_a_misspelt_variable_gives_a_warning(name: str, hint: str) -> None:
    variable = f"PIPEWORKER_{name}"
    found = [*check_variables([variable, name, "PATH"], cli.launch.params)]
    assert found == ([f"{variable}: not read; {hint}"] if hint else [])


def test_a_misspelt_variable_does_not_end_the_command(
    launch: Launch, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIPEWORKER_SETPS", "3")
    assert launch("--stages", "2").steps is None
    expected = "warning: PIPEWORKER_SETPS: not read; did you mean PIPEWORKER_STEPS?\n"
    assert expected in run("launch", "--stages", "2", "jobs/job.py").stderr


def test_the_source_of_an_option_that_was_not_typed_is_recorded(
    launch: Launch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Options that a later source overrides have no recorded origin."""
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
    """Return the lines in which `show` lists options from elsewhere than the command line."""
    text = show.show(Path(folder)).partition("not typed")
    return (text[1] + text[2].partition("\nversions")[0]).splitlines()


def test_no_file_gives_no_defaults(tmp_path: Path) -> None:
    assert Defaults.find([tmp_path, tmp_path / "none"]) == Defaults()
    (tmp_path / "pipeworker.toml").write_bytes(b"\xff")
    with pytest.raises(UsageError, match="not TOML"):
        Defaults.find([tmp_path])
