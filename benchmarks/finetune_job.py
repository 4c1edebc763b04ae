"""A Llama of transformers, built from a configuration, on random tokens.

The arguments are its width, its number of layers, and the tokens of a sample.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.nn import functional
from transformers import LlamaConfig, LlamaForCausalLM

WIDTH, LAYERS, LENGTH = map(int, sys.argv[1:4])
WORDS, BATCH = 32_000, 16


def model() -> Any:
    config = LlamaConfig(
        vocab_size=WORDS,
        hidden_size=WIDTH,
        intermediate_size=4 * WIDTH,
        num_hidden_layers=LAYERS,
        num_attention_heads=WIDTH // 64,
        max_position_embeddings=LENGTH,
        use_cache=False,
    )
    return LlamaForCausalLM(config)


def loss(output: Any, target: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(output.logits.flatten(0, 1).float(), target.flatten())


def optimizer(params: Iterable[torch.Tensor]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=1e-4)


def data() -> Iterator[Any]:
    generator = torch.Generator().manual_seed(0)
    while True:
        ids = torch.randint(WORDS, (BATCH, LENGTH + 1), generator=generator)
        yield {"input_ids": ids[:, :-1]}, ids[:, 1:]
