"""Readers of untrusted bytes: each returns a value or raises the error that it documents.

A reader raises nothing else, and the bytes cause no import and no call.
"""

from __future__ import annotations

import json
import math
import sys
from collections import OrderedDict, defaultdict, deque, namedtuple
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import msgpack
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pipeworker.display import text
from pipeworker.errors import PeerLost, PipeworkerError, ProtocolError, ScheduleError, UsageError
from pipeworker.facts.checkpoint_file import CheckpointFile
from pipeworker.facts.connections import Skip, Tie
from pipeworker.facts.layer_names import LayerNames
from pipeworker.facts.position import Position
from pipeworker.facts.step import Batch
from pipeworker.job.options import Options
from pipeworker.plan.actions import Edge, Payload, parse_actions
from pipeworker.record.checkpoint.manifest import Manifest
from pipeworker.record.run_record import RunRecord
from pipeworker.record.rundir import RunDir
from pipeworker.runs import listing, show
from pipeworker.wire import codec, lines
from pipeworker.wire.messages.checkpoint import Copy, Restore, Save, Saved
from pipeworker.wire.messages.directions import Advance
from pipeworker.wire.messages.plan import Described, Plan, StageRange
from pipeworker.wire.messages.presence import Abort, Heartbeat, Signalled, Welcome
from pipeworker.wire.messages.step import Call, CallKind, Loaded, StepDone, Update
from pipeworker.worker.internals import pytree
from pipeworker.worker.transport import frame as frames
from pipeworker.worker.transport.channel import Receiver
from pipeworker.worker.transport.layout import Layout, buffer_for, unpack
from pipeworker.worker.transport.links import mapped
from pipeworker.worker.transport.structure import TypeRegistry
from support.faults.mutations import jsons, msgpacked, texts
from support.in_process.transport import FORTH, MemoryLink, connect_all

CPU = torch.device("cpu")
Pair = namedtuple("Pair", "left right")


class Mode(Enum):
    PLAIN = 1


@dataclass
class State:
    x: Any
    note: Any


pytree.register_dataclass(State)
KINDS = TypeRegistry((Pair, State, Mode))
X = torch.arange(6.0).reshape(2, 3)
VALUES: list[Any] = [
    X,
    X.t(),
    (X, [X, 1, "word"], {"a": X[:, ::2], 2: None, Mode.PLAIN: 2.5}),
    Pair(State(X.expand(4, 2, 3), None), OrderedDict(a=True, b=b"\xff")),
    [defaultdict(list, {"k": X[:0]}), deque([X, -0.0], 3), torch.zeros(())],
]
HEADERS = [frames.to_bytes(frames.describe(value, KINDS)[0]) for value in VALUES]
MESSAGES = [
    codec.encode(message, 1)
    for message in (
        Heartbeat(0, Position()),
        Abort("no", 1),
        Described(0, ("Linear", "Linear"), (Skip(0, 1, "x"),), types=("job.Pair",)),
        Plan((StageRange(0, 0, 1),), (str(FORTH),), (), (Tie(("a",), (0,)),), "0F0", ((0,), (1,))),
        Welcome("{}", "runs/x", ((0,), (1,)), 1, Restore(3, slot=1, ranks=2)),
        Advance(Save(2, 1), Update(2), Copy(2, 0, save=True)),
        StepDone(0, 2, (0.5,), (1.0,), (0.5,), 0.1, 0.1, 1, Batch(0, 4, 4, 0), 1, 0.1),
        Saved(0, 2, (CheckpointFile("model.safetensors", 9, 9),), "no space left"),
        Call(0, CallKind.LOAD, loaded=Loaded(2, 1024.0, 3, 1)),
        Signalled(0, "SIGTERM"),
    )
]
JOB = ("{}", "runs/x", "token", "host")
LINES = [
    lines.encode(event)
    for event in (
        lines.Configuration(*JOB),
        lines.Configuration(*JOB, 2, -1, 2, lines.Snapshot(3, 1, 2), ("it was killed",)),
        lines.Restart(2, "it was killed", 2),
        lines.Verdict("done", 0, 3, 1.0, (1, 2), 0.5, None, ("it was killed",)),
        lines.WorkerExited(1, 1, -9, Position()),
    )
]
MANIFEST = Manifest(
    *(3, 2, LayerNames.numbered(2), (CheckpointFile("model-00001-of-00001.safetensors", 1, 1),)),
    *((("0.weight", "1.weight"),), {"scale": 2.0}, {"step": 3, "loss": 0.5}, 2),
)
MANIFESTS = [json.dumps(MANIFEST.to_json()).encode()]
OPTIONS = [Options("job.py", 2, 4, ("a",), balance=(1, 2), clip_grad_norm=1).to_json().encode()]
RECORDS = [
    b'{"version": 1, "options": %s, "resumed": [{"options": {"seed": 3}}]}' % text
    for text in OPTIONS
]

