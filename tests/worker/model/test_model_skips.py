"""stash and pop in a plain model, in tables, and as a survey of the layers finds them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any, NoReturn, cast

import pytest
import torch
from torch import nn

import pipeworker
from pipeworker.errors import SkipError
from pipeworker.facts.connections import Skip
from pipeworker.facts.position import Phase
from pipeworker.host.position import Tracker
from pipeworker.worker.blame import UserCodeError
from pipeworker.worker.model import survey
from pipeworker.worker.model.survey import Survey, skips_of
from pipeworker.worker.stage.skips import Table

CPU = torch.device("cpu")


class Stashes(nn.Module):
    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        pipeworker.stash(self.name, x)
        y: torch.Tensor = self.linear(x)
        return y


class Pops(nn.Module):
    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + pipeworker.pop(self.name)


class Looks(nn.Module):
    """Needs real numbers."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x if x.sum().item() > 0 else -x


class Down(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for level in ("a", "b"):
            with pipeworker.namespace("net"), pipeworker.namespace(level):
                pipeworker.stash("x", x)
        return x


class Up(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with pipeworker.namespace("net"):
            with pipeworker.namespace("a"):
                first = pipeworker.pop("x")
            return first + pipeworker.pop("b/x")


def surveyed(entries: Sequence[Any], tracker: Tracker | None = None) -> tuple[Skip, ...]:
    """Survey a model in this process: its layers keep no tensor."""
    survey, value = Survey(entries, 0, CPU), torch.randn(3, 4)
    found = survey.on_fakes(value)
    if "error" in found:
        found = survey.on_real_tensors(value, tracker or Tracker())
    return skips_of(found)


def test_a_plain_model_needs_no_pipeline() -> None:
    net = nn.Sequential(nn.Linear(4, 4), Stashes("x"), nn.Tanh(), Pops("x"))
    for _ in range(2):
        x = torch.randn(3, 4)
        middle = net[0](x)
        expected = torch.tanh(net[1].get_submodule("linear")(middle)) + middle
        assert torch.equal(net(x), expected)
    net(x).sum().backward()
    assert net[0].weight.grad is not None


def test_threads_have_tables_of_their_own() -> None:
    pipeworker.stash("mine", torch.ones(1))
    errors = []

    def other() -> None:
        try:
            pipeworker.pop("mine")
        except SkipError as error:
            errors.append(error)

    thread = threading.Thread(target=other)
    thread.start()
    thread.join()
    assert errors
    pipeworker.pop("mine")


@pytest.mark.parametrize(
    ("use", "message"),
    [
        (lambda: pipeworker.pop("x"), r"pop\('x'\): no layer stashed it"),
        (
            lambda: list(map(pipeworker.stash, "xx", torch.ones(2, 1))),
            r"stash\('x', \.\.\.\): stashed twice",
        ),
        (lambda: pipeworker.stash("x", cast("Any", 3)), "the value is an int; give a tensor"),
        (
            lambda: pipeworker.stash(cast("Any", 3), torch.ones(1)),
            "the name is an int; give a string",
        ),
    ],
)
def test_misuse_is_named(use: Callable[[], Any], message: str) -> None:
    with Table().active(), pytest.raises(SkipError, match=message):
        use()


def test_a_stash_changed_in_place_is_refused() -> None:
    x = torch.ones(2)
    with Table().active():
        pipeworker.stash("x", x)
        x.add_(1)
        with pytest.raises(SkipError, match=r"pop\('x'\): changed in place after it was stashed"):
            pipeworker.pop("x")


def test_a_table_leaves_what_is_planned_and_nothing_else() -> None:
    table = Table({"in": torch.ones(1)})
    with table.active():
        pipeworker.stash("out", torch.ones(2))
        with pytest.raises(
            SkipError, match=r"stash\('in', \.\.\.\): stashed or received here, and not popped"
        ):
            table.leave(["out"])
        pipeworker.pop("in")
        with pytest.raises(SkipError, match=r"pop\('more'\): no layer stashed it"):
            table.leave(["more", "out"])
    out = table.leave(["out"])["out"]
    assert out is not None
    assert out.tolist() == [1.0, 1.0]


def test_a_scope_does_not_leak_into_a_stage() -> None:
    outer, inner = Table(), Table()
    with outer.active():
        with pipeworker.namespace("user"):
            with inner.active():
                pipeworker.stash("x", torch.ones(1))
            pipeworker.stash("x", torch.ones(1))
        pipeworker.stash("x", torch.ones(1))
    assert [*inner.leave(["x"])] == ["x"]
    assert [*outer.leave(["user/x", "x"])] == ["user/x", "x"]


@pytest.mark.parametrize("real", [False, True], ids=["shapes only", "real numbers"])
@pytest.mark.parametrize("lazy", [False, True])
def test_a_survey_finds_the_skips(real: bool, lazy: bool) -> None:
    layers: list[nn.Module] = [Stashes("x"), Down(), nn.BatchNorm1d(4), Up(), Pops("x")]
    if real:
        layers.insert(1, Looks())
    entries: list[Any] = [(lambda layer=layer: layer) for layer in layers] if lazy else layers
    found = surveyed(entries)
    shift = int(real)
    assert found == (
        Skip(0, 4 + shift, "x"),
        Skip(1 + shift, 3 + shift, "net/a/x"),
        Skip(1 + shift, 3 + shift, "net/b/x"),
    )
    assert layers[2 + shift].num_batches_tracked == 0 or lazy  # the model itself is not touched


def test_a_survey_builds_without_memory() -> None:
    size = 1 << 20  # the weight in the middle would take 4 TiB
    entries = [
        lambda: nn.Linear(4, size),
        lambda: nn.Linear(size, size),
        lambda: nn.Linear(size, 4),
        lambda: Stashes("x"),
        lambda: Pops("x"),
    ]
    assert surveyed(entries) == (Skip(3, 4, "x"),)


def test_a_survey_says_which_layer() -> None:
    with pytest.raises(SkipError, match=r"layer 1 \(Pops\) pops 'y', which no layer before it"):
        surveyed([Stashes("x"), Pops("y"), Pops("x")])


def test_a_layer_that_fails_fails_where_it_is() -> None:
    tracker = Tracker()
    expected = r"layer 1 \(Linear\) raised RuntimeError: .*shapes cannot be multiplied"
    with pytest.raises(UserCodeError, match=expected):
        surveyed([Stashes("x"), nn.Linear(5, 4), Pops("x")], tracker)
    assert (tracker.get().phase, tracker.get().layer) == (Phase.SURVEY, 1)


def test_only_a_job_that_mentions_us_is_surveyed() -> None:
    job = ModuleType("job")
    assert not survey.mentions_skips([job])
    for name, value in (("pipeworker", pipeworker), ("keep", pipeworker.stash)):
        job = ModuleType("job")
        setattr(job, name, value)
        assert survey.mentions_skips([job])


def test_all_is_exact() -> None:
    assert all(hasattr(pipeworker, name) for name in pipeworker.__all__)
    # Private, because no public list has the names that are imported lazily.
    assert set(pipeworker._LAZY) <= set(pipeworker.__all__)
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        pipeworker.nothing  # noqa: B018


def test_a_survey_of_buffers_needs_no_real_numbers(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> NoReturn:
        pytest.fail("real tensors are needed")

    monkeypatch.setattr(Survey, "on_real_tensors", fail)
    layers = [Stashes("x"), nn.BatchNorm1d(4), Pops("x")]
    assert surveyed(layers) == (Skip(0, 2, "x"),)
    assert layers[1].num_batches_tracked == 0
    assert capfd.readouterr() == ("", "")


def test_a_sparse_tensor_is_stashed_as_it_is() -> None:
    """It has no alias. It may be popped on its stage; the transport refuses it."""
    table, sparse = Table(), torch.eye(3).to_sparse()
    table.stash("adjacency", sparse)
    assert table.pop("adjacency") is sparse
