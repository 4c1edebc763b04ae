"""The job file: run with the modules beside it, and checked."""

from __future__ import annotations

import importlib
import multiprocessing
import os
import sys
import textwrap
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

from pipeworker.errors import UsageError
from pipeworker.job import file as job_file
from pipeworker.job.file import JobFile
from pipeworker.job.layers import entries
from support.slow import slow

GOOD = {
    "model": "def model(): return [nn.Linear(2, 2), nn.ReLU]",
    "loss": "def loss(output, target): return output.sum()",
    "optimizer": "def optimizer(params): return torch.optim.SGD(params, lr=0.1)",
    "data": "def data(): return []",
}


pytestmark = pytest.mark.usefixtures("as_a_worker")


def write(folder: Path, name: str = "job.py", more: str = "", **lines: str | None) -> Path:
    """Write a job file like GOOD with some names changed; None leaves one out."""
    body = [line for line in {**GOOD, **lines}.values() if line is not None]
    path = folder / name
    path.write_text("\n".join(["import torch", "from torch import nn", *body, more]))
    return path


def load(path: Path, *arguments: str) -> JobFile:
    return job_file.load(path, arguments)


def test_a_good_file(tmp_path: Path) -> None:
    job = load(write(tmp_path))
    assert job.scheduler is None
    assert len(entries(job.model())) == 2
    assert job.data() == []


def test_a_changed_file_is_compiled_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The size and the modification second may be those of Python's cached bytecode."""
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    path = write(tmp_path, more="tied = [('a', 'b')]")
    before = path.stat()
    assert load(path).tied == [("a", "b")]
    path.write_text(path.read_text().replace("'b'", "'c'"))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert load(path).tied == [("a", "c")]


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ({"model": None}, ": lacks the name model; define model, loss, optimizer and data"),
        ({"loss": None, "data": None}, "lacks the names loss, data"),
        ({"loss": "import os"}, "lacks the name loss; define model, loss, optimizer and data$"),
        ({"model": "model = 3"}, "job file .*: model is an int"),
        ({"model": "model = 3"}, "job file .*: model is an int; make it an nn.Module, a list"),
        ({"loss": "loss = 1.0"}, "job file .*: loss is a float; make it a function"),
        ({"loss": "loss = None"}, "job file .*: loss is a NoneType; make it a function"),
        ({"optimizer": "optimizer = None"}, "job file .*: optimizer is a NoneType"),
        ({"optimizer": "optimizer = 'adam'"}, "job file .*: optimizer is a str; make it a"),
        ({"optimizer": None}, "lacks the name optimizer; define"),
        ({"data": None}, "lacks the name data; define"),
        ({"scheduler": "scheduler = 3"}, "job file .*: scheduler is an int; make it a function"),
        ({"data": "data = 3"}, "job file .*: data is an int; make it an iterable"),
        ({"evaluation": "evaluation = 3"}, ": evaluation is an int; make it an iterable"),
        ({"interval": "scheduler_interval = 'month'"}, "it must be 'step' or 'epoch'"),
        ({"before_update": "before_update = 3"}, ": before_update is an int; make it a function"),
        ({"tied": "tied = 3"}, ": tied is an int; make it a list"),
        ({"names": "names = ['0']"}, "make it a dict of names in the model and the names that"),
        ({"names": "names = {'0': 'a..b'}"}, "make it a dict of names in the model"),
    ],
)
def test_a_name_that_is_missing_or_wrong(
    tmp_path: Path, lines: dict[str, Any], message: str
) -> None:
    path = write(tmp_path, **lines)
    with pytest.raises(UsageError, match=message) as caught:
        load(path)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize(
    "lines",
    [
        {"model": "model = nn.Sequential(nn.Linear(1, 1))"},
        {"model": "model = [nn.ReLU, lambda: nn.Linear(1, 1)]"},
        {"model": "class model(nn.Sequential):\n  def __init__(s): super().__init__(nn.ReLU())"},
        {"loss": "loss = nn.MSELoss()"},
        {"optimizer": "optimizer = torch.optim.Adam"},
        {"scheduler": "scheduler = None"},
        {"data": "data = [(torch.ones(1), torch.ones(1))]"},
        {"data": "data = torch.utils.data.TensorDataset(torch.ones(1))"},
    ],
)
def test_other_accepted_kinds_of_names(tmp_path: Path, lines: dict[str, Any]) -> None:
    model = load(write(tmp_path, **lines)).model
    assert entries(model() if job_file.is_function(model) else model)


