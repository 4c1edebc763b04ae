"""One parameter at several places, as one stage sees it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from pipeworker.errors import UsageError
from pipeworker.facts.connections import Tie
from pipeworker.job.file import JobFile
from pipeworker.worker.update.ties import Ties, reject_common_memory, separate, shared_parameters
from pipeworker.worker.update.update import Updater


def test_a_separated_parameter_keeps_the_attributes_that_an_optimizer_may_read() -> None:
    a = nn.Linear(2, 2)
    vars(a.weight)["no_decay"] = True
    copied = separate(a, ["weight"])
    assert vars(copied.get_parameter("weight")) == {"no_decay": True}


@pytest.mark.parametrize("dtype", [torch.float32, None])
def test_a_separated_parameter_keeps_the_dtype_of_its_gradient(dtype: torch.dtype | None) -> None:
    a = nn.Linear(2, 2, dtype=torch.bfloat16)
    a.weight.grad_dtype = dtype
    copied = separate(a, ["weight"]).get_parameter("weight")
    assert copied.grad_dtype is dtype
    copied.grad = torch.ones(2, 2)


def test_the_hooks_of_a_separated_parameter_run() -> None:
    a = nn.Linear(2, 2)
    calls: list[torch.Tensor] = []
    a.weight.register_hook(lambda gradient: calls.append(gradient))  # type: ignore[no-untyped-call]
    a.weight.register_post_accumulate_grad_hook(calls.append)  # type: ignore[no-untyped-call]
    copied = separate(a, ["weight"])
    torch.autograd.backward(copied(torch.ones(1, 2)).sum())
    assert len(calls) == 2
    assert calls[1] is copied.get_parameter("weight")
    assert calls[1].grad is not None


def never(_: int) -> nn.Module:
    raise AssertionError("nothing is to be built")


def grad(parameter: torch.Tensor, value: float) -> None:
    parameter.grad = torch.full_like(parameter, value)


def test_shared_parameters_are_found_by_identity() -> None:
    a, b = nn.Linear(2, 2), nn.Linear(2, 2)
    b.weight = a.weight
    entries: list[Any] = [a, nn.ReLU(), lambda: nn.Linear(2, 2), b, a]
    assert shared_parameters(entries) == [
        ["0.weight", "3.weight", "4.weight"],
        ["0.bias", "4.bias"],
    ]


def test_a_separated_layer_has_objects_of_its_own_and_the_same_memory() -> None:
    a = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    a[0].get_parameter("bias").requires_grad_(False)
    copied = separate(a, ["0.weight", "0.bias"])
    assert isinstance(copied, nn.Sequential)
    for name in ("weight", "bias"):
        one, other = getattr(a[0], name), getattr(copied[0], name)
        assert one is not other
        assert one.data_ptr() == other.data_ptr()
        assert one.requires_grad is other.requires_grad
    assert copied[1].weight is a[1].weight
    assert copied[1].running_mean is a[1].running_mean
    with torch.no_grad():
        a[0].get_parameter("weight").zero_()
    assert copied[0].get_parameter("weight").count_nonzero() == 0


def test_places_are_added_in_model_order_whichever_stage_sent_them() -> None:
    layers = {n: nn.Linear(1, 1, bias=False) for n in (0, 2)}
    tie = Tie(("0.weight", "1.weight", "2.weight"), (0, 1, 0))
    ties = Ties(0, [tie], layers, never)
    grad(layers[0].weight, 1.0)
    grad(layers[2].weight, 2.0**-30)
    assert ties.outgoing(1) == [layers[0].weight.grad, layers[2].weight.grad]
    assert ties.frames(1) == range(0, 1, 64)
    ties.add_up({1: [torch.full((1, 1), -1.0)]})
    total = ties.total(layers[0].get_parameter("weight"))
    assert total == 2.0**-30  # (1 - 1) + tiny, not 1 + tiny - 1
    ties.set_gradients()
    assert layers[0].weight.grad == 2.0**-30
    assert layers[2].weight.grad is None
    assert ties.aliases == {id(layers[2].weight)}
    assert ties.elsewhere == set()


@pytest.mark.parametrize("is_sparse", [(True, False), (False, True), (True, True)])
def test_a_sparse_gradient_of_an_embedding_is_added_to_that_of_another_place(
    is_sparse: tuple[bool, bool],
) -> None:
    layers: dict[int, nn.Module] = {
        n: nn.Embedding(5, 2, sparse=kind) for n, kind in enumerate(is_sparse)
    }
    ties = Ties(0, [Tie(("0.weight", "1.weight"), (0, 0))], layers, never)
    for n, layer in layers.items():
        (layer(torch.tensor([n, 2, 2])) * (n + 1)).sum().backward()
    ties.reduce({0: ties})
    total = ties.total(layers[0].get_parameter("weight"))
    assert total is not None
    assert total.is_sparse is all(is_sparse)
    assert total.to_dense().tolist() == [[1.0] * 2, [2.0] * 2, [6.0] * 2, [0.0] * 2, [0.0] * 2]


def test_a_sparse_gradient_is_not_sent_to_another_stage() -> None:
    layer = nn.Embedding(5, 2, sparse=True)
    ties = Ties(0, [Tie(("0.weight", "1.weight"), (0, 1))], {0: layer}, never)
    layer(torch.tensor([1])).sum().backward()
    sender: Any = None
    with pytest.raises(UsageError, match=r"^tied: the gradient of 0\.weight is sparse, and stages"):
        ties.send(1, sender)


def test_a_place_without_a_gradient_is_left_out() -> None:
    layer = nn.Linear(1, 1, bias=False)
    ties = Ties(1, [Tie(("0.weight", "1.weight"), (0, 1))], {1: layer}, lambda _: nn.Linear(1, 1))
    assert ties.elsewhere == {id(layer.weight)}
    ties.add_up({0: [None]})
    assert ties.total(layer.get_parameter("weight")) is None
    sent = torch.ones(1, 1)
    ties.add_up({0: [sent]})
    sent.zero_()  # its buffer is used again
    assert ties.total(layer.get_parameter("weight")) == 1.0


def test_the_first_place_gives_the_value() -> None:
    origin = nn.Linear(2, 2)
    here, again = nn.Linear(2, 2), nn.Linear(2, 2)
    tie = Tie(("0.weight", "3.weight", "4.weight"), (0, 1, 1))
    Ties(1, [tie], {3: here, 4: again}, lambda index: [origin][index])
    assert torch.equal(here.weight, origin.weight)
    assert here.weight.data_ptr() != origin.weight.data_ptr()
    assert again.weight.data_ptr() == here.weight.data_ptr()


def test_stages_of_one_worker_have_memory_of_their_own() -> None:
    """Each stage updates its own copy, so there must be two."""
    origin = nn.Linear(2, 2)
    here = separate(origin, ["weight"])
    assert _weight(here).data_ptr() == origin.weight.data_ptr()
    tie = Tie(("0.weight", "1.weight"), (0, 1))
    Ties(1, [tie], {1: here}, lambda index: origin, local_stages=(1,))
    assert _weight(here).data_ptr() == origin.weight.data_ptr()
    Ties(1, [tie], {1: here}, lambda index: origin, local_stages=(0, 1))
    assert torch.equal(_weight(here), origin.weight)
    assert _weight(here).data_ptr() != origin.weight.data_ptr()


def _weight(layer: nn.Module) -> torch.Tensor:
    return layer.get_parameter("weight")


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (("0.weight", "1.nothing"), r"layer 1 \(Linear\) has no parameter 'nothing'"),
        (("0.weight", "1.bias"), r"tied: 0.weight is \(2, 2\) torch.float32"),
    ],
)
def test_mistakes_are_named(names: tuple[str, ...], message: str) -> None:
    layers = {0: nn.Linear(2, 2), 1: nn.Linear(2, 2)}
    with pytest.raises(UsageError, match=message):
        Ties(0, [Tie(names, (0, 0))], layers, never)


@pytest.mark.parametrize("stage", [0, 1])
def test_a_place_that_is_frozen_alone_is_an_error_on_each_stage(stage: int) -> None:
    layers = {0: nn.Linear(2, 2), 1: nn.Linear(2, 2)}
    _weight(layers[0]).requires_grad_(False)
    tie = Tie(("0.weight", "1.weight"), (0, stage))
    with pytest.raises(UsageError, match=r"of 0.weight and 1.weight only one requires grad"):
        Ties(stage, [tie], layers, layers.__getitem__)


def by_data(a: nn.Linear, b: nn.Linear) -> None:
    b.weight.data = a.weight.data


def by_parameter(a: nn.Linear, b: nn.Linear) -> None:
    b.weight = nn.Parameter(a.weight[:1])


def by_buffer(a: nn.Linear, b: nn.Linear) -> None:
    b.register_buffer("seen", a.weight.detach().view(-1)[2:])


@pytest.mark.parametrize("share", [by_data, by_parameter, by_buffer])
def test_two_tensors_in_one_memory_are_rejected(share: Any) -> None:
    a, b, c = nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2)
    reject_common_memory([a, b, a])
    share(a, b)
    name = "seen" if share is by_buffer else "weight"
    with pytest.raises(UsageError, match=rf"^layers 1 and 2: 1\.weight and 2\.{name} are two"):
        reject_common_memory([c, a, b])
    reject_common_memory([c, nn.Sequential(a, b)])
    reject_common_memory([a.requires_grad_(False), b.requires_grad_(False)])


def test_parts_of_one_memory_that_do_not_overlap_are_no_tie() -> None:
    flat = torch.randn(8)
    a, b = nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)
    a.weight.data, b.weight.data = flat[:4].view(2, 2), flat[4:].view(2, 2)
    b.register_buffer("parts", torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]))
    reject_common_memory([a, b])


def test_a_tensor_that_overlaps_a_longer_one_before_a_shorter_one_is_found() -> None:
    flat = torch.randn(8)
    a, b = nn.Linear(2, 4, bias=False), nn.Linear(2, 1, bias=False)
    a.weight.data, b.weight.data = flat.view(4, 2), flat[4:6].view(1, 2)
    a.register_buffer("seen", flat[1:2])
    with pytest.raises(UsageError, match=r"^layers 0 and 1: 0\.weight and 1\.weight are two"):
        reject_common_memory([a, b])


@pytest.mark.parametrize(("stage", "squares"), [(0, [25.0]), (1, [])])
def test_the_stage_of_the_first_place_alone_counts_a_tied_weight_in_the_norm(
    stage: int, squares: list[float]
) -> None:
    """It counts the sum over all places, once."""
    layers = [nn.Linear(1, 1, bias=False) for _ in range(2)]
    own = layers[stage]
    tie = Tie(("0.weight", "1.weight"), (0, 1))
    ties = Ties(stage, [tie], {stage: own}, lambda index: layers[index])
    job = JobFile(None, print, lambda params: torch.optim.SGD(params, lr=0.5))
    updater = Updater([own], stage, job, ties=ties)
    own.get_parameter("weight").grad = torch.full((1, 1), 3.0 - stage)
    ties.add_up({1 - stage: [torch.full((1, 1), 2.0 + stage)]})
    assert updater.squares() == squares