FACTS = {
    "started": "2026-05-04T03:02:01+00:00",
    "command": ["/bin/pipeworker", "launch", "--hosts", "a:1", "--", "x"],
    "versions": {"torch": "2.13.0"},
    "git": {"commit": "c0ffee", "dirty": True},
    "host": "here",
    "platform": "Linux",
    "job": "job.py",
    "torchrun": "none",
}
STARTED = [json.dumps({**json.loads(data), **FACTS}).encode() for data in RECORDS]
SUMMARIES = [
    b'{"status": "done", "steps": 3, "restarts": 1, "causes": ["x"], "seconds": 1.5, '
    b'"peak_memory_bytes": [3], "bubble": 0.5, "error": null}'
]
ROWS = [b'{"step": 3, "loss": 0.5, "samples_per_second": 2.0}\n']


def check_reader(reader: Callable[[Any], Any], data: Any, *allowed: type[Exception]) -> None:
    """Check that a reader returns a value or raises one of these errors, and imports nothing."""
    before = set(sys.modules)
    with suppress(*allowed):
        reader(data)
    assert set(sys.modules) == before


@given(msgpacked(HEADERS))
def test_headers_of_frames(data: bytes) -> None:
    """The tensors of a header that was read can be received, unpacked and assembled."""

    def read(header: bytes) -> None:
        frame = frames.from_bytes(header, KINDS)
        if any(_span(layout) > 1 << 20 or layout.dtype in NOT_COPIED for layout in frame.tensors):
            return
        buffers = [buffer_for(layout, _zeros) for layout in frame.tensors]
        value = frames.assemble(frame, list(map(unpack, buffers, frame.tensors)), KINDS)
        frames.describe(value, KINDS)

    check_reader(read, data, PipeworkerError)


NOT_COPIED = {getattr(torch, f"{sign}int{bits}") for sign in ("", "u") for bits in range(1, 8)}
"""Dtypes for which torch implements hardly an operation."""


def _span(layout: Layout) -> int:
    reach = sum(s * n for s, n in zip(layout.stride, layout.shape, strict=True))
    return max(reach, math.prod(layout.shape)) * layout.dtype.itemsize


def _zeros(count: int) -> torch.Tensor:
    return torch.zeros(count, dtype=torch.uint8)


class SmallLink(MemoryLink):
    """A link in memory whose waits end at once and whose buffers are bounded."""

    def __init__(self) -> None:
        super().__init__(0.001)

    def allocate(self, count: int) -> torch.Tensor:
        if count > 1 << 20:
            raise PeerLost("too large for a test")
        return super().allocate(count)


heads = st.tuples(st.integers(-(2**63), 2**63 - 1) | st.integers(0, 2000), st.integers(0, 1))


@given(st.none() | heads, msgpacked(HEADERS))
def test_headers_of_channels(head: tuple[int, int] | None, data: bytes) -> None:
    def read(header: bytes) -> None:
        link = SmallLink()
        receiver = Receiver(link, 1, KINDS)
        for tag, tensor in frames.header_messages(0, header):
            if head is not None and tag == frames.HEADER:
                size = frames.HEAD.size
                tensor[:size] = frames.bytes_tensor(frames.HEAD.pack(*head))
            link.send(tensor, tag)
        receiver.begin(None, [0])
        receiver.receive(0)

    check_reader(read, data, PipeworkerError)


POSTS = [msgpack.packb(p) for p in ((3,), (3, 0, 64), (3, 0, 64, b"memory", b"event"))]
DONES = [msgpack.packb(d) for d in ((3, b""), (3, b"event"))]


@given(msgpacked(POSTS))
def test_posts_of_devices(data: bytes) -> None:
    check_reader(mapped.read_post, data, ProtocolError)


@given(msgpacked(DONES))
def test_notices_of_devices(data: bytes) -> None:
    check_reader(mapped.read_notice, data, ProtocolError)


@pytest.mark.parametrize(
    ("length", "microbatch"),
    [(0, 0), (-1, 0), (frames.MAX_HEADER_BYTES + 1, 0), (2**63 - 1, 0), (len(HEADERS[0]), 1)],
)
def test_the_length_of_a_header_is_checked_before_memory_is_allocated(
    length: int, microbatch: int
) -> None:
    link = SmallLink()
    receiver = Receiver(link, 1, KINDS)
    head = frames.HEAD.pack(length, microbatch) + HEADERS[0]
    link.send(frames.bytes_tensor(head.ljust(frames.HEADER_BYTES, b"\0")), frames.HEADER)
    receiver.begin(0, [0])
    with pytest.raises(ProtocolError, match=f"a header of {length} bytes for value"):
        receiver.receive(0)


