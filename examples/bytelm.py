"""A GPT-style language model of bytes, trained on the source text of pipeworker itself.

    pipeworker launch --stages 4 --run-dir runs/bytes examples/bytelm.py
    pipeworker launch --stages 4 examples/bytelm.py -- --width 256 --blocks 10
    python examples/bytelm.py runs/bytes

The last command prints text that the trained model generates. The layers are given as callables, so
that each is built only on the stage that owns it. Every twentieth file is held out for evaluation.
"""

import argparse
import tempfile
from importlib.util import find_spec
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

parser = argparse.ArgumentParser(prog="bytelm.py")
parser.add_argument("run", nargs="?", help="a run or a checkpoint to generate text with")
parser.add_argument("--bytes", type=int, default=200, help="length of the generated text")
parser.add_argument("--width", type=int, default=128)
parser.add_argument("--heads", type=int, default=4)
parser.add_argument("--blocks", type=int, default=4)
parser.add_argument("--context", type=int, default=64, help="bytes in a sequence")
parser.add_argument("--batch", type=int, default=32, help="sequences in a mini-batch")
parser.add_argument("--rate", type=float, default=8e-3, help="peak learning rate")
args = parser.parse_args()


class Embed(nn.Module):
    """An embedding of the last six bytes and the position: (batch, time) to (…, width)."""

    def __init__(self):
        super().__init__()
        self.byte = nn.Embedding(256, args.width)
        self.position = nn.Parameter(0.02 * torch.randn(args.context, args.width))
        self.mix = nn.Conv1d(args.width, args.width, 6)

    def forward(self, x):
        bytes_before = F.pad(self.byte(x).transpose(1, 2), (5, 0))
        return self.mix(bytes_before).transpose(1, 2) + self.position[: x.shape[1]]


class Block(nn.Module):
    """Causal self-attention and an MLP, both with residuals: (batch, time, width) to the same."""

    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(args.width), nn.LayerNorm(args.width)
        self.qkv = nn.Linear(args.width, 3 * args.width)
        self.out = nn.Linear(args.width, args.width)
        self.up = nn.Linear(args.width, 4 * args.width)
        self.down = nn.Linear(4 * args.width, args.width)

    def forward(self, x):
        batch, time, width = x.shape
        qkv = self.qkv(self.norm1(x)).view(batch, time, 3, args.heads, width // args.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, time, width))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Head(nn.Module):
    """The logits of the next byte: (batch, time, width) to (batch, time, 256)."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(args.width)
        self.logits = nn.Linear(args.width, 256)

    def forward(self, x):
        return self.logits(self.norm(x))


def model():
    return [Embed, *[Block] * args.blocks, Head]


def loss(output, target):
    return F.cross_entropy(output.flatten(0, 1), target.flatten())


def optimizer(params):
    return torch.optim.AdamW(params, lr=args.rate, betas=(0.9, 0.95), weight_decay=0.1)


def scheduler(optimizer, steps):
    return torch.optim.lr_scheduler.OneCycleLR(optimizer, args.rate, steps, pct_start=0.1)


def sequences(held_out):
    """Return the text in sequences, as inputs and next bytes, both (sequences, context)."""
    files = sorted(Path(find_spec("pipeworker").origin).parent.rglob("*.py"))
    chosen = files[::20] if held_out else [file for i, file in enumerate(files) if i % 20]
    text = bytearray(b"".join(file.read_bytes() for file in chosen))
    stream = torch.frombuffer(text, dtype=torch.uint8)
    count = (len(stream) - 1) // args.context
    inputs, targets = (part[: count * args.context] for part in (stream, stream[1:]))
    return inputs.view(count, -1), targets.view(count, -1)


def batches(inputs, targets, order):
    """Yield mini-batches of the sequences in this order."""
    for chosen in order.split(args.batch):
        yield inputs[chosen].long(), targets[chosen].long()


def data():
    inputs, targets = sequences(held_out=False)
    return batches(inputs, targets, torch.randperm(len(inputs)))


def evaluation():
    inputs, targets = sequences(held_out=True)
    return batches(inputs, targets, torch.arange(min(256, len(inputs))))


def generate(run, prompt=b"def ", temperature=0.6):
    """Return the prompt and the text that the model of a run generates after it."""
    import pipeworker

    torch.manual_seed(0)
    text = torch.tensor([list(prompt)])
    with (
        tempfile.TemporaryDirectory() as folder,
        pipeworker.Pipeline(
            model, loss=loss, optimizer=optimizer, microbatches=1, run_dir=f"{folder}/run"
        ) as pipeline,
    ):
        pipeline.load(run)
        for _ in range(args.bytes):
            logits = pipeline.predict(text[:, -args.context :])[:, -1].cpu()
            text = torch.cat([text, torch.multinomial(F.softmax(logits / temperature, 1), 1)], 1)
    return bytes(text[0].tolist())


if __name__ == "__main__":
    print(generate(args.run).decode(errors="replace"))
