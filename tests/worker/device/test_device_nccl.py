"""The arguments of torch's NCCL groups; tests with accelerators check that groups move bytes."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from pipeworker.worker.device import nccl
from pipeworker.worker.device.nccl import Nccl
from support.in_process.transport import LocalStore

NAMES = (
    "TORCH_NCCL_ASYNC_ERROR_HANDLING",
    "TORCH_NCCL_RETHROW_CUDA_ERRORS",
    "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC",
    nccl.INTERFACE,
)
HEADER = "torch/csrc/distributed/c10d/ProcessGroupNCCL.hpp"


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """The arguments of the groups that are made, and some variables of their environment."""
    found: list[tuple[Any, ...]] = []

    def group(*what: Any) -> str:
        found.append((*what, *map(os.environ.get, NAMES)))
        return "a group"

    monkeypatch.setattr(nccl, "unit_of", "gpu {0.index}".format)
    monkeypatch.setattr(nccl, "nccl_group", group)
    for name in NAMES:
        monkeypatch.setenv(name, "")  # so that it is as it was, afterwards
        monkeypatch.delenv(name)
    return found


def test_a_group_leaves_failures_to_the_coordinator(made: list[tuple[Any, ...]]) -> None:
    device, store = torch.device("cuda", 1), LocalStore().store()
    communicators = Nccl(device)
    assert communicators.unit == "gpu 1"
    assert communicators.group(store, 1, "eth1") == "a group"
    assert made == [(store, 1, device, "0", "0", "0", "=eth1")]
    assert nccl.INTERFACE not in os.environ  # the group that needed it is made


def test_every_variable_that_is_set_is_one_that_torch_knows() -> None:
    """It says nothing of a variable that it does not know."""
    header = Path(torch.__file__).parent / "include" / HEADER
    known = header.read_text()
    assert not [name for name in nccl.SETTINGS if f'"{name}"' not in known]


def test_groups_of_the_users_own_are_as_they_say(
    made: list[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(NAMES[0], "1")
    Nccl(torch.device("cuda", 0)).group(LocalStore().store(), 0, "")
    assert made[0][3:] == ("0", "0", "0", None)  # NCCL chooses the interface
    assert os.environ[NAMES[0]] == "1"
    assert NAMES[1] not in os.environ


def test_what_the_user_says_of_the_network_stays(
    made: list[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(nccl.INTERFACE, "ib")
    Nccl(torch.device("cuda", 0)).group(LocalStore().store(), 0, "eth1")
    assert made[0][-1] == "ib"
