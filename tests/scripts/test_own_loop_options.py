"""The options of ``launch`` in a script: each is an argument, or has a reason not to be one."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping
from functools import partial
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

import pipeworker
from launcher.options import LAUNCH_PARAMETERS
from pipeworker.session import process
from pipeworker.session.options import (
    NOT_OF_A_LOOP,
    NOT_OF_A_SCRIPT,
    check_options,
    option_names,
    script_request,
)

CALLS: list[tuple[Callable[..., Any], Mapping[str, str]]] = [
    (pipeworker.Pipeline, NOT_OF_A_LOOP),
    (pipeworker.train, NOT_OF_A_SCRIPT),
]


@pytest.mark.parametrize(("call", "excluded"), CALLS)
def test_every_option_of_launch_is_an_argument_or_has_a_reason(
    call: Callable[..., Any], excluded: Mapping[str, str]
) -> None:
    """A new option of launch is an argument by itself; one that is none needs a reason."""
    launch = {str(parameter.name) for parameter in LAUNCH_PARAMETERS}
    arguments = {*inspect.signature(call).parameters, *option_names(excluded)}
    assert launch - arguments == {*excluded}
    assert not arguments & {*excluded}
    for name, reason in excluded.items():
        with pytest.raises(pipeworker.UsageError, match=f"f\\(\\): {name}: "):
            check_options({name: 1}, excluded, "f()")
        assert len(reason) > 10


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("profile", r"f\(\): profile: here its name is profile_steps; use that$"),
        ("set", r"f\(\): set: .*; leave it out$"),
        ("microbatch", r"f\(\): microbatch: no such option; did you mean microbatches\?$"),
    ],
)
def test_other_names_that_launch_has_are_known(name: str, text: str) -> None:
    for _, excluded in CALLS:
        with pytest.raises(pipeworker.UsageError, match=text):
            check_options({name: 1}, excluded, "f()")


@pytest.mark.parametrize("names", [5, [5], [None], b"seed"])
def test_what_may_change_is_named_by_texts(names: Any) -> None:
    with pytest.raises(
        pipeworker.UsageError, match=r"^f\(\): allow_change is .*; make it a list of names"
    ):
        script_request({}, None, names, "f()", ranks=1, resume=True, auto_resume=False)


def test_a_run_in_a_notebook_is_named_after_it(monkeypatch: pytest.MonkeyPatch) -> None:
    variables: dict[str, str] = {}
    shell = SimpleNamespace(user_ns=variables, kernel=None)
    monkeypatch.setattr(process, "notebook_shell", lambda: shell)
    monkeypatch.delenv("JPY_SESSION_NAME", raising=False)
    monkeypatch.chdir("/tmp")
    assert process.script_path() == "/tmp/notebook.ipynb"
    monkeypatch.setenv("JPY_SESSION_NAME", "work/My study.ipynb")
    assert process.script_path() == "/tmp/My study.ipynb"
    variables["__vsc_ipynb_file__"] = "/home/me/other.ipynb"
    assert process.script_path() == "/home/me/other.ipynb"


@pytest.mark.parametrize("name", ["", "-c", "-"])
def test_a_program_without_a_file_is_called_script(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(sys, "argv", [name])
    monkeypatch.chdir("/tmp")
    assert process.script_path() == "/tmp/script"


def test_a_script_that_is_launched_as_a_job_file_does_not_train(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each worker would train it as a job of one process, before its own job begins."""
    monkeypatch.setitem(sys.modules, "pipeworker_job", ModuleType("pipeworker_job"))
    calls: list[Callable[..., Any]] = [pipeworker.Pipeline, partial(pipeworker.train, data=[])]
    for call in calls:
        with pytest.raises(pipeworker.UsageError, match=r"\(\): a job file has no loop of its own"):
            call([], loss=None, optimizer=None)
