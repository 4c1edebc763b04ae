"""The documentation is correct: its commands print the output that it shows."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from support.pages import PAGES, ROOT, Type, Write, actions, follow, missing_line, tenth
from support.real_jobs.jobs import Jobs
from support.slow import slow

FOLLOWED = [page for page in PAGES if "```console" in page.read_text()]
PLANNED = ("README.md", "bubble.md", "schedule-file.md", "records.md")
"""Pages whose jobs are planned from measured layers, which takes time."""

LONG = (
    *("bubble.md", "coming-from.md", "data.md", "fine-tuning.md", "hooks.md", "notebooks.md"),
    *("debugging.md", "job-file.md", "many-machines.md"),
    *("own-loop.md", "plan.md", "records.md", "unattended.md"),
)
"""Pages whose commands take seconds of CPU, or start interpreters of their own."""
README = ROOT / "README.md"


@pytest.mark.parametrize(
    ("page", "steps"),
    [
        pytest.param(README, tenth, id="README.md, a tenth of the steps"),
        *(
            pytest.param(
                *(page, str),
                marks=slow if page.name in LONG or page == README else (),
                id=str(page.relative_to(ROOT)),
            )
            for page in FOLLOWED
        ),
    ],
)
def test_the_commands_of_a_page_print_what_it_shows(
    page: Path, steps: Callable[[str], str], jobs: Jobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    if page.name in PLANNED:
        for name in ("PIPEWORKER_BALANCE", "PIPEWORKER_RECOMPUTE"):
            monkeypatch.delenv(name, raising=False)
    monkeypatch.delenv("PIPEWORKER_DEVICE", raising=False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # the pages are those of a host without a GPU
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # else torchrun prints a long warning
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    follow(steps(page.read_text()), jobs)


def test_the_readme_and_all_how_tos_have_commands() -> None:
    how_tos = {page for page in PAGES if page.parent.name == "howto"}
    assert how_tos
    assert {README} | how_tos <= {*FOLLOWED}


PAGE = """
Write this:

```python
# job.py
x = 1
```

```python
y = 2
```

```console
$ python job.py \\
    --more
step 3  loss 0.25
…
$ ls
job.py
```

```console
$ python -m pdb job.py
(Pdb) p 1 + 1
2
(Pdb) quit
```
"""


def test_a_tenth_of_the_steps_is_in_all_commands_and_lines() -> None:
    page = "60 m\n```console\n$ a --steps 120\nstep 1/60  loss 0.60\nstep-00000120, 5 steps\n```"
    expected = "60 m\n```console\n$ a --steps 12\nstep 1/6  loss 0.60\nstep-00000012, 5 steps\n```"
    assert tenth(page) == expected


def test_a_page_is_parsed_into_actions() -> None:
    assert actions(PAGE) == [
        Write("job.py", "# job.py\nx = 1\n"),
        Type("python job.py     --more", ("step 3  loss 0.25", "…")),
        Type("ls", ("job.py",)),
        Type("python -m pdb job.py", ("2",), ("p 1 + 1", "quit")),
    ]


@pytest.mark.parametrize(
    ("shown", "output", "line"),
    [
        ((), "anything", None),
        (("step 3  loss 0.25",), "begin\nstep 3 loss 7.531e-04\nend", None),
        (("step 3  loss 0.25",), "step 4  loss 0.25", "step 3  loss 0.25"),
        (("a", "b"), "b\na", "b"),
        (("a", "…", "in runs/… for 1.5 s"), "a\nin runs/job-1 for 0.2 s", None),
        (("a.c",), "abc", "a.c"),
        (("2026-11-22 13:06 on …",), "2027-01-02 03:04 on vm", None),
    ],
)
def test_the_first_missing_line_is_returned(
    shown: tuple[str, ...], output: str, line: str | None
) -> None:
    assert missing_line(shown, output) == line


def test_a_wrong_page_is_detected(jobs: Jobs) -> None:
    follow(PAGE.replace("--more\nstep 3  loss 0.25", "--more"), jobs)
    with pytest.raises(AssertionError, match=r"does not print 'step 3  loss 0\.25'"):
        follow(PAGE, jobs)
    with pytest.raises(AssertionError, match="status 2"):
        follow("```console\n$ ls nowhere\n```", jobs)
