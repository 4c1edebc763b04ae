"""A language model of Python functions: text is tokenized, and short texts share a sequence.

    pip install tokenizers
    pipeworker launch --stages 2 --epochs 2 --evaluate-every 50 examples/packedlm.py

The texts are the functions in the source of Python's standard library. A byte-pair encoding is
trained on them when the data is read. Texts have any length: each row of a mini-batch holds as many
as fit, and a mask keeps them apart. A row ends with padding, and a mini-batch is as long as its
longest row. Mini-batches are the same in each epoch but for their order, so that a run that is
resumed skips those that it has seen without making them.
"""

import argparse
import ast
import sysconfig
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import nn
from torch.nn import functional as F

parser = argparse.ArgumentParser(prog="packedlm.py")
parser.add_argument("--files", default="[a-e]*.py", help="which files of the standard library")
parser.add_argument("--words", type=int, default=1024, help="size of the vocabulary")
parser.add_argument("--width", type=int, default=128)
parser.add_argument("--heads", type=int, default=4)
parser.add_argument("--blocks", type=int, default=4)
parser.add_argument("--context", type=int, default=256, help="most tokens in a row")
parser.add_argument("--batch", type=int, default=8, help="rows in a mini-batch")
parser.add_argument("--rate", type=float, default=3e-3)
args = parser.parse_args()

UNPREDICTED = -100
"""The label of a token that is not predicted: padding, and the first one of a text."""


class Block(nn.Module):
    """Attention within each text and an MLP: (rows, time, width) to the same."""

    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(args.width), nn.LayerNorm(args.width)
        self.qkv = nn.Linear(args.width, 3 * args.width)
        self.out = nn.Linear(args.width, args.width)
        self.up = nn.Linear(args.width, 4 * args.width)
        self.down = nn.Linear(4 * args.width, args.width)

    def forward(self, x, mask):
        rows, time, width = x.shape
        qkv = self.qkv(self.norm1(x)).view(rows, time, 3, args.heads, width // args.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        x = x + self.out(mixed.transpose(1, 2).reshape(rows, time, width))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Net(nn.Module):
    """Logits of the next token: tokens, texts and places (rows, time) to (rows, time, words)."""

    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(args.words, args.width)
        self.places = nn.Embedding(args.context, args.width)
        self.blocks = nn.ModuleList(Block() for _ in range(args.blocks))
        self.norm = nn.LayerNorm(args.width)
        self.head = nn.Linear(args.width, args.words, bias=False)

    def forward(self, tokens, texts, places):
        same_text = texts[:, :, None] == texts[:, None, :]
        mask = (same_text & torch.ones_like(same_text[0]).tril())[:, None]
        x = self.words(tokens) + self.places(places)
        for block in self.blocks:
            x = block(x, mask)
        return self.head(self.norm(x))


def model():
    return Net()


def loss(output, target):
    total = F.cross_entropy(
        output.flatten(0, 1), target.flatten(), ignore_index=UNPREDICTED, reduction="sum"
    )
    return total, (target != UNPREDICTED).sum()


def optimizer(params):
    return torch.optim.AdamW(params, lr=args.rate, betas=(0.9, 0.95), weight_decay=0.1)


def read_texts():
    """Return the source of each function of the standard library, in files as `--files` names."""
    found = []
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob(args.files)):
        source = path.read_text("utf-8")
        lines = source.splitlines(keepends=True)
        found += [
            "".join(lines[node.lineno - 1 : node.end_lineno])
            for node in ast.walk(ast.parse(source))
            if isinstance(node, ast.FunctionDef)
        ]
    return found


def tokenize(texts):
    """Return the tokens of each text, at most `--context`, by an encoding of pairs of bytes."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=args.words, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    return [encoding.ids[: args.context] for encoding in tokenizer.encode_batch(texts)]


def pack(texts):
    """Return rows of texts, each text in the first of the last 16 rows that has room for it."""
    rows, room = [], []
    for text in texts:
        open_rows = range(max(0, len(rows) - 16), len(rows))
        row = next((i for i in open_rows if room[i] >= len(text)), None)
        if row is None:
            row = len(rows)
            rows.append([])
            room.append(args.context)
        rows[row].append(text)
        room[row] -= len(text)
    return rows


def batch_of(rows):
    """Return the arguments of `forward` and the labels, of rows of texts."""
    time = max(sum(map(len, row)) for row in rows)
    tokens, texts, places = (torch.zeros(len(rows), time, dtype=torch.long) for _ in range(3))
    labels = torch.full((len(rows), time), UNPREDICTED)
    for i, row in enumerate(rows):
        begin = 0
        for number, text in enumerate(row, start=1):
            end, ids = begin + len(text), torch.tensor(text)
            tokens[i, begin:end] = ids
            texts[i, begin:end] = number  # 0 is padding
            places[i, begin:end] = torch.arange(len(text))
            labels[i, begin : end - 1] = ids[1:]
            begin = end
    return {"tokens": tokens, "texts": texts, "places": places}, labels


def batches(*, held_out):
    """Return the rows of each mini-batch; every tenth text is held out."""
    texts = tokenize(read_texts())
    rows = pack([text for i, text in enumerate(texts) if (i % 10 == 0) == held_out])
    return [rows[i : i + args.batch] for i in range(0, len(rows) - args.batch + 1, args.batch)]


def data(start):
    found = batches(held_out=False)
    for i in torch.randperm(len(found)).tolist()[start:]:
        yield batch_of(found[i])


def evaluation():
    return map(batch_of, batches(held_out=True)[:8])
