"""The output of `pipeworker env`."""

from __future__ import annotations

import configparser
import json
import platform
import re
import uuid
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

import cli
import pipeworker


def test_env_shows_versions_and_variables_and_no_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    secret = uuid.uuid4().hex
    monkeypatch.setenv("PIPEWORKER_TOKEN", secret)
    monkeypatch.setenv("PIPEWORKER_STEPS", "12")
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    ran = CliRunner().invoke(cli.main, ["env", "--json"])
    assert ran.exit_code == 0, ran.output
    found = json.loads(ran.stdout)
    assert found["pipeworker"] == pipeworker.__version__
    assert found["torch"] == torch.__version__
    assert found["python"] == platform.python_version()
    assert (found["PIPEWORKER_TOKEN"], found["PIPEWORKER_STEPS"]) == ("is set", "12")
    assert found["OMP_NUM_THREADS"] == "3"
    assert {"platform", "kernel", "devices", "cores", "memory"} <= found.keys()
    assert {"/dev/shm", "RLIMIT_NOFILE"} <= found.keys()
    text = CliRunner().invoke(cli.main, ["env"]).stdout
    assert secret not in ran.stdout + text
    assert [line.split()[0] for line in text.splitlines()] == [*found]


def test_env_shows_why_torch_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails() -> int:
        raise ValueError("\nInvalid log settings:\nx")  # as `import torch` raises for TORCH_LOGS

    monkeypatch.setattr(torch.accelerator, "device_count", fails)
    ran = CliRunner().invoke(cli.main, ["env", "--json"])
    assert ran.exit_code == 0, ran.output
    assert json.loads(ran.stdout)["devices"] == "unknown: torch failed: Invalid log settings: x"


@pytest.mark.parametrize("words", [("env",), ("export", "/run", "/run/out.pt")])
def test_commands_that_import_torch_reject_a_current_folder_that_is_gone(
    words: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Math libraries of torch end their process there."""
    (gone := tmp_path / "gone").mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    ran = CliRunner().invoke(cli.main, words)
    reason = "the current folder is gone: No such file or directory; change to another one"
    assert (ran.exit_code, ran.output) == (2, f"error: {reason}\n")


def test_env_shows_the_version_of_each_package_that_is_required() -> None:
    setup = configparser.ConfigParser()
    setup.read(Path(cli.__file__).with_name("setup.cfg"))
    required = setup["options"]["install_requires"].strip().splitlines()
    always = {re.split("[>=<]", line)[0] for line in required if ";" not in line}
    found = json.loads(CliRunner().invoke(cli.main, ["env", "--json"]).stdout)
    assert {"pyzmq", "msgspec"} < always <= found.keys()
    assert "not installed" not in {found[name] for name in always}
