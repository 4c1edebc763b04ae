"""Operators whose kernels give other bits when they run again on the same input.

Each is run 20 times, forward and backward, with the kernels that torch picks and with those of
``--deterministic``; ``refused`` means that torch has no deterministic one.

    python benchmarks/operators.py [--device cuda]
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional

RUNS = 20
_generator = torch.Generator()
_device = torch.device("cpu")


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=_generator).to(_device).requires_grad_()


def below(limit: int, *shape: int) -> torch.Tensor:
    return torch.randint(limit, shape, generator=_generator).to(_device)


def attention(length: int, dtype: torch.dtype, *, causal: bool = False) -> torch.Tensor:
    query, key, value = (normal(4, 8, length, 64).to(dtype) for _ in range(3))
    return functional.scaled_dot_product_attention(query, key, value, is_causal=causal)


def layer(module: nn.Module, *shape: int) -> Any:
    found = module.to(_device)(normal(*shape))
    return found[0] if isinstance(found, tuple) else found


def ctc() -> torch.Tensor:
    scores = normal(200, 16, 40).log_softmax(2)
    lengths = torch.full((16,), 200, device=_device), torch.full((16,), 30, device=_device)
    return functional.ctc_loss(scores, 1 + below(39, 16, 30), *lengths)


def pixels() -> torch.Tensor:
    return functional.nll_loss(normal(8, 20, 64, 64).log_softmax(1), below(20, 8, 64, 64))


OPERATORS: dict[str, Callable[[], Any]] = {
    "linear": lambda: layer(nn.Linear(512, 512), 4096, 512),
    "linear, bf16": lambda: layer(nn.Linear(512, 512).bfloat16().float(), 4096, 512).bfloat16(),
    "layer norm": lambda: layer(nn.LayerNorm(512), 4096, 512),
    "RMS norm": lambda: layer(nn.RMSNorm(512), 4096, 512),
    "group norm": lambda: layer(nn.GroupNorm(8, 64), 32, 64, 28, 28),
    "batch norm": lambda: layer(nn.BatchNorm2d(64), 32, 64, 28, 28),
    "conv1d": lambda: layer(nn.Conv1d(64, 64, 3), 32, 64, 256),
    "conv2d": lambda: layer(nn.Conv2d(64, 128, 3), 32, 64, 28, 28),
    "conv2d, stride 2": lambda: layer(nn.Conv2d(64, 128, 3, 2), 32, 64, 28, 28),
    "conv2d, depthwise": lambda: layer(nn.Conv2d(64, 64, 3, groups=64), 32, 64, 28, 28),
    "conv3d": lambda: layer(nn.Conv3d(16, 32, 3), 8, 16, 16, 16, 16),
    "conv2d, transposed": lambda: layer(nn.ConvTranspose2d(64, 32, 3, 2), 32, 64, 28, 28),
    "LSTM": lambda: layer(nn.LSTM(128, 128), 64, 32, 128),
    "GRU": lambda: layer(nn.GRU(128, 128), 64, 32, 128),
    "attention, fp32": lambda: attention(512, torch.float32),
    "attention, bf16": lambda: attention(512, torch.bfloat16),
    "attention, bf16, causal, 2048": lambda: attention(2048, torch.bfloat16, causal=True),
    "embedding": lambda: functional.embedding(below(1000, 64, 512), normal(1000, 64)),
    "embedding bag, sum": lambda: functional.embedding_bag(
        below(1000, 512, 64), normal(1000, 64), mode="sum"
    ),
    "embedding bag, max": lambda: functional.embedding_bag(
        below(1000, 512, 64), normal(1000, 64), mode="max"
    ),
    "index": lambda: normal(1000, 64)[below(1000, 1 << 16)],
    "index_select": lambda: normal(1000, 64).index_select(0, below(1000, 1 << 16)),
    "gather": lambda: normal(1000, 64).gather(0, below(1000, 1 << 14, 64)),
    "take_along_dim": lambda: normal(1000, 64).take_along_dim(below(1000, 1 << 14, 64), 0),
    "index_add": lambda: normal(100, 64).index_add(0, below(100, 1 << 14), normal(1 << 14, 64)),
    "index_put, accumulate": lambda: normal(100, 64).index_put(
        (below(100, 1 << 14),), normal(1 << 14, 64), accumulate=True
    ),
    "scatter_add": lambda: normal(100, 64).scatter_add(
        0, below(100, 1 << 14, 64), normal(1 << 14, 64)
    ),
    "scatter_reduce, sum": lambda: normal(100, 64).scatter_reduce(
        0, below(100, 1 << 14, 64), normal(1 << 14, 64), "sum"
    ),
    "scatter_reduce, mean": lambda: normal(100, 64).scatter_reduce(
        0, below(100, 1 << 14, 64), normal(1 << 14, 64), "mean"
    ),
    "cumsum": lambda: normal(64, 1 << 14).cumsum(1),
    "cumsum, one dimension": lambda: normal(1 << 20).cumsum(0),
    "sum": lambda: normal(1 << 22).sum(),
    "softmax": lambda: normal(4096, 1000).softmax(1),
    "cross_entropy": lambda: functional.cross_entropy(normal(4096, 1000), below(1000, 4096)),
    "nll_loss of images": pixels,
    "ctc_loss": ctc,
    "max_pool2d": lambda: functional.max_pool2d(normal(32, 64, 28, 28), 3, 2, 1),
    "max_pool3d": lambda: functional.max_pool3d(normal(4, 16, 16, 16, 16), 3, 2, 1),
    "avg_pool2d": lambda: functional.avg_pool2d(normal(32, 64, 28, 28), 3, 2, 1),
    "avg_pool3d": lambda: functional.avg_pool3d(normal(4, 16, 16, 16, 16), 3, 2, 1),
    "adaptive_avg_pool2d": lambda: functional.adaptive_avg_pool2d(normal(32, 64, 28, 28), 5),
    "adaptive_max_pool2d": lambda: functional.adaptive_max_pool2d(normal(32, 64, 28, 28), 5),
    "fractional_max_pool2d": lambda: layer(nn.FractionalMaxPool2d(2, 13), 8, 16, 28, 28),
    "interpolate, nearest": lambda: functional.interpolate(normal(8, 64, 28, 28), scale_factor=2),
    "interpolate, bilinear": lambda: functional.interpolate(
        normal(8, 64, 28, 28), size=(61, 61), mode="bilinear"
    ),
    "interpolate, bicubic": lambda: functional.interpolate(
        normal(8, 64, 28, 28), size=(61, 61), mode="bicubic"
    ),
    "interpolate, linear": lambda: functional.interpolate(
        normal(8, 64, 500), size=1111, mode="linear"
    ),
    "interpolate, trilinear": lambda: functional.interpolate(
        normal(2, 8, 9, 9, 9), size=(20, 20, 20), mode="trilinear"
    ),
    "grid_sample": lambda: functional.grid_sample(
        normal(8, 64, 28, 28), normal(8, 64, 64, 2).tanh(), align_corners=False
    ),
    "pad, reflect": lambda: functional.pad(normal(8, 64, 28, 28), (3, 3, 3, 3), "reflect"),
    "pad, replicate": lambda: functional.pad(normal(8, 64, 28, 28), (3, 3, 3, 3), "replicate"),
    "pad, circular": lambda: functional.pad(normal(8, 64, 28, 28), (3, 3, 3, 3), "circular"),
    "unfold": lambda: functional.unfold(normal(8, 16, 28, 28), 3),
    "fold": lambda: functional.fold(normal(8, 144, 676), 28, 3),
    "bincount with weights": lambda: below(100, 1 << 16).bincount(normal(1 << 16).detach()),
    "histc": lambda: normal(1 << 16).detach().histc(100),
    "median": lambda: normal(512, 1001).median(1).values,
    "kthvalue": lambda: normal(512, 1001).kthvalue(100, 1).values,
    "sort": lambda: below(50, 1 << 16).sort().indices,
    "topk": lambda: normal(512, 1001).topk(20).values,
    "repeat_interleave": lambda: normal(1000, 64).repeat_interleave(below(9, 1000), 0),
    "prelu": lambda: functional.prelu(normal(64, 64, 28, 28), normal(64)),
    "cdist": lambda: torch.cdist(normal(512, 64), normal(512, 64)),
    "einsum": lambda: torch.einsum("bij,bjk->bik", normal(64, 128, 128), normal(64, 128, 128)),
    "spectral norm": lambda: layer(
        nn.utils.parametrizations.spectral_norm(nn.Linear(256, 256)), 1024, 256
    ),
    "fft": lambda: torch.fft.rfft2(normal(16, 64, 64)).abs(),
    "sparse matrix product": lambda: torch.sparse.mm(
        torch.sparse_coo_tensor(
            below(1000, 2, 1 << 14), normal(1 << 14).detach(), (1000, 1000)
        ).coalesce(),
        normal(1000, 64),
    ),
}


def bits(make: Callable[[], Any]) -> list[torch.Tensor]:
    """Return what an operator gives from one seed: its output and the gradients of its inputs."""
    torch.manual_seed(0)
    _generator.manual_seed(0)
    leaves: list[torch.Tensor] = []

    def hook(node: Any) -> None:
        if node is None or node in seen:
            return
        seen.add(node)
        variable = getattr(node, "variable", None)
        if variable is not None:
            leaves.append(variable)
        for following, _ in node.next_functions:
            hook(following)

    seen: set[Any] = set()
    output = make()
    if output.requires_grad:
        hook(output.grad_fn)
        weight = torch.linspace(-1, 1, output.numel(), device=_device).view(output.shape)
        (output.float() * weight).sum().backward()
    return [output.detach(), *(leaf.grad for leaf in leaves if leaf.grad is not None)]


def verdict(make: Callable[[], Any]) -> str:
    try:
        first = bits(make)
        for _ in range(RUNS - 1):
            pairs = [*zip(first, bits(make), strict=True)]
            if not torch.equal(*pairs[0]):
                return "differs"
            if not all(torch.equal(one, other) for one, other in pairs[1:]):
                return "differs in its backward"
    except RuntimeError as error:
        return "refused" if "deterministic" in str(error) else f"fails: {error}".splitlines()[0]
    return "same"


def main() -> None:
    global _device
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cuda")
    _device = torch.device(parser.parse_args().device)
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    name = torch.cuda.get_device_name() if _device.type == "cuda" else str(_device)
    print(
        f"{name}, torch {torch.__version__}; of {len(OPERATORS)} operators the others are the same"
    )
    print("| operator | torch's choice | `--deterministic` |")
    print("|---|---|---|")
    for operator, make in OPERATORS.items():
        torch.use_deterministic_algorithms(False)
        usual = verdict(make)
        torch.use_deterministic_algorithms(True)
        found = usual, verdict(make)
        if found != ("same", "same"):
            print(f"| {operator} | {' | '.join(found)} |", flush=True)


if __name__ == "__main__":
    main()
