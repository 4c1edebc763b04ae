"""Help, and suggestions for a mistyped command."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner, Result

import cli
from launcher.options import backends_here, devices_here
from pipeworker.job.options import DEVICES


def run(*words: str, command: click.Command = cli.main) -> Result:
    return CliRunner().invoke(command, words, prog_name="pipeworker")


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("job.py", "--", "x y"), "job.py: no such command; did you mean `pipeworker launch job"),
        (
            ("--stages", "2", "job.py"),
            "--stages: an option of launch; did you mean `pipeworker l",
        ),
        (("lanch", "job.py"), "lanch: no such command; did you mean launch?"),
        (("nodes",), "nodes: no such command; use cancel, checkpoint, "),  # node is hidden
        (("run", "job.py"), "run: no such command; did you mean launch?"),
        (("resume", "runs/a"), "resume: no such command; did you mean launch --resume?"),
        (("--stags",), "no such option"),
        (("report", "--steps", "1"), "--steps: no such option; see `pipeworker report --help`"),
        (("report", "--helpp"), "--helpp: no such option; did you mean --help?"),
    ],
)
def test_a_missing_launch_is_suggested(words: tuple[str, ...], expected: str) -> None:
    result = run(*words)
    assert result.exit_code == 2
    assert expected in result.output


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (
            ("launch", "--stages", "2", "job.py"),
            "launch: not a command under torchrun; run torchrun",
        ),
        (("export", "run"), "export: not a command under torchrun; run `pipeworker export`"),
        (("--stages", "2", "job.py"), "--stages: an option of launch; torchrun decides where"),
        (("--stags", "2"), "no such option"),
    ],
)
def test_launch_under_torchrun_is_an_error(
    words: tuple[str, ...], expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = run(*words, command=cli.worker)
    assert result.exit_code == 2
    assert expected in result.output


@pytest.mark.parametrize("words", [(), ("launch",), ("init",), ("export",), ("checkpoint",)])
def test_h_is_short_for_help(words: tuple[str, ...]) -> None:
    short, long = run(*words, "-h"), run(*words, "--help")
    assert short.exit_code == 0
    assert short.output == long.output
    assert "-h, --help" in short.output


def test_every_option_is_explained_in_a_group() -> None:
    text = run("launch", "-h").output
    for option in cli.launch.params:
        if isinstance(option, click.Option):
            assert (getattr(option, "written", "") or option.opts[-1]) in text
            assert option.help, option.name
    assert "4 × stages × replicas" in " ".join(text.split())
    assert ("nccl" in text) is ("cuda" in devices_here())
    groups = [line for line in text.splitlines() if line.endswith(":") and line[:1] != " "]
    assert groups == [
        *("Workers:", "Other hosts:", "Training:", "Numbers:", "Schedule and memory:"),
        *("Checkpoints and recovery:", "Resume:", "Project file:", "Output:", "Other:"),
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
    assert {"mps", "xpu"} < {*DEVICES}  # what another host may have is accepted
    assert backends_here(("auto", "cpu", "mps")) == ("auto", "gloo", "tls")
    assert backends_here(("auto", "cpu", "cuda")) == ("auto", "gloo", "nccl", "tls")
