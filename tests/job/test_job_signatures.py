"""Signatures of a job's functions are checked before a call; unreadable ones are accepted."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from pipeworker.errors import UsageError
from pipeworker.job import file as job_file
from pipeworker.job import signatures
from pipeworker.job.layers import build, entries
from pipeworker.job.options import Options

TENSOR = torch.ones(2)


class Unknown:
    """A callable whose signature cannot be read."""

    @property
    def __signature__(self) -> Any:
        raise RuntimeError("nobody knows")

    def __call__(self, *words: Any) -> Any:
        return words


class Failing(Unknown):
    def __call__(self, *words: Any) -> Any:
        return block()  # type: ignore[call-arg]


class OneInput(nn.Module):
    def forward(self, output: Any) -> Any:
        return output


class Counted(OneInput):
    """A loss that returns a pair (sum, count)."""

    reduction = "sum"

    def forward(self, output: Any, target: Any = None) -> Any:
        return output.sum(), len(output)


SUM = functools.partial(nn.functional.mse_loss, reduction="sum")


def check(**names: Any) -> job_file.JobFile:
    """Check a job that is right except for these names."""
    right = {
        "model": lambda: [nn.Linear(2, 2)],
        "loss": nn.functional.mse_loss,
        "optimizer": torch.optim.SGD,
        "data": list,
    }
    return job_file.check(SimpleNamespace(**{**right, **names}), "job file j.py")


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        (
            "loss",
            lambda output: output,
            "is <lambda>(output); make it callable as loss(output, ",
        ),
        ("loss", OneInput(), "is OneInput(output); make it callable as loss(output, target)"),
        ("loss", nn.MSELoss, "is the class MSELoss; give an instance, loss = MSELoss(), or a fun"),
        ("optimizer", lambda params, lr: None, "is <lambda>(params, lr); make it callable as"),
        ("scheduler", lambda: None, "is <lambda>(); make it callable as scheduler(optimizer)"),
        (
            "scheduler",
            lambda optimizer, epochs, steps: None,
            "is <lambda>(optimizer, epochs, steps); make it callable as scheduler(optimizer)",
        ),
        (
            "scheduler",
            torch.optim.lr_scheduler.StepLR,
            "is the class StepLR(optimizer, step_size, ...); give a function, callable as",
        ),
        ("metrics", lambda output: {}, "make it callable as metrics(output, target)"),
        ("before_update", lambda: None, "make it callable as before_update(params)"),
        ("model", lambda width: [], "is <lambda>(width); make it callable as model()"),
        ("model", nn.Sequential, "is the class Sequential; give an instance that has layers"),
        ("model", OneInput, "model() returned an OneInput"),
        ("model", nn.Linear, "is the class Linear(in_features, out_features, ...); give an inst"),
        ("data", lambda n, m: [], "is <lambda>(n, m); make it callable as data() or data(start)"),
        ("data", torch.utils.data.DataLoader, "is the class DataLoader(dataset, ...); give an in"),
        ("evaluation", lambda n, m: [], "make it callable as evaluation()"),
        ("optimizer", torch.optim.SGD([nn.Parameter(torch.ones(1))]), "that makes it on each sta"),
    ],
)
def test_a_wrong_signature_is_reported(name: str, value: Any, expected: str) -> None:
    with pytest.raises(UsageError) as caught:
        entries(check(**{name: value}).model())
    assert expected in str(caught.value)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("loss", nn.MSELoss()),
        ("loss", torch.nn.functional.binary_cross_entropy),
        ("loss", functools.partial(lambda weight, output, target: output, 1.0)),
        ("loss", lambda *both: both[0]),
        ("loss", Unknown()),
        ("loss", torch.dist),
        ("optimizer", lambda named_parameters: None),
        ("optimizer", functools.partial(torch.optim.AdamW, lr=0.1)),
        ("scheduler", torch.optim.lr_scheduler.ConstantLR),
        ("metrics", Unknown()),
        ("before_update", Unknown()),
        ("model", Unknown()),
        ("model", OneInput()),
        ("model", nn.Linear(2, 2)),
        ("data", Unknown()),
        ("data", lambda start: []),
        ("data", lambda path="", *, start: []),
        ("evaluation", lambda start=0: []),
    ],
)
def test_callables_that_fit_or_have_no_signature_are_accepted(name: str, value: Any) -> None:
    assert getattr(check(**{name: value}), name) is value


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (lambda start: start, 3),
        (lambda count: count, 3),
        (lambda path="", start=0: (path, start), ("", 3)),
        (lambda count=2: count, None),
        (lambda start=None: start, 3),
        (lambda start=1000: start, None),
        (lambda start="2020": start, None),
        (lambda start=TENSOR: start, None),
        (lambda skipped, start=1000: (skipped, start), (3, 1000)),
        (functools.partial(lambda start, stop: (start, stop), start=0, stop=9), None),
        (functools.partial(lambda start=0, stop=0: (start, stop), stop=9), (3, 9)),
        (lambda **start: start, None),
        (lambda a, start: start, None),
        (functools.partial(lambda path, start: path, "path"), "path"),
        (list, None),
        (Unknown(), None),
    ],
)
def test_data_is_called_with_the_mini_batches_to_skip_if_it_takes_them(
    data: Any, expected: Any
) -> None:
    called = signatures.with_start(data)
    assert (called and called(3)) == expected


class Warmup(torch.optim.lr_scheduler.LRScheduler):
    def __init__(self, optimizer: Any, steps: int) -> None: ...


@pytest.mark.parametrize(
    ("scheduler", "expected"),
    [
        (lambda optimizer, steps: (optimizer, steps), ("o", 9)),
        (lambda optimizer, number: (optimizer, number), ("o", 9)),
        (lambda optimizer, *, steps: (optimizer, steps), ("o", 9)),
        (lambda optimizer, steps, /: (optimizer, steps), ("o", 9)),
        (lambda optimizer, *steps: (optimizer, *steps), ("o",)),
        (lambda optimizer, warmup=3, steps=0: (optimizer, warmup, steps), ("o", 3, 9)),
        (lambda optimizer, warmup=3: (optimizer, warmup), ("o", 3)),
        (lambda *all: all, ("o",)),
        (functools.partial(lambda optimizer, steps: (optimizer, steps), steps=5), ("o", 5)),
        (functools.partial(lambda optimizer, steps, n: (optimizer, steps), n=5), ("o", 9)),
    ],
)
def test_a_scheduler_gets_the_number_of_steps_if_it_asks_for_it(
    scheduler: Any, expected: tuple[Any, ...]
) -> None:
    assert check(scheduler=scheduler).scheduler is scheduler
    assert signatures.call_scheduler(scheduler, "o", 9) == expected


def test_a_class_asks_for_the_number_of_steps_by_name_only() -> None:
    assert signatures.takes_steps(Warmup)
    assert check(scheduler=Warmup).scheduler is Warmup
    assert not signatures.takes_steps(torch.optim.lr_scheduler.StepLR)


BY_HAND = "a module with this in its forward, or a function without arguments if it builds one"


def block(width: int, height: int, bias: bool = True) -> nn.Module:
    return nn.Linear(width, height, bias)


@pytest.mark.parametrize(
    ("entry", "expected"),
    [
        (lambda x, y: x * y, f"is the function <lambda>(x, y), .*; give {BY_HAND}"),
        (block, f"is the function block(width, height, ...), .*; give {BY_HAND}"),
        (functools.partial(block, bias=False), "is the callable partial(width, height, ...), and"),
        (nn.Linear, "is the class Linear(in_features, out_features, ...), and one there is built"),
    ],
)
def test_a_layer_builder_that_needs_arguments_is_reported(
    entry: Callable[..., Any], expected: str
) -> None:
    def attempt() -> None:
        build(entries([nn.ReLU(), entry])["1"], 1)

    with pytest.raises(UsageError) as caught:
        attempt()
    shown = str(caught.value)
    assert shown.startswith("layer 1 of model() is the ")
    assert all(part in shown for part in expected.split(".*"))


def test_an_exception_of_a_layer_builder_propagates() -> None:
    def builder() -> nn.Module:
        return block()  # type: ignore[call-arg]

    for made in (builder, Failing()):
        (entry,) = entries([made]).values()
        with pytest.raises(TypeError, match="missing 2 required positional arguments: 'width' and"):
            build(entry, 0)


def test_a_sum_over_one_micro_batch_is_not_noted() -> None:
    assert job_file.notes(check(loss=SUM), Options("j.py", 1, 1)) == ()
    assert len(job_file.notes(check(loss=SUM, evaluation=list), Options("j.py", 1, 2))) == 2
    own = Options("script.py", 1, 2, own_loop=True)
    assert len(job_file.notes(check(loss=SUM, evaluation=list), own)) == 1


@pytest.mark.parametrize("own_loop", [False, True])
def test_a_figure_of_which_more_may_be_better_is_noted(own_loop: bool) -> None:
    def noted(best: str) -> tuple[str, ...]:
        options = Options("j.py", 1, 2, best=best, own_loop=own_loop, evaluate_every=5)
        return job_file.notes(check(), options)

    assert noted("accuracy") == (
        "--best accuracy: the least counts as the best; write max:accuracy if more is better, or "
        "min:accuracy without this note",
    )
    assert not any(map(noted, ("loss", "test/loss", "max:accuracy", "min:error")))


def test_a_misspelled_required_name_is_shown() -> None:
    module = SimpleNamespace(model=[], loss=print, data=[], optimiser=print)
    with pytest.raises(UsageError, match=r"lacks the name optimizer; .* and data; optimiser is"):
        job_file.check(module, "job file j.py")


@pytest.mark.parametrize(
    ("names", "every", "expected"),
    [
        ({}, None, ()),
        ({"evaluation": list}, None, ("evaluation() is defined, and not used: --evaluate-every",)),
        ({"evaluation": list}, 5, ()),
        ({"metrics": lambda o, t: {}}, None, ("metrics() is defined, and not used: it is for ev",)),
        ({"schedular": list}, 5, ("schedular in job file j.py is not used: is scheduler meant?",)),
        ({"evalution": list, "metric": 1}, None, ("metric in job", "evalution in job")),
        ({"scheduler": lambda o: o, "schedulers": 1, "tie": 1, "optimizers": 1}, 5, ()),
        (
            {"loss": SUM},
            5,
            ('loss is a sum, reduction="sum", and a step takes the mean over',),
        ),
        ({"loss": nn.BCELoss(reduction="sum")}, 5, ("loss is a sum",)),
        ({"loss": functools.partial(nn.functional.mse_loss, reduction="mean")}, 5, ()),
        ({"loss": nn.CrossEntropyLoss()}, 5, ()),
        ({"loss": Counted()}, 5, ()),
    ],
)
def test_possible_mistakes_are_noted(
    names: dict[str, Any], every: int | None, expected: tuple[str, ...]
) -> None:
    notes = job_file.notes(check(**names), Options("j.py", 1, 2, evaluate_every=every))
    assert len(notes) == len(expected)
    assert all(map(str.startswith, notes, expected))


def test_a_signature_is_shown_without_optional_parameters() -> None:
    def many(a: int, b: str = "", *rest: int, c: float, **more: int) -> None: ...

    assert signatures.format_signature(many) == "many(a, c, ...)"
    assert signatures.format_signature(lambda: None) == "<lambda>()"
    assert signatures.format_signature(Unknown()) == "Unknown"
