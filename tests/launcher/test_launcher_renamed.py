"""Former names of options: on the command line, in files and in variables."""

from __future__ import annotations

from pathlib import Path

import pytest

import cli
from support.real_jobs.launcher import Launch, launcher, refused, run

launch = pytest.fixture(launcher)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("--restarts", "3"), "--restarts: this option was renamed; use --max-restarts"),
        (("--elastic=1",), "--elastic: this option was renamed; use --min-stages"),
        (("--go-on",), "--go-on: this option was renamed; use --auto-resume"),
        (("--allow", "seed"), "--allow: this option was renamed; use --allow-change"),
        (
            ("--no-init-partial",),
            "--no-init-partial: this option was renamed; use --init-strict",
        ),
        (
            ("--read-data", "once"),
            "--read-data: this option was renamed; use --data-reader, where once is now called "
            "first",
        ),
    ],
)
def test_a_former_option_gets_one_line_that_names_the_present_one(
    launch: Launch, words: tuple[str, ...], expected: str
) -> None:
    assert refused(*words) == expected
    ranks = run(*words, "jobs/job.py", command=cli.worker)
    assert (ranks.exit_code, ranks.output) == (2, f"error: {expected}\n")


def test_init_partial_is_still_accepted_and_not_shown(launch: Launch) -> None:
    Path("w.safetensors").write_bytes(b"\2\0\0\0\0\0\0\0{}")
    weights = ("--stages", "1", "--init-from", "w.safetensors")
    assert launch(*weights).init_strict
    assert not launch(*weights, "--init-partial").init_strict
    assert not launch(*weights, "--no-init-strict").init_strict
    shown = run("launch", "--help").output
    assert "  --no-init-strict  " in shown
    assert "init-partial" not in shown


def test_a_former_option_of_a_file_or_a_variable_is_an_error(
    launch: Launch, monkeypatch: pytest.MonkeyPatch
) -> None:
    renamed = "this option was renamed; use"
    for key, present in (
        ("restarts = 3", "max-restarts"),
        ('read_data = "once"', "data-reader, where once is now called first"),
        ("init-partial = true", "init-strict = false for init-partial = true"),
    ):
        Path("pipeworker.toml").write_text(key)
        word = key.split()[0].replace("_", "-")
        assert refused() == f"pipeworker.toml: {word}: {renamed} {present}"
    Path("pipeworker.toml").unlink()
    monkeypatch.setenv("PIPEWORKER_ELASTIC", "2")
    assert refused() == f"PIPEWORKER_ELASTIC: {renamed} PIPEWORKER_MIN_STAGES"
    monkeypatch.delenv("PIPEWORKER_ELASTIC")
    monkeypatch.setenv("PIPEWORKER_INIT_PARTIAL", "1")
    assert refused() == (
        f"PIPEWORKER_INIT_PARTIAL: {renamed} PIPEWORKER_INIT_STRICT=0 for PIPEWORKER_INIT_PARTIAL=1"
    )
    monkeypatch.delenv("PIPEWORKER_INIT_PARTIAL")
    monkeypatch.setenv("PIPEWORKER_GO_ON", "1")
    only = "this option was renamed, and is only for the command line; use --auto-resume"
    assert refused() == f"PIPEWORKER_GO_ON: {only}"
    monkeypatch.delenv("PIPEWORKER_GO_ON")
    Path("pipeworker.toml").write_text("go-on = true")
    assert refused() == f"pipeworker.toml: go-on: {only}"
