"""A worker of the job that sends what cannot be: it is named, and the job ends; nothing else does.

Each of these reads as a message; what is wrong with them the job alone knows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace

import msgpack
import pytest

from pipeworker.coordinator.events import Garbled
from pipeworker.coordinator.rendezvous import Rendezvous
from pipeworker.coordinator.states import State
from pipeworker.errors import ProtocolError
from pipeworker.job import options
from pipeworker.wire import codec
from pipeworker.wire.messages.directions import FromWorker
from pipeworker.wire.messages.evaluation import EvaluationDone
from pipeworker.wire.messages.limits import LONGEST_VALUE, MOST_KEYS, MOST_MICROBATCHES
from pipeworker.wire.messages.plan import Built, Described, Plan, Ready
from pipeworker.wire.messages.position import Position
from pipeworker.wire.messages.presence import Heartbeat
from pipeworker.wire.messages.step import Batch, StepDone, Upcoming
from pipeworker.wire.messages.store import StoreOperation, StoreRequest
from support.coordinator import BATCH, LAYERS, Scripted, ready_of

WHO = "stage 1 (pid 1001 on host) sent what cannot be: "
DONE = StepDone(1, 1, (0.5,), (), (1.0,), 0.0, 0.1, 0, None)


def described() -> Scripted:
    job = Scripted(2)
    job.join()
    job.describe()
    return job


def running() -> Scripted:
    return Scripted(2).running()


@pytest.mark.parametrize(
    ("begin", "lie"),
    [
        (described, Ready(1, (Built(5, 3, LAYERS[3:], 8),), "cpu", None)),
        (described, Ready(1, (), "cpu", None)),
        (described, Ready(1, (Built(1, 0, LAYERS, 8),), "cpu", None)),
        (running, replace(DONE, batch=replace(BATCH, microbatches=5))),
        (running, replace(DONE, batch=replace(BATCH, microbatches=0, samples=0))),
        (running, Upcoming(1, 2)),
        (running, replace(DONE, rank=0)),
        (running, StoreRequest(1, 1, StoreOperation.ADD, ("k",), b"many")),
    ],
    ids=lambda value: getattr(value, "__name__", None) or type(value).__name__,
)
def test_a_lie_names_its_teller(begin: Callable[[], Scripted], lie: FromWorker) -> None:
    job = begin()
    job.says(lie, b"w1")
    assert job.failure.message.startswith(f"{WHO}{type(lie).__name__}")
    assert job.failure.stage == "stage 1"
    assert job.ended.exit_status == 1


def test_the_truth_does_not() -> None:
    job = described()
    (plan,) = job.sent(1, Plan)
    assert job.says(ready_of(1, plan, LAYERS, None)) == []
    assert job.state() is State.BUILDING


def test_what_is_no_message_names_its_sender_too() -> None:
    job = running()
    job.handle(Garbled(b"stranger", "a malformed frame: not msgpack"))
    assert job.state() is State.STEPPING
    job.handle(Garbled(b"w1", "a malformed frame: not msgpack"))
    assert job.failure.message == f"{WHO}a malformed frame: not msgpack"


def step_done(**wrong: object) -> list[object]:
    """The fields of one, but for what is wrong."""
    right = [1, 1, [], [], [], 0.0, 0.1, 0, None, -1, 0.0]
    names = [field.name for field in fields(StepDone)]
    return [wrong.get(name, value) for name, value in zip(names, right, strict=True)]


def model(**wrong: object) -> list[object]:
    """The fields of what describes one, but for what is wrong."""
    right = [0, ["Linear"], [], [], 0, [], [], [], [], []]
    names = [field.name for field in fields(Described)]
    return [wrong.get(name, value) for name, value in zip(names, right, strict=True)]


WRONG = [
    ("StepDone", step_done(squares=[-4.0]), "a negative sum of squares"),
    ("StepDone", step_done(squares=[1.0] * 41), "41 squares"),
    ("StepDone", step_done(losses=[1.0], counts=[1.0, 2.0]), "2 counts for 1 losses"),
    ("StepDone", step_done(busy=-1.0), "-1.0 seconds of work"),
    ("StepDone", step_done(batch=[1, 10, 0, 0, 0]), "in 0 micro-batches"),
    ("StepDone", step_done(batch=[1, 10, 10**7, 0, 0]), "in 10000000 micro-batches"),
    ("StepDone", step_done(batch=[1, -3, 1, 0, 0]), "a mini-batch of -3 samples"),
    ("StepDone", step_done(batch=[1, 0, 1, 0, 0]), "a mini-batch of 0 samples"),
    ("StepDone", step_done(batch=[1, 1, 1, 0, -1]), "a digest of -1"),
    ("StepDone", step_done(batch=[1, 1, 1, 0, 1 << 32]), "a digest of 4294967296"),
    ("StepDone", step_done(copied=-2), "a copy that cannot be"),
    ("StepDone", step_done(copying=-1.0), "a copy that cannot be"),
    (
        "Call",
        [0, "step", [1, 2**63, 1, 0, 0], False, False, None],
        "of 9223372036854775808 samples",
    ),
    ("Call", [0, "load", None, True, False, None], "a checkpoint is loaded by LOAD"),
    ("Call", [0, "save", None, True, False, [1, 0.0, 0]], "a checkpoint is loaded by LOAD"),
    ("Call", [0, "load", None, True, False, [-1, 0.0, 0]], "a checkpoint that cannot be"),
    ("Call", [0, "load", None, True, False, [1, -1.0, 0]], "a checkpoint that cannot be"),
    ("Upcoming", [0, 0], "a mini-batch of 0 micro-batches"),
    (
        "EvaluationDone",
        [1, 1, 0, ["Evaluation", [1, 0.5, ["a", "b"], [1.0]]]],
        "2 names of metrics",
    ),
    ("EvaluationDone", [1, 1, -1, None], "-1 bytes of memory"),
    ("Described", model(skips=[[0, 99, "x"]]), "a skip to layer 99"),
    ("Described", model(ties=[[[], []]]), "tied weights without a name"),
    ("Described", model(names=["a", "b"]), "too many names of layers"),
    ("Described", model(layers=["A", "B"], names=["a"]), "names that are not those of the layers"),
    ("Described", model(layers=["A", "B"], names=["a", "a"]), "names that are not those of the"),
    ("Described", model(names=["a.b"]), "names that are not those of the layers"),
    ("Described", model(notes=["x" * 513]), "too many notes, or too long ones"),
    ("Described", model(settings=["x" * 513]), "too many settings, or too long ones"),
    ("Ready", [0, [], "cpu", None, 0, 0, "x" * 513], "too many names of devices, or too long ones"),
    ("Failed", [0, ["exit", "", 0, [0, -1, -1, -1], "", "", "", 256]], "an exit status of 256"),
    ("Saved", [0, 1, [["../x", 1, 1]], ""], "a file in another folder"),
    ("Saved", [0, 1, [["x", -1, 1]], ""], "a file that cannot be"),
    ("Saved", [0, 1, [["x", 1, 1 << 32]], ""], "a file that cannot be"),
    ("Saved", [0, 1, [], "x" * ((1 << 20) + 1)], "a reason of 1048577 characters"),
    ("Signalled", [0, "S" * 513], "too many names of signals, or too long ones"),
    ("Described", model(ties=[[["1.weight"], []]]), "a tied weight '1.weight'"),
    ("Described", model(ties=[[["weight"], []]]), "a tied weight 'weight'"),
    ("Described", model(ties=[[["0" * 5000], []]]), "names of tied weights"),
    ("Heartbeat", [0, [5, -7, 0, 0], 0, 0, False, False], "a position of -7"),
    ("Heartbeat", [0, [5, 0, 0, 0], -1, 0, False, False], "a negative number of messages"),
    ("Hello", [0, "x" * 1000, 1, []], "a host or pid that cannot be"),
    ("Hello", [0, "x", 1, ["torch"] * 17], "too many versions"),
    ("Described", model(sources=[["x" * 600, ""]]), "names of files, or too long"),
    ("StoreRequest", [0, 1, "get", ["k" * 1000], b"", b""], "too many keys, or too long ones"),
    ("StoreRequest", [0, 1, "get", ["k"] * 65, b"", b""], "too many keys"),
    ("StoreRequest", [0, 1, "set", ["k"], bytes(8193), b""], "a value of 8193 bytes"),
]


@pytest.mark.parametrize(("name", "values", "what"), WRONG, ids=[what for *_, what in WRONG])
def test_messages_check_their_own_ranges(name: str, values: list[object], what: str) -> None:
    frame = msgpack.packb([codec.VERSION, 1, name, values])
    with pytest.raises(ProtocolError, match=what):
        codec.decode(frame)


def test_an_answer_of_the_store_fits_a_frame() -> None:
    store = Rendezvous()
    keys = tuple(map(str, range(MOST_KEYS)))
    for key in keys:
        store.handle(b"w", StoreRequest(0, 1, StoreOperation.SET, (key,), bytes(LONGEST_VALUE)))
    ((_, reply),) = store.handle(b"w", StoreRequest(0, 2, StoreOperation.GET, keys))
    assert len(codec.encode(reply, 1)) < codec.MAX_FRAME_BYTES / 16


def test_what_is_in_range_passes() -> None:
    assert options.MOST_MICROBATCHES == MOST_MICROBATCHES
    assert Batch(0, 1, 4, 0)
    assert Described(0, ("Linear",), ())
    assert EvaluationDone(0, 1, 0, None)
    assert Heartbeat(0, Position())
