"""The built distribution: its metadata, what a wheel holds, and that it trains once installed."""

from __future__ import annotations

import subprocess
import sys
import sysconfig
import tarfile
import textwrap
import venv
import zipfile
from pathlib import Path

import pytest
from packaging.metadata import Metadata

from support.pages import ROOT
from support.real_jobs.sources import JOB
from support.slow import slow


def run(*words: object, cwd: Path) -> str:
    """Run a command to its end and return its output; it must succeed."""
    ran = subprocess.run([*map(str, words)], cwd=cwd, capture_output=True, text=True, timeout=100)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return ran.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the sdist from a copy of the repository, and from the sdist the wheel; return it."""
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("dist")
    names = run("git", "ls-files", "--cached", "--others", "--exclude-standard", cwd=ROOT)
    for name in names.splitlines():
        if (ROOT / name).is_file():
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            (source / name).write_bytes((ROOT / name).read_bytes())
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", out, source, cwd=source)
    (built,) = out.glob("*.whl")
    return built


@slow
@slow
def test_an_index_accepts_the_metadata_and_shows_the_readme(wheel: Path) -> None:
    (sdist,) = wheel.parent.glob("*.tar.gz")
    name = sdist.name.removesuffix(".tar.gz")
    with zipfile.ZipFile(wheel) as zipped, tarfile.open(sdist) as packed:
        described = packed.extractfile(f"{name}/PKG-INFO")
        assert described
        for data in (zipped.read(f"{name}.dist-info/METADATA"), described.read()):
            metadata = Metadata.from_email(data, validate=True)
            assert metadata.description == (ROOT / "README.md").read_text()
            assert metadata.description_content_type == "text/markdown"


@slow
def test_an_sdist_holds_no_test(wheel: Path) -> None:
    """setuptools alone would add tests/test*.py, without what these import."""
    (sdist,) = wheel.parent.glob("*.tar.gz")
    with tarfile.open(sdist) as packed:
        assert not any("/tests/" in name for name in packed.getnames())


@slow
def test_a_wheel_holds_all_of_the_source_within_the_package(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    top = {name.partition("/")[0] for name in names}
    assert {name for name in top if not name.endswith(".dist-info")} == {"pipeworker"}
    sources = {
        str(file.relative_to(ROOT))
        for folder in ("pipeworker", "launcher")
        for file in (ROOT / folder).rglob("*.py")
    }
    installed = {name.replace("pipeworker/_command/", "") for name in names}
    assert {*sources, "cli.py"} == {name for name in installed if name.endswith(".py")}


@slow
def test_an_installed_wheel_trains(wheel: Path, tmp_path: Path) -> None:
    """A job trains in a fresh environment.

    The packages that the wheel requires are shared with the environment of the tests by a path
    file: only pipeworker itself is installed.
    """
    home, job = tmp_path / "home", tmp_path / "job"
    job.mkdir()
    venv.create(home, with_pip=False)
    python = home / "bin" / "python"
    found = run(python, "-c", "import site; print(site.getsitepackages()[0])", cwd=home)
    site = Path(found.strip())
    (site / "shared.pth").write_text(sysconfig.get_path("purelib"))
    install = ("-m", "pip", "--python", python, "install", "--no-deps", "--no-index", wheel)
    run(sys.executable, *install, cwd=home)
    added = {path.name for path in site.iterdir() if not path.name.endswith(".dist-info")}
    assert added == {"pipeworker", "shared.pth"}

    (job / "model.py").write_text(textwrap.dedent(JOB))
    words = ("launch", "--stages", "2", "--steps", "2", "--run-dir", "run", "model.py")
    run(home / "bin" / "pipeworker", *words, cwd=job)
    assert (job / "run" / "metrics.jsonl").read_text().count("\n") == 2
    found = run(python, "-c", "import pipeworker; print(pipeworker.__file__)", cwd=job)
    assert Path(found.strip()).is_relative_to(site)
