"""Workers that send invalid messages: the job ends and names the sender.

Each of these can be decoded; only the job knows that it is invalid.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import fields, replace

import msgpack
import pytest

from pipeworker.coordinator.events import InvalidFrame
from pipeworker.coordinator.store import KeyValueStore
from pipeworker.coordinator.waiting import State
from pipeworker.errors import ProtocolError
from pipeworker.facts.layer_facts import LayerFacts
from pipeworker.facts.limits import LONGEST_TEXT, LONGEST_VALUE, MOST_KEYS
from pipeworker.facts.outline import LayerKind, Outline
from pipeworker.facts.position import Position
from pipeworker.facts.step import Batch
from pipeworker.wire import codec
from pipeworker.wire.messages.directions import FromWorker
from pipeworker.wire.messages.plan import Built, Described, Plan, Ready
from pipeworker.wire.messages.presence import Heartbeat
from pipeworker.wire.messages.step import EvaluationDone, StepDone, Upcoming
from pipeworker.wire.messages.store import StoreOperation, StoreRequest
from support.pure.coordinator import BATCH, LAYERS, ScriptedJob, ready_of

SENDER = "stage 1 (pid 1001 on host) sent an invalid message: "
DONE = StepDone(1, 1, (0.5,), (), (1.0,), 0.0, 0.1, 0, None)


def described() -> ScriptedJob:
    return ScriptedJob(2).described()


def running() -> ScriptedJob:
    return ScriptedJob(2).running()


@pytest.mark.parametrize(
    ("begin", "invalid"),
    [
        (described, Ready(1, (Built(5, 3, LAYERS[3:], 8),), "cpu", None)),
        (described, Ready(1, (), "cpu", None)),
        (described, Ready(1, (Built(1, 0, LAYERS, 8),), "cpu", None)),
        (running, replace(DONE, batch=replace(BATCH, microbatches=5))),
        (running, replace(DONE, batch=replace(BATCH, microbatches=0, samples=0))),
        (running, Upcoming(1, 2)),
        (running, replace(DONE, rank=0)),
    ],
    ids=lambda value: getattr(value, "__name__", None) or type(value).__name__,
)
def test_an_invalid_message_names_its_sender(
    begin: Callable[[], ScriptedJob], invalid: FromWorker
) -> None:
    job = begin()
    job.receive(invalid, b"w1")
    assert job.failure.message.startswith(f"{SENDER}{type(invalid).__name__}")
    assert job.failure.stage == "stage 1"
    assert job.ended.exit_status == 1


def test_valid_messages_are_accepted() -> None:
    job = described()
    (plan,) = job.sent(1, Plan)
    assert job.receive(ready_of(1, plan, LAYERS, None)) == []
    assert job.state() is State.BUILDING


def test_a_malformed_frame_names_its_sender() -> None:
    job = running()
    job.handle(InvalidFrame(b"unknown", "a malformed frame: not msgpack"))
    assert job.state() is State.STEPPING
    job.handle(InvalidFrame(b"w1", "a malformed frame: not msgpack"))
    assert job.failure.message == f"{SENDER}a malformed frame: not msgpack"


def step_done(**wrong: object) -> list[object]:
    """Return the fields of a StepDone, some of them replaced."""
    right = [1, 1, [], [], [], 0.0, 0.1, 0, None, -1, 0.0, False, -1, 0.0, [], [], [0, 0]]
    names = [field.name for field in fields(StepDone)]
    return [wrong.get(name, value) for name, value in zip(names, right, strict=True)]


def model(**wrong: object) -> list[object]:
    """Return the fields of a Described, some of them replaced."""
    right = [0, ["Linear"], [], [], 0, [], [], [], [], [], 0, [], None, None, [], [], ""]
    names = [field.name for field in fields(Described)]
    return [wrong.get(name, value) for name, value in zip(names, right, strict=True)]


def ready(*existing: list[str]) -> list[object]:
    """Return the fields of a Ready of one stage with three layers."""
    return [0, [[0, 0, ["Linear"] * 3, 1, 0]], "cpu", None, 0, 0, "", [*existing], []]


def kind(**wrong: object) -> list[object]:
    """Return the fields of a LayerKind, some of them replaced."""
    found = LayerKind("digest", 0, b"")
    return [wrong.get(field.name, getattr(found, field.name)) for field in fields(LayerKind)]


def outline(**wrong: object) -> list[object]:
    """Return the fields of an Outline of one layer, some of them replaced."""
    found = Outline((LayerKind("digest", 0, b""),), (0,))
    right = {"kinds": [kind()], **wrong}
    return [right.get(field.name, getattr(found, field.name)) for field in fields(Outline)]


def layer_facts(**wrong: object) -> list[object]:
    """Return the fields of a LayerFacts, some of them replaced."""
    found = LayerFacts("Linear")
    return [wrong.get(field.name, getattr(found, field.name)) for field in fields(LayerFacts)]


WRONG = [
    ("StepDone", step_done(squares=[-4.0]), "a negative sum of squares"),
    ("StepDone", step_done(squares=[1.0] * 41), "41 squares"),
    ("StepDone", step_done(losses=[1.0], counts=[1.0, 2.0]), "2 counts for 1 losses"),
    ("StepDone", step_done(busy=-1.0), "-1.0 seconds of work"),
    ("StepDone", step_done(batch=[1, 10, 0, 0, 0, 0]), "in 0 micro-batches"),
    ("StepDone", step_done(batch=[1, 10, 10**7, 0, 0, 0]), "in 10000000 micro-batches"),
    ("StepDone", step_done(batch=[1, -3, 1, 0, 0, 0]), "a mini-batch of -3 samples"),
    ("StepDone", step_done(batch=[1, 0, 1, 0, 0, 0]), "a mini-batch of 0 samples"),
    ("StepDone", step_done(batch=[1, 1, 1, 0, -1, 0]), "a digest of -1"),
    ("StepDone", step_done(batch=[1, 1, 1, 0, 1 << 32, 0]), "a digest of 4294967296"),
    ("StepDone", step_done(batch=[1, 1, 1, 0, 0, -1]), "a mini-batch of -1 tokens"),
    ("StepDone", step_done(data_seconds=-1.0), "-1.0 seconds of reading"),
    ("StepDone", step_done(borrowed=[["x" * 513, 3, ""]]), "names of parameters, or too long"),
    ("StepDone", step_done(notes=["x"] * 17), "too many notes"),
    ("StepDone", step_done(snapshot_step=-2), "a snapshot of step -2"),
    ("StepDone", step_done(snapshot_torn=-2), "a torn snapshot of step -2"),
    ("StepDone", step_done(snapshot_seconds=-1.0), "-1.0 seconds for a snapshot"),
    ("StepDone", step_done(leading=[1]), "a place of 1 numbers"),
    (
        "Call",
        [0, "step", [1, 2**63, 1, 0, 0, 0], False, False, None, False, ""],
        "of 9223372036854775808 samples",
    ),
    (
        "Call",
        [0, "load", None, True, False, None, False, ""],
        "LOAD without a checkpoint",
    ),
    (
        "Call",
        [0, "save", None, True, False, [1, 0.0, 0, 0, 0], False, ""],
        "LOAD without a checkpoint",
    ),
    (
        "Call",
        [0, "load", None, True, False, [-1, 0.0, 0, 0, 0], False, ""],
        "checkpoint with a negative",
    ),
    (
        "Call",
        [0, "load", None, True, False, [1, -1.0, 0, 0, 0], False, ""],
        "checkpoint with a negative",
    ),
    (
        "Call",
        [0, "load", None, True, False, [1, 1.0, 0, -1, 0], False, ""],
        "checkpoint with a negative",
    ),
    ("Upcoming", [0, 0], "a mini-batch of 0 micro-batches"),
    (
        "EvaluationDone",
        [1, 1, 0, ["Evaluation", [1, 0.5, ["a", "b"], [1.0]]], None],
        "2 names of metrics",
    ),
    ("EvaluationDone", [1, 1, -1, None, None], "-1 bytes of memory"),
    ("Described", model(skips=[[0, 99, "x"]]), "a skip to layer 99"),
    ("Described", model(shared_buffers=[[0, 1]]), "a buffer of layer 1"),
    ("Described", model(ties=[[[], []]]), "tied weights without a name"),
    ("Described", model(problem="x" * (LONGEST_TEXT + 1)), "too long a problem"),
    ("Described", model(names=["a", "b"]), "2 names for "),
    ("Described", model(layers=["A", "B"], names=["a"]), "1 names for 2 layers"),
    ("Described", model(layers=["A", "B"], names=["a", "a"]), "several layers with one name"),
    ("Described", model(names=["a..b"]), "a layer named 'a..b'"),
    ("Described", model(frozen=[99]), "frozen layers that are none, or out of order"),
    ("Described", model(frozen=[1, 0]), "frozen layers that are none, or out of order"),
    ("Described", model(notes=["x" * 513]), "too many notes, or too long ones"),
    ("Described", model(settings=["x" * 513]), "too many settings, or too long ones"),
    ("Described", model(outline=outline(of_layer=[0, 0])), "an outline of other layers than 1"),
    ("Described", model(outline=outline(of_layer=[1])), "a layer of no kind"),
    ("Described", model(outline=outline(loss=1)), "the loss is kind 1"),
    ("Described", model(outline=outline(samples=-1)), "a negative size"),
    ("Described", model(outline=outline(skips=[[0, 1, 4]])), "a skip to layer 1"),
    ("Described", model(outline=outline(ties=[[0, 0, -4]])), "a skip to layer 0"),
    ("Described", model(outline=outline(kinds=[kind(digest="")])), "a digest of 0 digits"),
    ("Described", model(outline=outline(kinds=[kind(layer=-1)])), "layer -1"),
    ("Described", model(outline=outline(kinds=[kind(input=b"x" * (1 << 20) + b"x")])), "too long"),
    ("Described", model(machine=["cpu", "", -1, 0]), "a negative size of memory"),
    ("Described", model(machine=["x" * 513, "", 1, 0]), "too long a name of a device"),
    ("Measured", [0, ["a"], [], None, "", 0.0], "1 digests for other facts"),
    ("Measured", [0, [], [], None, "x" * ((1 << 20) + 1), 0.0], "too long a problem"),
    ("Measured", [0, [], [], None, "", -1.0], "negative or unbounded facts"),
    ("Measured", [0, ["a"], [layer_facts(forward=-1.0)], None, "", 0.0], "negative or unbounded"),
    (
        "Measured",
        [0, ["a"], [layer_facts(update=math.inf)], None, "", 0.0],
        "negative or unbounded",
    ),
    ("Ready", [0, [], "cpu", None, 0, 0, "x" * 513, [], []], "names of devices, or too long ones"),
    ("Ready", [0, [], "cpu", None, 0, 0, "", [], [["", "x" * 513, 1]]], "names of functions, or"),
    ("Ready", ready(["0.weight", "x" * 513]), "too many names of parameters, or too long ones"),
    ("Ready", ready(["weight", ""]), "a parameter 'weight'"),
    ("Ready", ready(["3.weight", ""]), "a parameter '3.weight'"),
    (
        "Failed",
        [0, ["Failure", ["exit", "", 0, [0, -1, -1, -1], "", "", "", 256, False]], False],
        "an exit status of 256",
    ),
    ("Saved", [0, 1, [["../x", 1, 1]], "", False], "a file in another folder"),
    ("Saved", [0, 1, [["x", -1, 1]], "", False], "an impossible size or checksum"),
    ("Saved", [0, 1, [["x", 1, 1 << 32]], "", False], "an impossible size or checksum"),
    ("Saved", [0, 1, [], "x" * ((1 << 20) + 1), False], "a reason of 1048577 characters"),
    ("Signalled", [0, "S" * 513], "too many names of signals, or too long ones"),
    ("Described", model(ties=[[["1.weight"], []]]), "a tied weight '1.weight'"),
    ("Described", model(ties=[[["weight"], []]]), "a tied weight 'weight'"),
    ("Described", model(ties=[[["0" * 5000], []]]), "names of tied weights"),
    ("Heartbeat", [0, [5, -7, 0, 0], 0, 0, False, 0, 0, 0, 0, 0, 0.0, ""], "a position of -7"),
    (
        "Heartbeat",
        [0, [5, 0, 0, 0], 0, 0, False, -1, 0, 0, 0, 0, 0.0, ""],
        "a negative number of arrived parts",
    ),
    (
        "Heartbeat",
        [0, [5, 0, 0, 0], -1, 0, False, 0, 0, 0, 0, 0, 0.0, ""],
        "a negative number of messages",
    ),
    (
        "Heartbeat",
        [0, [5, 0, 0, 0], 0, 0, False, 0, -1, 0, 0, 0, 0.0, ""],
        "-1 bytes, 0 micro-batches",
    ),
    ("Heartbeat", [0, [5, 0, 0, 0], 0, 0, False, 0, 0, -1, 0, 0, 0.0, ""], "-1 micro-batches"),
    (
        "Heartbeat",
        [0, [5, 0, 0, 0], 0, 0, False, 0, 0, 0, 0, -1, 0.0, ""],
        "a negative number of mini-batches",
    ),
    (
        "Heartbeat",
        [0, [5, 0, 0, 0], 0, 0, False, 0, 0, 0, 0, 0, 0.0, "x" * ((1 << 20) + 1)],
        "a stack of 1048577 characters",
    ),
    ("Hello", [0, "x" * 1000, 1, []], "a host name of 1000 characters"),
    ("Hello", [0, "x", 1, ["torch"] * 17], "too many versions"),
    ("Described", model(sources=[["x" * 600, ""]]), "names of files, or too long"),
    ("StoreRequest", [0, 1, "get", ["k" * 1000], b""], "too many keys, or too long ones"),
    ("StoreRequest", [0, 1, "get", ["k"] * 65, b""], "too many keys"),
    ("StoreRequest", [0, 1, "set", ["k"], bytes(8193)], "a value of 8193 bytes"),
]


@pytest.mark.parametrize(("name", "values", "what"), WRONG, ids=[what for *_, what in WRONG])
def test_messages_check_their_own_ranges(name: str, values: list[object], what: str) -> None:
    frame = msgpack.packb([codec.VERSION, 1, name, values])
    with pytest.raises(ProtocolError, match=what):
        codec.decode(frame)


def test_a_reply_of_the_store_fits_a_frame() -> None:
    store = KeyValueStore()
    keys = tuple(map(str, range(MOST_KEYS)))
    for key in keys:
        store.handle(b"w", StoreRequest(0, 1, StoreOperation.SET, (key,), bytes(LONGEST_VALUE)))
    ((_, reply),) = store.handle(b"w", StoreRequest(0, 2, StoreOperation.GET, keys))
    assert len(codec.encode(reply, 1)) < codec.MAX_FRAME_BYTES / 16


def test_values_in_range_are_accepted() -> None:
    assert Batch(0, 1, 4, 0)
    assert Described(0, ("Linear",), ())
    assert EvaluationDone(0, 1, 0, None)
    assert Heartbeat(0, Position())
