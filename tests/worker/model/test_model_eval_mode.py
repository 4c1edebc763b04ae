"""The note on modules in eval mode that are trained."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn

from pipeworker.facts.limits import LONGEST_NAME
from pipeworker.worker.model.eval_mode import eval_mode_note


def block(dropout: float = 0.1) -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(dropout))


def frozen(module: nn.Module) -> nn.Module:
    return module.requires_grad_(False)


def test_a_pretrained_part_in_eval_mode_is_noted() -> None:
    note = eval_mode_note([block().eval(), nn.Dropout(0.5).eval(), nn.Linear(4, 2)])
    assert note == (
        "model(): 3 modules are in eval mode, as model() gave them: layer 0.1 (BatchNorm1d), layer "
        "0.2 (Dropout), layer 1 (Dropout); so they train without dropout and with fixed batch norm "
        "statistics. Call train() in model(), or freeze the parameters of their layers, "
        "requires_grad_(False)"
    )


@pytest.mark.parametrize(
    ("module", "count"),
    [
        (nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.1)), 1),
        (nn.TransformerEncoderLayer(4, 1, dropout=0.1), 4),
        (nn.LSTM(4, 4, 2, dropout=0.5), 0),  # alone it may be meant
        (nn.Sequential(nn.Linear(4, 4), nn.LSTM(4, 4, 2, dropout=0.5)), 1),
    ],
)
def test_modules_whose_mode_matters_are_counted(module: nn.Module, count: int) -> None:
    noun = "module is" if count == 1 else "modules are"
    expected = f"model(): {count} {noun} in eval mode" if count else ""
    assert eval_mode_note([module.eval()])[: len(expected) or None] == expected


def selected(kind: Any) -> nn.Module:
    """Return a block of which only the modules of a kind are in eval mode."""
    made = block()
    for module in made.modules():
        if isinstance(module, kind):
            module.eval()
    return made


@pytest.mark.parametrize(
    "entries",
    [
        [block(), nn.Linear(4, 2)],
        [frozen(block()).eval(), nn.Linear(4, 2)],  # a frozen part
        [nn.Sequential(frozen(block()).eval(), nn.Linear(4, 2))],
        [frozen(block()).eval(), nn.Linear(4, 2).eval()],
        [selected(nn.BatchNorm1d), nn.Linear(4, 2)],  # chosen one by one
        [selected(nn.Dropout)],
        [nn.Linear(4, 4), nn.BatchNorm1d(4).eval()],
        [nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Dropout(0.0)).eval()],  # no effect
        [lambda: block().eval()],  # not built yet
    ],
    ids=range(9),
)
def test_eval_mode_that_may_be_meant_is_not_noted(entries: list[Any]) -> None:
    assert eval_mode_note(entries) == ""


def test_the_note_fits_a_message() -> None:
    deep: nn.Module = nn.Sequential(block(), *(nn.Dropout(0.1) for _ in range(5)))
    for _ in range(200):
        deep = nn.ModuleDict({"a_long_name": deep})
    note = eval_mode_note([deep.eval()])
    assert " and 4 more; so" in note
    assert len(note) <= LONGEST_NAME
