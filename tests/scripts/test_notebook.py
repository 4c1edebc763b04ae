"""A notebook: a real kernel trains, is interrupted, assigns again, and launches jobs."""

from __future__ import annotations

import json
import textwrap
from pathlib import Path
from typing import Any

import pytest

from pipeworker.runs.info import Run
from support.real_jobs.jobs import Jobs
from support.real_jobs.sources import JOB

nbclient = pytest.importorskip("nbclient")
nbformat = pytest.importorskip("nbformat")

CELLS = [
    JOB
    + """
    import os, json, threading, time
    from pathlib import Path
    import pipeworker
    batches = list(data())
    """,
    """
    pipe = pipeworker.Pipeline(model, loss=loss, optimizer=optimizer, run_dir="runs/first")
    losses = [pipe.step(batch).loss for batch in batches[:3]]
    """,
    """
    try:
        pipe.step(batches[0][0])
    except pipeworker.UsageError as error:
        wrong = str(error)
    """,
    """
    pipe.step(None)  # its traceback holds the pipeline
    """,
    """
    pipe = pipeworker.Pipeline(model, loss=loss, optimizer=optimizer)
    name = pipe.run_dir.name
    pipe.step(batches[0])
    """,
    """
    first = json.loads(Path("runs/first/summary.json").read_text())
    def loss(output, target):
        os.kill(os.getpid(), 2)
    """,
    """
    class Interrupts(nn.Module):
        def forward(self, x):
            if Path("now").exists():
                Path("now").unlink()
                os.kill(os.getpid(), 2)
            return x

    pipe.close()
    pipe = pipeworker.Pipeline(
        lambda: [*model(), Interrupts()], loss=nn.functional.cross_entropy, optimizer=optimizer,
        run_dir="runs/interrupted",
    )
    pipe.step(batches[0])
    Path("now").touch()
    pipe.step(batches[1])
    """,
    """
    saved = sorted(path.name for path in Path("runs/interrupted/checkpoints").iterdir())
    """,
    """
    result = pipeworker.launch(
        "job.py", stages=1, steps=6, run_dir="runs/launched", evaluate_every=2
    )
    """,
    """
    def interrupt():
        rows = Path("runs/long/metrics.jsonl")
        while not (rows.exists() and rows.stat().st_size):
            time.sleep(0.02)
        os.kill(os.getpid(), 2)

    threading.Thread(target=interrupt).start()
    pipeworker.launch("job.py", stages=1, run_dir="runs/long", steps=1000000, max_restarts=0)
    """,
    """
    print(json.dumps({
        "losses": losses, "wrong": wrong, "name": name, "first": first, "saved": saved,
        "steps": result.steps, "loss": result.loss, "status": result.summary["status"],
        "best": result.best_evaluation["step"], "checkpoint": result.checkpoint.name,
        "long": json.loads(Path("runs/long/summary.json").read_text())["status"],
    }))
    """,
]
RAISES = {3: "UsageError", 6: "KeyboardInterrupt", 9: "KeyboardInterrupt"}
"""The cells that raise, and what."""
EVALUATED = """
    def evaluation():
        yield from list(data())[:2]
"""


def outputs(cell: Any, kind: str) -> list[Any]:
    return [output for output in cell.outputs if output.output_type == kind]


def test_a_notebook(jobs: Jobs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    launched = jobs.train("--stages", "1", "--microbatches", "4")
    (tmp_path / "job.py").write_text(textwrap.dedent(JOB) + textwrap.dedent(EVALUATED))
    book = nbformat.v4.new_notebook()
    for number, text in enumerate(CELLS):
        cell = nbformat.v4.new_code_cell(textwrap.dedent(text))
        cell.metadata.tags = ["raises-exception"] * (number in RAISES)
        book.cells.append(cell)
    monkeypatch.setenv("JPY_SESSION_NAME", str(tmp_path / "My study.ipynb"))
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    monkeypatch.setenv("PYDEVD_DISABLE_FILE_VALIDATION", "1")
    nbformat.write(book, tmp_path / "My study.ipynb")
    client = nbclient.NotebookClient(
        book, timeout=120, resources={"metadata": {"path": str(tmp_path)}}
    )
    client.execute()
    for number, cell in enumerate(book.cells):
        raised = [output.ename for output in outputs(cell, "error")]
        assert raised == [RAISES[number]] if number in RAISES else not raised, cell.outputs
    found = json.loads(outputs(book.cells[-1], "stream")[-1].text)
    assert found["losses"] == [row["loss"] for row in launched.metrics[:3]]
    assert found["wrong"].endswith("the pipeline stays open: the call has changed nothing")
    assert found["name"].startswith("My study-")
    assert (found["first"]["status"], found["first"]["steps"]) == ("done", 3)
    assert found["saved"] == ["step-00000001"]
    assert "step 1 is saved in" in "".join(o.text for o in outputs(book.cells[6], "stream"))
    assert (found["steps"], found["status"], found["best"]) == (6, "done", 6)
    assert found["loss"] == launched.metrics[-1]["loss"]
    assert found["checkpoint"] == "step-00000006"
    assert found["long"] == "interrupted"
    assert "interrupted: step " in "".join(o.text for o in outputs(book.cells[9], "stream"))
    (bar,) = outputs(book.cells[8], "display_data")  # one, which is updated in place
    assert "step 6/6" in bar.data["text/html"]
    ended = {run.name: Run.read(run).status for run in (tmp_path / "runs").iterdir()}
    assert len(ended) == 5
    assert "running" not in ended.values()
    assert [*(tmp_path / "runs").glob("My study-*/job.ipynb")]
