"""The promises to an operator: the unit for systemd, and the page of what programs read."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from click.testing import CliRunner

import cli
from pipeworker.runs.begin import RunRequest
from support.pages import DOCS, ROOT

UNIT = ROOT / "deploy" / "systemd" / "pipeworker@.service"


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is not installed")
def test_systemd_accepts_the_unit(tmp_path: Path) -> None:
    text = UNIT.read_text().replace("User=training", "User=root")
    text = text.replace("/srv/training/.venv/bin/pipeworker", "/bin/true")
    made = tmp_path / "pipeworker@big.service"
    made.write_text(text.replace("/srv/training", "/"))
    done = subprocess.run(
        ["systemd-analyze", "verify", str(made)], capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_the_command_of_the_unit_is_one_of_ours() -> None:
    (line,) = re.findall(r"^ExecStart=\S+ launch (.*)$", UNIT.read_text(), re.MULTILINE)
    context = cli.launch.make_context("launch", line.replace("%i", "big").split())
    assert context.params["auto_resume"]
    assert (context.params["run_dir"], context.params["config"]) == ("runs/big", "big.toml")


def test_the_schema_has_every_field_of_show(tmp_path: Path) -> None:
    (tmp_path / "job.py").touch()
    RunRequest(str(tmp_path / "job.py"), 2, {}, tmp_path / "run").prepare().close()
    shown = CliRunner().invoke(cli.main, ["show", "--json", str(tmp_path / "run")]).output
    page = (DOCS / "schema.md").read_text().partition("## `report`")[0]
    rows = re.findall(r"^\| (`.*?) \|", page, re.MULTILINE)
    described = {name for row in rows for name in re.findall(r"`(\w+)`", row)}
    assert described - {"git"} == json.loads(shown).keys() - {"git"}
