"""Deferred batch norm against batch norm on the whole mini-batch."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from pipeworker.worker.stage import batchnorm
from pipeworker.worker.stage.batchnorm import DeferredBatchNorm
from support.devices.device import LateDevice


@pytest.mark.parametrize("momentum", [0.1, None])
@pytest.mark.parametrize("shape", [(11, 3), (11, 3, 4), (11, 3, 2, 5)])
@pytest.mark.parametrize("pieces", [1, 3, 4])
def test_statistics_are_those_of_the_whole(
    momentum: float | None, shape: tuple[int, ...], pieces: int
) -> None:
    kind = {2: nn.BatchNorm1d, 3: nn.BatchNorm1d, 4: nn.BatchNorm2d}[len(shape)]
    whole, cut = kind(3, momentum=momentum), kind(3, momentum=momentum)
    deferred = DeferredBatchNorm([nn.Sequential(nn.ReLU(), cut)])
    for step in range(3):
        x = torch.randn(shape, requires_grad=True) * (step + 1) + step
        whole(x)
        for piece in x.tensor_split(pieces):
            plain = kind(3)
            assert torch.equal(cut(piece), plain(piece))
        assert cut.running_mean is not None
        before = cut.running_mean.clone()
        deferred.commit()
        assert not torch.equal(cut.running_mean, before)
    assert cut.running_mean is not None
    assert not cut.running_mean.requires_grad
    assert whole.num_batches_tracked == cut.num_batches_tracked == 3
    torch.testing.assert_close(cut.running_mean, whole.running_mean)
    torch.testing.assert_close(cut.running_var, whole.running_var)
    whole.eval(), cut.eval()
    torch.testing.assert_close(cut(x), whole(x))
    assert cut.state_dict().keys() == whole.state_dict().keys()


def test_only_the_first_forward_in_training_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    norm = nn.BatchNorm1d(2)
    deferred = DeferredBatchNorm([norm])
    x = torch.randn(6, 2)
    norm(input=x)
    monkeypatch.setattr(batchnorm, "is_recomputing", lambda: True)
    norm(x + 5)
    monkeypatch.undo()
    norm.eval()
    norm(x + 7)
    deferred.commit()
    torch.testing.assert_close(norm.running_mean, 0.1 * x.mean(0))
    assert norm.running_mean is not None
    after = norm.running_mean.clone()
    deferred.commit()  # nothing seen, nothing changed
    assert torch.equal(norm.running_mean, after)


def test_a_norm_without_statistics_is_left_alone() -> None:
    norm = nn.BatchNorm1d(2, track_running_stats=False)
    assert not DeferredBatchNorm([norm])


def test_the_moments_of_all_replicas_wait_for_a_device_once() -> None:
    norm, device = nn.BatchNorm1d(2), LateDevice()
    deferred = DeferredBatchNorm([norm])
    rows = torch.tensor([[3.0, 0.0, 1.0, 1.0, 2.0], [5.0, 2.0, 3.0, 4.0, 5.0]]).double()
    with device.active():
        deferred.set_moments([[device.put(rows) * 1.0], [device.put(rows[:1]) * 1.0]])
    assert len(device.waits) == 1
    assert [count for count, _, _ in deferred._moments[norm]] == [3, 5, 3]
    means = [device.read(mean).tolist() for _, mean, _ in deferred._moments[norm]]
    assert means == [[0.0, 1.0], [2.0, 3.0], [0.0, 1.0]]


class OnMps(torch.Tensor):
    """A tensor of a device without float64, as far as it says."""

    @property
    def is_mps(self) -> bool:  # type: ignore[override]
        return True

    def cpu(self) -> torch.Tensor:  # type: ignore[override]
        return self.as_subclass(torch.Tensor)

    def double(self) -> torch.Tensor:
        raise TypeError("Cannot convert a MPS Tensor to float64 dtype")


def test_a_device_without_float64_has_the_hosts() -> None:
    norms = [nn.BatchNorm1d(3), nn.BatchNorm1d(3)]
    norms[1].running_mean = torch.zeros(3).as_subclass(OnMps)
    x = torch.randn(8, 3)
    for norm, given in zip(norms, (x, x.as_subclass(OnMps)), strict=True):
        deferred = DeferredBatchNorm([norm])
        (none,) = deferred.moments()
        assert (none.dtype, type(none)) == (torch.float64, torch.Tensor)
        norm(given)
        assert type(deferred.moments()[0]) is torch.Tensor
        deferred.commit()
    assert norms[0].running_mean is not None
    assert torch.equal(norms[0].running_mean, norms[1].running_mean.as_subclass(torch.Tensor))
