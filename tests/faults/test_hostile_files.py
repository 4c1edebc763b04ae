"""Files of a run, or of weights, that another program made: each command has one clear answer.

It ends, with status 0, or with one message and the status that it documents.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import zlib
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result
from safetensors.torch import save_file
from torch import nn

import cli
from pipeworker.environment import facts
from pipeworker.facts.layer_names import LayerNames
from pipeworker.job.option_parsing import make_options
from pipeworker.record import run_record
from pipeworker.record.checkpoint.checkpoint import Checkpoint
from pipeworker.record.checkpoint.manifest import MANIFEST, WEIGHTS_INDEX, Manifest, file_names
from pipeworker.record.checkpoint.restore import restore, restored_position
from pipeworker.record.checkpoint.stage_state import StageState
from pipeworker.record.rundir import RunDir
from pipeworker.record.weights.initial_weights import InitialWeights
from pipeworker.runs.begin import PreparedRun
from pipeworker.wire.lines import Verdict
from support.in_process.checkpoints import part, save_worker_files
from support.slow import mostly_slow

RUN = RunDir(Path("runs/run"))
SAVED = RUN.checkpoints.at(2)
STATE = file_names(0, 1)[2]
BEGIN = ("launch", "--stages", "1", "--run-dir", "new", "job.py", "--init-from")
COMMANDS = {
    "show": ("show", str(RUN.path)),
    "show --json": ("show", "--json", str(RUN.path)),
    "list": ("list",),
    "list --json": ("list", "--json"),
    "checkpoint": ("checkpoint", str(RUN.path)),
    "export": ("export", str(RUN.path), "out.safetensors"),
    "resume": ("launch", "--resume", "--run-dir", str(RUN.path), "job.py"),
    "init from a run": (*BEGIN, str(RUN.path)),
}
OF_WEIGHTS = {
    "init from a folder": (*BEGIN, "weights"),
    "init from an index": (*BEGIN, f"weights/{WEIGHTS_INDEX}"),
    "init from a file": (*BEGIN, "weights/a.safetensors"),
    "init from a pickle": (*BEGIN, "weights/b.pt"),
}
READERS = COMMANDS.keys() - {"show --json", "list"}  # these read the same
JSON = [RUN.run, RUN.summary, RUN.metrics, RUN.evaluation, SAVED / MANIFEST, SAVED / STATE]
WEIGHTS = [Path("weights") / name for name in (WEIGHTS_INDEX, "a.safetensors", "b.pt")]
FILES = [*JSON, RUN.plan, RUN.lock, *(SAVED / name for name in file_names(0, 1)[:2]), *WEIGHTS]


def stage() -> StageState:
    layer = nn.Linear(2, 2)
    optimizer = torch.optim.Adam(layer.parameters())
    layer(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    return part([layer], 0, optimizer)


def begin(run: RunDir, job: Path) -> None:
    run.path.mkdir(parents=True)
    options = json.loads(make_options(str(job), 1, {"threads": 1, "steps": 4}).to_json())
    process = {**facts(), "origins": {"steps": "a file"}, "git": {"commit": "c0ffee"}}
    run_record.write(run, options, process)


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a run that was resumed and is done, another one, and files of weights."""
    folder = tmp_path_factory.mktemp("sound")
    (folder / "job.py").write_text("job = 1\n")
    begin(RunDir(folder / "runs/other"), folder / "job.py")
    run = RunDir(folder / RUN.path)
    begin(run, folder / "job.py")
    record = run_record.RunRecord.read(run)
    record.add_resume({**record.options, "steps": 5}, facts(), 1)
    row = {"loss": 0.5, "samples": 2, "samples_per_second": 9.5, "grad_norm": None, "epoch": 0}
    run.metrics.write_text("".join(json.dumps({"step": n, **row}) + "\n" for n in (1, 2, 3)))
    run.evaluation.write_text('{"step": 2, "loss": 0.5, "accuracy": 0.25}\n')
    run_record.write_summary(run, Verdict("done", 0, 3, 2.5, (3 << 20,), 0.25, None, ("x",)), 1)
    run.plan.write_text('{"stages": []}')
    run.lock.touch()
    made, names = stage(), LayerNames.numbered(1)
    files = save_worker_files(
        run.checkpoints.partial(2), 0, 1, [made], position={"epoch": 0, "index": 2}
    )
    run.checkpoints.commit(Manifest(2, 1, names, files, evaluation={"step": 2, "loss": 0.5}))
    weights = {f"0.{name}": value for name, value in made.layers[0].state_dict().items()}
    (folder / "weights").mkdir()
    save_file(weights, folder / "weights/a.safetensors")
    torch.save(weights, folder / "weights/b.pt")
    index = {"weight_map": dict.fromkeys(weights, "a.safetensors")}
    (folder / "weights" / WEIGHTS_INDEX).write_text(json.dumps(index))
    return folder