@given(msgpacked(MESSAGES))
def test_frames_of_the_control_plane(data: bytes) -> None:
    check_reader(codec.decode, data, ProtocolError)


@given(jsons(LINES))
def test_lines_of_the_launcher(data: bytes) -> None:
    check_reader(lines.decode, data, ProtocolError)


@given(jsons(MANIFESTS))
def test_manifests(data: bytes) -> None:
    with TemporaryDirectory() as folder:
        path = Path(folder) / "manifest.json"
        path.write_bytes(data)
        check_reader(Manifest.read, path, UsageError)


@given(jsons(RECORDS))
def test_records_of_runs(data: bytes) -> None:
    with TemporaryDirectory() as folder:
        run = RunDir(Path(folder))
        run.run.write_bytes(data)
        check_reader(
            lambda _: Options.of(RunRecord.read(run).options), run, ProtocolError, UsageError
        )


@given(jsons(STARTED), jsons(SUMMARIES) | st.none(), jsons(ROWS), jsons(ROWS))
def test_runs_that_are_shown_and_listed(
    run: bytes, summary: bytes | None, metrics: bytes, evaluation: bytes
) -> None:
    text.table([["imports rich"]])
    with TemporaryDirectory() as folder:
        path = Path(folder) / "run"
        made = RunDir(path)
        path.mkdir()
        made.run.write_bytes(run)
        made.metrics.write_bytes(metrics + b"\n")
        made.evaluation.write_bytes(evaluation + b"\n")
        if summary is not None:
            made.summary.write_bytes(summary)
        check_reader(show.show, path, UsageError)
        check_reader(lambda path: show.show(path, as_json=True), path, UsageError)
        shown = listing.list_runs(Path(folder))
        assert shown.replace("\n", "").isprintable()


@given(jsons(OPTIONS))
def test_options(data: bytes) -> None:
    check_reader(Options.from_json, data.decode(errors="replace"), ProtocolError, UsageError)


@given(texts(["0F0 0>A0 0>T0@1 3<TIE0@1", "1<G3 1I3"]))
def test_actions(text: str) -> None:
    check_reader(parse_actions, text, ScheduleError)


@given(texts([str(Edge(0, 12, payload)) for payload in Payload]))
def test_edges(text: str) -> None:
    check_reader(Edge.parse, text, ScheduleError)


CALLS = [("os", "system"), ("TRAP", "spring")]  # TRAP: a module that is not imported yet


@pytest.mark.parametrize(("module", "name"), CALLS)
@pytest.mark.parametrize("backend", ["auto", "gloo"])
def test_a_header_that_names_a_function_calls_nothing(
    module: str, name: str, backend: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Torch's own format names functions: a defaultdict's factory, and the class of an enum."""
    trap = f"trap_{backend}_{tmp_path.name.replace('-', '_')}"
    (tmp_path / f"{trap}.py").write_text("import sys\nspring = sys.sprung = len\n")
    monkeypatch.syspath_prepend(tmp_path)
    module = module.replace("TRAP", trap)
    factory = {"default_factory_module": module, "default_factory_name": name, "dict_context": []}
    enum = json.dumps([{"__enum__": True, "fqn": f"{module}:{name}", "name": "x"}])
    leaf: dict[str, Any] = {"type": None, "context": None, "children_spec": []}
    ran: list[str] = []
    monkeypatch.setattr("os.system", ran.append)
    for structure in (
        {"type": "collections.defaultdict", "context": factory, "children_spec": []},
        {"type": "builtins.dict", "context": enum, "children_spec": [leaf]},
        f"{module}:{name}",
        (5, (f"{module}:{name}", ()), 0),
        (16, (f"{module}:{name}",), 0),
        (16, (f"{module}:{name}", "true"), 0),
        (3, ((3, f"{module}:{name}", "x"),), 0),
    ):
        if isinstance(structure, dict):
            structure = json.dumps([1, structure])
        header = msgpack.packb((structure, [None], [], False))
        (source, target) = (links[FORTH] for links in connect_all((FORTH,), 2, backend))
        receiver = Receiver(target, 1, KINDS)
        pending = [
            source.control.send(tensor, tag) for tag, tensor in frames.header_messages(0, header)
        ]
        receiver.begin(0, [0])
        with pytest.raises(ProtocolError, match="the data of a neighbour"):
            receiver.receive(0)
        for one in pending:
            one.wait()
        source.close()
        target.close()
    assert not ran
    assert trap not in sys.modules
    assert not hasattr(sys, "sprung")
