"""The loss scale of fp16."""

from __future__ import annotations

from pipeworker.coordinator.loss_scaler import LossScaler


def test_the_scale_doubles_after_a_long_run_of_good_steps() -> None:
    scaler = LossScaler()
    for _ in range(1999):
        scaler = scaler.after(overflow=False)
    assert scaler == LossScaler(2.0**16, 1999)
    assert scaler.after(overflow=False) == LossScaler(2.0**17)
    assert scaler.after(overflow=True) == LossScaler(2.0**15)
    for _ in range(100):
        scaler = scaler.after(overflow=True)
    assert scaler.scale == 2.0**-24
    assert LossScaler(2.0**24, 1999).after(overflow=False) == LossScaler(2.0**24)
