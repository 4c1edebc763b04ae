"""A language model of transformers is trained further on text, by its own forward.

    pip install transformers
    pipeworker launch --stages 2 --evaluate-every 20 --init-from FOLDER model.py -- FOLDER

FOLDER has a model as `save_pretrained` or a download writes it: a configuration, a tokenizer, and
weights, of which each process reads its part. Without FOLDER a small Llama that has learnt nothing
reads bytes.
"""

import sys
import sysconfig
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, LlamaConfig

import pipeworker

FOLDER = sys.argv[1] if len(sys.argv) > 1 else None
CONTEXT = 64  # tokens in a sequence
BATCH = 16  # sequences in a mini-batch
STEPS = 60


# The network: any module. Its own forward is cut into layers, one for each of its blocks.
def model():
    if FOLDER is not None:
        config = AutoConfig.from_pretrained(FOLDER, use_cache=False)
        return AutoModelForCausalLM.from_config(config)
    small = LlamaConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        tie_word_embeddings=True,
        use_cache=False,
    )
    return AutoModelForCausalLM.from_config(small)


# What is to become small: the loss of the next token, as a sum and the number of tokens.
def loss(output, target):
    return pipeworker.causal_loss(output, target)


# Any optimizer of torch's. It is called once on each stage, with the parameters of that stage.
def optimizer(params):
    return torch.optim.AdamW(params, lr=1e-5 if FOLDER else 4e-3, weight_decay=0.1)


# What the network learns from: pairs of the arguments of its forward and the labels.
def data():
    tokens = tokenized()
    for _ in range(STEPS):
        yield sequences(tokens[: -len(tokens) // 10])


# What it is tried on with --evaluate-every: text it has not seen; you may leave it out.
def evaluation():
    tokens = tokenized()
    for _ in range(4):
        yield sequences(tokens[-len(tokens) // 10 :])


def tokenized():
    """Return the tokens of your text; here, of some of the standard library's source."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    text = "".join(path.read_text("utf-8") for path in sorted(folder.glob("t*.py")))
    if FOLDER is None:
        return torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8).long()
    return torch.tensor(AutoTokenizer.from_pretrained(FOLDER)(text)["input_ids"])


def sequences(tokens):
    """Return BATCH sequences from somewhere in the text, as input and as labels."""
    starts = torch.randint(len(tokens) - CONTEXT, (BATCH, 1))
    found = tokens[starts + torch.arange(CONTEXT)]
    return {"input_ids": found}, found
