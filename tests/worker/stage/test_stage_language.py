"""The loss of causal language models."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from pipeworker.errors import UsageError
from pipeworker.worker.stage.language import causal_loss

WORDS = 7


class Language(nn.Module):
    """A model that computes its own loss, a mean over the tokens, as those of transformers do."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head = nn.Embedding(WORDS, 4), nn.Linear(4, WORDS)

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> Any:
        logits = self.head(self.embed(ids))
        loss = functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        return SimpleNamespace(logits=logits, loss=loss)


def test_a_micro_batch_without_tokens_adds_nothing_to_the_models_own_loss() -> None:
    ids = torch.randint(WORDS, (2, 5), generator=torch.Generator().manual_seed(1))
    labels = ids.clone()
    labels[1] = -100
    alone, both = Language(), Language()
    total, count = causal_loss(alone(ids[:1], labels[:1]), labels[:1])
    total.backward()  # type: ignore[no-untyped-call]
    parts = [causal_loss(both(x[None], y[None]), y[None]) for x, y in zip(ids, labels, strict=True)]
    for part, _ in parts:
        part.backward()  # type: ignore[no-untyped-call]
    assert [(part.item(), number.item()) for part, number in parts] == [(total.item(), 4), (0, 0)]
    assert count == 4
    for one, other in zip(alone.parameters(), both.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("output", "shown"),
    [((torch.zeros(2, 5, WORDS), None), "a tuple"), ({"logits": torch.zeros(2, 5)}, "a dict")],
)
def test_an_output_without_logits_is_an_error_that_names_its_type(output: Any, shown: str) -> None:
    with pytest.raises(UsageError, match=f"causal_loss: the model returned {shown}; return"):
        causal_loss(output, torch.zeros(2, 5, dtype=torch.int64))