def test_no_file(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="does not exist"):
        load(tmp_path / "none.py")
    with pytest.raises(UsageError, match="does not exist"):
        load(tmp_path)


def test_a_file_that_is_not_python(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"not a Python file; its name must end in \.py"):
        load(write(tmp_path, "job.txt"))


@pytest.mark.parametrize(
    ("more", "error"),
    [("1 / 0", ZeroDivisionError), ("x = = 1", SyntaxError), ("import none_such", ImportError)],
)
def test_exceptions_of_the_file_propagate(
    tmp_path: Path, more: str, error: type[Exception]
) -> None:
    with pytest.raises(error):
        load(write(tmp_path, more=more))


@pytest.mark.parametrize("name", ["job.py", "my.job.py", "my-job.py", "worker.py", "cli.py"])
@pytest.mark.parametrize(
    "line", ["import neighbour", "from . import neighbour", "from .neighbour import VALUE"]
)
def test_neighbours(tmp_path: Path, name: str, line: str) -> None:
    (tmp_path / "neighbour.py").write_text("VALUE = 5\n")
    value = "VALUE" if "VALUE" in line else "neighbour.VALUE"
    job = load(write(tmp_path, name, f"{line}\nscheduler = lambda _: {value}"))
    assert job.scheduler is not None
    assert job.scheduler(None) == 5


@pytest.mark.parametrize("line", ["import beside_target", "from . import beside_target"])
def test_neighbours_of_the_target_of_a_link(tmp_path: Path, line: str) -> None:
    link, folder = tmp_path / "near/job.py", tmp_path / "far"
    for one in (link.parent, folder):
        one.mkdir()
    (folder / "beside_target.py").write_text("VALUE = 5\n")
    link.symlink_to(write(folder, more=f"{line}\n"))
    load(link)
    found = dict(job_file.source_digests(link, job_file.modules()))
    assert [*found] == ["job.py", "beside_target.py"]


@pytest.mark.parametrize(
    ("name", "package"),
    [
        pytest.param(name, package, marks=slow if (number + package) % 2 else ())
        for number, name in enumerate(["cli", "plan", "worker", "launcher", "job", "wire"])
        for package in (True, False)
    ],
)
def test_neighbours_named_like_our_modules_are_the_users(
    tmp_path: Path, name: str, package: bool
) -> None:
    import cli  # noqa: F401
    import launcher.local  # noqa: F401

    path = tmp_path / name / "__init__.py" if package else tmp_path / f"{name}.py"
    path.parent.mkdir(exist_ok=True)
    path.write_text("MINE = True\n")
    if package:
        (path.parent / "part.py").write_text("MINE = True\n")
    more = f"import {name}\nassert {name}.MINE\n"
    more += f"from {name}.part import MINE\n" if package else ""
    load(write(tmp_path, "train.py", more))
    assert Path(sys.modules[name].__file__ or "") == path


def test_arguments_reach_the_file(tmp_path: Path) -> None:
    path = write(tmp_path, more="import sys\nscheduler = lambda _, seen=list(sys.argv): seen")
    job = load(path, "--width", "3")
    assert job.scheduler is not None
    assert job.scheduler(None) == [str(path), "--width", "3"]


def test_classes_of_the_file_can_be_pickled(tmp_path: Path) -> None:
    """A DataLoader pickles its dataset for its worker processes."""
    import pickle

    path = write(tmp_path, data="class Set(list): pass\ndata = Set()")
    data = load(path).data
    assert type(pickle.loads(pickle.dumps(data))) is type(data)