def train(prepared: PreparedRun, *_: object) -> int:
    """Read what a job would read before its first step."""
    options = prepared.options
    with prepared.lock:
        if options.resume:
            files = Checkpoint(Path(options.resume)).worker_files()
            restore(files, [stage()])
            restored_position(files)
        elif options.init_from:
            initial = InitialWeights(Path(options.init_from), LayerNames.numbered(1))
            initial.load(stage())
            initial.check_complete(strict=True, first_worker=True)
    return 0


@pytest.fixture
def invoke(
    sound: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[[str, Callable[[], object]], Result]:
    """Run a command in a copy of the folder in which something was changed."""
    monkeypatch.setattr("launcher.local.run", train)
    monkeypatch.setattr("pipeworker.runs.begin.git", lambda _: {})
    folder = tmp_path / "copy"

    def invoke(command: str, change: Callable[[], object]) -> Result:
        monkeypatch.chdir(tmp_path)
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(sound, folder)
        monkeypatch.chdir(folder)
        change()
        return CliRunner().invoke(cli.main, {**COMMANDS, **OF_WEIGHTS}[command])

    return invoke


def assert_answered(command: str, result: Result) -> None:
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exc_info
    assert result.exit_code in (0, 1, 2)
    assert result.output.replace("\n", "").isprintable()
    if result.exit_code:
        assert result.output.startswith("error: ")
        assert len(result.output) < 1500
    if command.startswith("list"):
        assert result.exit_code == 0
        assert "other" in result.output


@pytest.mark.parametrize("command", [*COMMANDS, *OF_WEIGHTS])
def test_sound_files_are_read(
    invoke: Callable[[str, Callable[[], object]], Result], command: str
) -> None:
    result = invoke(command, lambda: None)
    assert_answered(command, result)
    assert result.exit_code == (2 if command == "checkpoint" else 0)  # no job is running


CONTENTS = {
    "empty": b"",
    "NUL": b"\0" * 100_000,
    "not UTF-8": b"\xff\xfe\n",
    "list": b"[]\n",
    "dict": b"{}\n",
    "null": b"null\n",
    "deep": b"[" * 100_000,
    "nested": b'{"a":' * 900 + b"1" + b"}" * 900,
    "digits": b"1" * 5000,
    "NaN": b"NaN",
}


def special() -> Iterator[Callable[[Path], object]]:
    """Yield what may be in place of a file, besides a file."""

    def bind(path: Path) -> None:
        with socket.socket(socket.AF_UNIX) as made:
            made.bind(str(path))

    def sparse(path: Path) -> None:
        with path.open("wb") as file:
            file.truncate(40 << 30)

    yield os.mkfifo
    yield Path.mkdir
    yield bind
    yield lambda path: path.symlink_to("/dev/zero")
    yield lambda path: path.symlink_to(path.name)
    yield sparse


def describe_again(path: Path) -> None:
    """Describe the changed file of a checkpoint in its manifest, so that it is read."""
    manifest = path.parent / MANIFEST
    if path.name in file_names(0, 1):
        content, data = json.loads(manifest.read_text()), path.read_bytes()
        content["files"][path.name] = {"bytes": len(data), "crc32": zlib.crc32(data)}
        manifest.write_text(json.dumps({k: v for k, v in content.items() if k != "crc32"}))


@pytest.mark.parametrize("path", mostly_slow(FILES, 4), ids=lambda path: path.name)
def test_anything_in_place_of_a_file(
    invoke: Callable[[str, Callable[[], object]], Result], path: Path
) -> None:
    """Two commands meet each content in a file, others in the next file: all meet each content."""

    def write(data: bytes) -> None:
        path.write_bytes(data)
        describe_again(path)

    def put(make: Callable[[Path], object]) -> None:
        path.unlink()
        make(path)

    commands = sorted(OF_WEIGHTS if path in WEIGHTS else READERS)
    half = len(commands) // 2
    changes = [partial(write, data) for data in CONTENTS.values()]
    changes += [partial(put, make) for make in special()]
    for number, change in enumerate(changes, FILES.index(path)):
        for command in (commands * 2)[number % len(commands) :][: half + 1 : half]:
            assert_answered(command, invoke(command, change))


VALUES = (
    b"9" * 4000,
    b"{}",
    b'"a\\u0000b"',
    b'"\\ud800"',
    b"[" * 900 + b"]" * 900,
    b"NaN",
    b"[null]",
    b"-1",
    b"1e999",
    b'{"a": {"\\u0000": [3]}}',
    b"null",
    b'["\\ud800", "\\u0000"]',
)


def places(value: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    yield at
    if isinstance(value, (dict, list)):
        for key in value if isinstance(value, dict) else range(len(value)):
            yield from places(value[key], (*at, key))


def replaced(value: Any, at: tuple[Any, ...]) -> Any:
    if not at:
        return "HERE"
    copy = value.copy()
    copy[at[0]] = replaced(value[at[0]], at[1:])
    return copy


@pytest.mark.parametrize("path", mostly_slow([*JSON, WEIGHTS[0]], 4), ids=lambda path: path.name)
def test_any_value_in_place_of_another(
    invoke: Callable[[str, Callable[[], object]], Result], sound: Path, path: Path
) -> None:
    """Each place gets another one of the values; few places get several."""
    lines = (sound / path).read_text().splitlines()
    content = json.loads(lines[-1] if path.suffix == ".jsonl" else "".join(lines))
    content.pop("crc32", None)
    commands = ("resume",) if path.name == STATE else ("show", "list --json", "resume")
    commands = ("init from an index",) if path in WEIGHTS else commands
    found = [*places(content)]
    for number in range(max(len(found), 4 * len(VALUES))):
        raw = json.dumps(replaced(content, found[number % len(found)])).encode()
        data = raw.replace(b'"HERE"', VALUES[number % len(VALUES)]) + b"\n"

        def write(data: bytes = data) -> None:
            path.write_bytes(data)
            describe_again(path)

        command = commands[number % len(commands)]
        assert_answered(command, invoke(command, write))


BOTH = """
import runpy, sys

run, name = sys.argv[1:]
for words in (("show", run), ("init", name)):
    sys.argv[1:] = words
    try:
        runpy.run_module("pipeworker", run_name="__main__")
    except SystemExit as end:
        assert not end.code
    if words[0] == "show":
        print("both", flush=True)
"""


def test_output_escapes_what_its_encoding_lacks(sound: Path, tmp_path: Path) -> None:
    shutil.copytree(sound, tmp_path, dirs_exist_ok=True)
    record = tmp_path / RUN.run
    content = json.loads(record.read_text())
    record.write_text(json.dumps({**content, "host": "\u0142", "platform": "\ud800"}))
    done = subprocess.run(
        [sys.executable, "-c", BOTH, str(RUN.path), "\u0142-\udcff.py"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONIOENCODING": "latin-1"},
        capture_output=True,
        timeout=60,
    )
    assert (done.returncode, done.stderr) == (0, b"")
    shown, made = done.stdout.split(b"both\n")
    assert b"\\u0142" in shown
    assert b"\\u0142" in made
