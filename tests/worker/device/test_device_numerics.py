"""Settings of torch's that numbers depend on: what they are, switched on and put back."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch

from pipeworker.worker.device import numerics


@pytest.fixture(autouse=True)
def _as_they_were() -> Iterator[None]:
    with numerics.deterministic_mode(lambda: True):
        torch.use_deterministic_algorithms(False)
        yield


def test_a_setting_that_the_user_changes_shows() -> None:
    before = numerics.settings()
    assert len({setting.partition(" = ")[0] for setting in before}) == len(before)
    torch.backends.cudnn.benchmark = True
    changed = set(numerics.settings()) - set(before)
    assert changed == {"torch.backends.cudnn.benchmark = True"}


@pytest.mark.parametrize(
    "name",
    [
        *("NVIDIA_TF32_OVERRIDE", "CUBLASLT_WORKSPACE_SIZE", "MKL_ENABLE_INSTRUCTIONS"),
        *("ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA", "DNNL_DEFAULT_FPMATH_MODE"),
    ],
)
def test_the_environment_shows(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, "0")
    assert f"{name} = 0" in numerics.settings()


def test_how_halves_are_added_shows() -> None:
    before = numerics.settings()
    torch.backends.cuda.matmul.allow_fp16_accumulation = True
    try:
        (changed,) = set(numerics.settings()) - set(before)
    finally:
        torch.backends.cuda.matmul.allow_fp16_accumulation = False
    assert changed == "torch.backends.cuda.matmul.allow_fp16_accumulation = True"


def test_how_einsum_orders_its_products_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    # A host with opt_einsum beside torch has other bits than one without it.
    monkeypatch.setattr(torch.backends.opt_einsum, "enabled", False)
    before = numerics.settings()
    monkeypatch.setattr(torch.backends.opt_einsum, "enabled", True)
    (changed,) = set(numerics.settings()) - set(before)
    assert changed == "torch.backends.opt_einsum.enabled = True"


def test_how_matrices_are_multiplied_shows_whoever_set_it() -> None:
    before = torch.get_float32_matmul_precision()
    found = []
    try:
        for precision in ("highest", "high"):
            torch.set_float32_matmul_precision(precision)
            found.append(numerics.settings())
    finally:
        torch.set_float32_matmul_precision(before)
    assert found[0] != found[1]


def test_deterministic_kernels_are_switched_on_and_only_for_a_while_in_a_users_process() -> None:
    torch.backends.cudnn.benchmark = True
    for asked in (False, True):
        with numerics.deterministic_mode(lambda: asked):  # noqa: B023
            assert torch.are_deterministic_algorithms_enabled() is asked
            assert torch.backends.cudnn.benchmark is not asked
        assert not torch.are_deterministic_algorithms_enabled()
        assert torch.backends.cudnn.benchmark
    learned: list[bool] = []
    with numerics.deterministic_mode(lambda: bool(learned)):  # the value is known inside
        learned.append(True)
        numerics.enable_deterministic()
        assert torch.are_deterministic_algorithms_enabled()
    assert not torch.are_deterministic_algorithms_enabled()


def test_what_cublas_needs_is_set_unless_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    numerics.before_start()
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":16:8"
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG")
    numerics.before_start()
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