# The model.


def test_the_documented_example_is_a_job(tmp_path: Path) -> None:
    path = tmp_path / "job.py"
    path.write_text(
        textwrap.dedent(
            """
            import torch
            from torch import nn

            def model():
                return nn.Sequential(nn.Linear(2, 2), nn.ReLU())

            def loss(output, target):
                return nn.functional.cross_entropy(output, target)

            def optimizer(params):
                return torch.optim.AdamW(params, lr=3e-4)

            def data():
                yield torch.ones(4, 2), torch.zeros(4, dtype=torch.long)
            """
        )
    )
    made = load(path)
    assert [type(entry) for entry in entries(made.model()).values()] == [nn.Linear, nn.ReLU]
    assert isinstance(made.optimizer([nn.Parameter(torch.ones(1))]), torch.optim.AdamW)


def test_digests_cover_the_job_file_and_the_modules_beside_it(tmp_path: Path) -> None:
    (tmp_path / "net").mkdir()
    for name in ("job.py", "net/blocks.py", "job2.py", "net/compiled.so"):
        (tmp_path / name).write_text(name)
    modules = []
    for file in (*(tmp_path / "net").iterdir(), tmp_path / "gone.py", "/usr/lib/other.py", None):
        module = ModuleType("m")
        module.__file__ = None if file is None else str(file)
        modules.append(module)
    found = dict(job_file.source_digests(tmp_path / "job.py", modules))
    assert [*found] == ["job.py", "net/blocks.py"]
    assert len({*found.values()}) == 2
    (tmp_path / "job.py").write_text("another")
    assert dict(job_file.source_digests(tmp_path / "job.py", [])) != {"job.py": found["job.py"]}


class LazyModule(ModuleType):
    """A module of a library that is imported when an attribute is read, as speechbrain's are."""

    def __getattr__(self, name: str) -> Any:
        raise ImportError("its library is not installed")


def test_digests_of_sources_import_no_lazy_module(tmp_path: Path) -> None:
    (tmp_path / "job.py").write_text("")
    assert dict(job_file.source_digests(tmp_path / "job.py", [LazyModule("lazy")])).keys() == {
        "job.py"
    }


def test_the_modules_of_a_job_are_those_imported_since_it_began_to_load(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "earlier", ModuleType("earlier"))
    load(write(tmp_path, "first.py"))
    load(write(tmp_path, "second.py"))
    for name in ("pipeworker.late", "torch.late", "theirs"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, "blocked", None)
    monkeypatch.setitem(sys.modules, "replaced", object())
    names = [module.__name__ for module in job_file.modules()]
    assert names == ["pipeworker_job.second", "theirs"]


@pytest.mark.parametrize("name", ["job", "job.v2"])
def test_a_spawned_process_finds_what_the_job_file_defines(name: str, tmp_path: Path) -> None:
    (tmp_path / "beside.py").write_text("def answer(): return 42")
    (tmp_path / f"{name}.py").write_text(
        textwrap.dedent(
            """
            model, loss, optimizer, data = [len], min, max, [1]

            def answer(results):
                from . import beside
                results.put(beside.answer())
            """
        )
    )
    load(tmp_path / f"{name}.py")
    module = sys.modules[f"pipeworker_job.{name.replace('.', '_')}"]
    spawn = multiprocessing.get_context("spawn")
    results = spawn.SimpleQueue()
    process = spawn.Process(target=vars(module)["answer"], args=(results,))
    process.start()
    process.join(60)
    assert process.exitcode == 0
    assert results.get() == 42


def test_a_job_file_finds_none_of_the_repositorys_own_modules(tmp_path: Path) -> None:
    importlib.import_module("launcher.engines.ssh")
    load(write(tmp_path))
    assert not [name for name in sys.modules if name.partition(".")[0] in ("cli", "launcher")]
