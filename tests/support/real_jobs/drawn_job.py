"""Jobs drawn from a seed: a network, a loss, an optimizer, data and options."""

from __future__ import annotations

import random
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from pipeworker.plan.orders import ORDERS, resolve
from support.real_jobs.drawn_layers import LIBRARY

END = "\n# What was drawn:\n"
WIDTH = 8
_SCHEDULES = tuple(ORDERS)

_EVERY = (
    *("nn.Linear({d}, {d})", "nn.Linear({d}, {d}, bias=False)", "nn.Tanh()", "nn.GELU()"),
    *("nn.Dropout(0.2)", "nn.Dropout(0.1)", "nn.LayerNorm({d})", "Average({d})", "Counter()"),
    *("Noise()", "Sometimes({d}, {d})", "Detached({d}, {d})", "Frozen({d}, {d})"),
    *("Residual(nn.Linear({d}, {d}), nn.Dropout(0.1), nn.SiLU())", "Recurrent({d})"),
    *("Again(nn.Linear({d}, {d}), nn.Dropout(0.1), nn.Tanh())", "Ranks({d}, 2)"),
    *("nn.Sequential(nn.Linear({d}, {d}), nn.ReLU(inplace=True))", "nn.Identity()"),
    *("parametrizations.weight_norm(nn.Linear({d}, {d}))", "nn.Softsign()"),
    *("parametrizations.spectral_norm(nn.Linear({d}, {d}))", "nn.PReLU()"),
)
_FEATURES = (*_EVERY, "Norm1d({d})", "Norm1d({d})", "Norm1d({d}, momentum=None)")
_TOKENS = (*_EVERY, "Attention({d})", "nn.RMSNorm({d})", "Attention({d})")
_IMAGES = (
    *("nn.Conv2d({d}, {d}, 3, padding=1)", "nn.Conv2d({d}, {d}, 1)", "nn.BatchNorm2d({d})"),
    *("nn.BatchNorm2d({d}, affine=False)", "nn.GroupNorm(2, {d})", "nn.Dropout2d(0.2)"),
    *("nn.InstanceNorm2d({d}, track_running_stats=True)", "nn.ReLU()", "nn.MaxPool2d(3, 1, 1)"),
    *("nn.Dropout(0.2)", "Residual(nn.Conv2d({d}, {d}, 3, padding=1), nn.ELU())", "Counter()"),
    *("nn.Conv2d({d}, {d}, 3, padding=1, groups=2)", "nn.AvgPool2d(3, 1, 1)", "nn.Tanh()"),
    *("Again(nn.Conv2d({d}, {d}, 1), nn.Dropout(0.1))",),
)
_ENDS = {
    "features": ("nn.Linear(8, {d})", "nn.Linear({d}, 3)"),
    "tokens": ("Lookup(11, {d})", "Head(11, {d})"),
    "images": ("nn.Conv2d(3, {d}, 3, padding=1)", "Pool()", "nn.Linear({d}, 3)"),
}
_BATCH = {
    "features": """
        def batch(size, source, generator):
            x = torch.randn(size, 8, generator=generator)
            return x, (x[:, 0] > 0).long() + (x[:, 1] > 0).long()
    """,
    "tokens": """
        def batch(size, source, generator):
            ids = torch.randint(11, (size, source.randint(2, 6)), generator=generator)
            return ids, ids.roll(1, 1)
    """,
    "images": """
        def batch(size, source, generator):
            side = source.choice((4, 5, 7))
            x = torch.randn(size, 3, side, side, generator=generator)
            return x, (x[:, 0, 0, 0] > 0).long() + (x[:, 1, 0, 0] > 0).long()
    """,
}
_LAYERS = {"features": _FEATURES, "tokens": _TOKENS, "images": _IMAGES}

_SGD = ("SGD(params, lr=0.05, momentum=0.9)", "SGD(params, lr=0.05, momentum=0.9, nesterov=True)")
_FUSED = "SGD(params, lr=0.05, momentum=0.9, fused=True)"
_OPTIMIZERS = (
    *(_SGD[0], _SGD[1], "SGD(decays(params), lr=0.1)", "Adam(params, lr=0.01)"),
    *("AdamW(params, lr=0.01)", "AdamW(decays(params), lr=0.01)", "Adamax(params)"),
    *("Adam(params, lr=0.01, amsgrad=True)", "AdamW(params, lr=0.01, fused=True)"),
    *("AdamW(params, lr=0.01, foreach=True)", "SGD(params, lr=0.01, foreach=True)"),
    *("RMSprop(params, lr=1e-3, momentum=0.9, centered=True)", "Adagrad(params, lr=0.05)"),
    *("Adadelta(params)", "NAdam(params)", "RAdam(params)", "Rprop(params)", "ASGD(params)"),
    *(_FUSED, "Adafactor(params)"),
)
_SCHEDULERS = (
    *("StepLR(optimizer, 3, 0.8)", "ExponentialLR(optimizer, 0.99)"),
    *("CosineAnnealingLR(optimizer, 20)", "CosineAnnealingWarmRestarts(optimizer, 7)"),
    *("LambdaLR(optimizer, lambda step: 1 / (1 + 0.01 * step))", "LinearLR(optimizer)"),
    *("CyclicLR(optimizer, 1e-4, 1e-2, 5, cycle_momentum=False)",),
    "SequentialLR(optimizer, [lr_scheduler.ConstantLR(optimizer, 0.1), "
    "lr_scheduler.ExponentialLR(optimizer, 0.99)], [4])",
)
_BEFORE = """
    def before_update(params):
        for p in params:
            if p.grad is not None:
                p.grad += 1e-3 * torch.randn_like(p.grad)
"""
_SINGLE = """
    def evaluation():
        for size in (5, 2, 7):
            yield batch(size, random, None)
"""
_SEVERAL = """
    def some(*sizes):
        return (batch(size, random, None) for size in sizes)

    def evaluation():
        return {"first": lambda: some(5, 2, 7), "second": lambda: some(3)}
"""
_METRICS = """
    def metrics(output, target):
        return {"greatest": output.detach().max(), "mean": output.detach().float().mean()}
"""
_HOOKS = """
    def on_step(row):
        assert torch.rand(()) < 1

    def on_evaluation(row):
        assert random.random() < 1

    def on_checkpoint(path):
        assert (path / "manifest.json").name
"""


@dataclass(frozen=True)
class DrawnJob:
    """A job file and its options.

    Attributes:
        layers: the number of layers.
        source: the text of the job file.
        bits: the options that the numbers depend on.
        layout: the options that they do not depend on.
        stages: the number of stages that `layout` specifies.
        replicas: the number of replicas that `bits` specifies.
    """

    layers: int
    source: str
    bits: tuple[str, ...]
    layout: tuple[str, ...]
    stages: int
    replicas: int

    @property
    def workers(self) -> int:
        """The number of workers of all replicas."""
        return self.stages * self.replicas

    def __str__(self) -> str:
        words = " ".join((*self.bits, *self.layout))
        return f"launch {words} job.py\n{self.source.partition(END)[2]}"

    def with_layout(self, chance: random.Random) -> DrawnJob:
        """Return the same job with another layout."""
        schedule = chance.choice(_SCHEDULES)
        order = resolve(schedule)
        virtual = chance.choice((2, 3)) if order.varies else order.virtual_stages
        most = min(4, self.layers // virtual, 6 // self.replicas)
        stages = chance.randint(1, max(1, most))
        cuts = sorted(chance.sample(range(1, self.layers), stages * virtual - 1))
        sizes = [b - a for a, b in zip([0, *cuts], [*cuts, self.layers], strict=True)]
        words = [
            *("--stages", f"{stages}", "--balance", ",".join(map(str, sizes))),
            *("--schedule", schedule),
            *(("--virtual-stages", f"{virtual}") if order.varies else ()),
            *("--recompute", chance.choice(("always", "except_first", "never", "offload"))),
            *("--backend", chance.choice(("auto", "auto", "auto", "gloo", "tls"))),
            *("--checkpoint-every", f"{chance.randint(2, 9)}", "--keep", f"{chance.randint(1, 3)}"),
            *("--checkpoint-busy", chance.choice(("skip", "wait"))),
        ]
        if chance.random() < 0.7:
            words += ["--snapshot-every", f"{chance.choice((1, 2, 5))}"]
        words += ["--min-stages", f"{chance.choice((1, stages, stages))}"]  # a resume keeps it
        if self.replicas > 1:
            words += [chance.choice(("--shard-optimizer", "--no-shard-optimizer"))]
            words += ["--data-reader", chance.choice(("every", "first"))]
        return replace(self, layout=tuple(words), stages=stages)


def draw_job(chance: random.Random, *, alone: bool = False) -> DrawnJob:
    """Draw a job.

    Args:
        chance: the source of all choices.
        alone: whether it is for a loop of the user's own, without epochs and evaluations.
    """
    kind = chance.choice(("features", "features", "tokens", "images"))
    microbatches = chance.randint(1, 6)
    layers = _network(chance, kind)
    parts = [LIBRARY, END, _model(chance, kind, layers), _loss(chance, kind)]
    parts += _optimizer(chance, layers, alone)
    own, starts = alone or chance.random() < 0.5, not alone and chance.random() < 0.3
    parts.append(_data(chance, kind, microbatches, own, starts))
    bits = ["--microbatches", f"{microbatches}", "--seed", f"{chance.randint(0, 99)}"]
    if not alone and chance.random() < 0.4:
        several = chance.random() < 0.3
        parts += [_SEVERAL if several else _SINGLE, _METRICS]
        bits += ["--evaluate-every", chance.choice(("1", "3", "epoch"))]
        figures = ("second/loss", "max:first/mean") if several else ("greatest", "max:mean")
        bits += ["--best", chance.choice(("loss", *figures))]
        bits += ["--evaluate-first"] * (chance.random() < 0.3)
    if not alone and chance.random() < 0.15:
        parts.append(_HOOKS)
    if not alone and chance.random() < 0.3:
        bits += ["--accumulate", f"{chance.randint(2, 3)}"]
    for name, values, share in (
        ("--clip-grad-norm", ("0.1", "1", "10"), 0.5),
        ("--clip-grad-value", ("0.01", "0.1"), 0.2),
        ("--precision", ("bf16", "fp16", "fp16"), 0.5),
        ("--deferred-batch-norm", (), 0.3),
    ):
        if chance.random() < share:
            bits += [name, *([chance.choice(values)] if values else [])]
    replicas = chance.choice((1, 1, 1, min(2, microbatches), min(3, microbatches)))
    bits += ["--replicas", f"{replicas}"]
    source = "".join(textwrap.dedent(part) for part in parts)
    job = DrawnJob(len(layers), source, tuple(bits), (), 1, replicas)
    return job.with_layout(chance)


def _network(chance: random.Random, kind: str) -> list[str]:
    """Return the expressions of the layers."""
    inner = [chance.choice(_LAYERS[kind]) for _ in range(chance.randint(2, 8))]
    if kind != "images" and chance.random() < 0.3:
        at = chance.randint(0, len(inner))
        more = chance.choice(([], ["nn.Identity()"]))
        inner[at:at] = ["Spread()", *more, f"Inside({WIDTH}, {WIDTH})", "Gather()"]
    for number in range(chance.choice((0, 0, 1, 2, 3))):
        first, second = sorted(chance.sample(range(len(inner) + 1), 2))
        inside = (i for i, layer in enumerate(inner) if layer.startswith(("Inside", "Gather")))
        if not {first, second} & {j for i in inside for j in (i, i - 1, i + 1)}:
            inner.insert(second, f'Pop("{number}")')
            inner.insert(first, f'Stash("{number}")')
    if chance.random() < 0.15:
        value = chance.choice(("nan", "inf", "-inf", "1e38"))
        text = f'Poison(float("{value}"), {chance.randint(1, 3)}, {chance.random() < 0.5})'
        outside = [i for i, layer in enumerate(inner) if not layer.startswith(("Inside", "Gather"))]
        inner.insert(chance.choice(outside), text)
    begin, *end = _ENDS[kind]
    return [text.format(d=WIDTH) for text in (begin, *inner, *end)]


def _model(chance: random.Random, kind: str, layers: Sequence[str]) -> str:
    """Return the text of ``model`` and ``tied``."""
    tied: list[tuple[int, int, str]] = []
    if kind == "tokens" and chance.random() < 0.5:
        tied.append((0, len(layers) - 1, "table"))
    twice = [i for i, layer in enumerate(layers) if layer == f"nn.Linear({WIDTH}, {WIDTH})"]
    if len(twice) > 1 and chance.random() < 0.5:
        tied += [(twice[0], twice[-1], name) for name in ("weight", "bias")]
    if chance.random() < 0.4:
        pairs = ", ".join(f'("{a}.{name}", "{b}.{name}")' for a, b, name in tied)
        built = "".join(f"        lambda: {layer},\n" for layer in layers)
        declared = f"\ntied = [{pairs}]\n" if tied else ""
        return f"{declared}\ndef model():\n    return [\n{built}    ]\n"
    lines = [
        "",
        "def model():",
        "    layers = [",
        *(f"        {layer}," for layer in layers),
        "    ]",
    ]
    lines += [f"    layers[{b}].{name} = layers[{a}].{name}" for a, b, name in tied]
    named = "nn.Sequential(OrderedDict((f'part_{i}', layer) for i, layer in enumerate(layers)))"
    made = chance.choice(("nn.Sequential(*layers)", named, "layers"))
    return "\n".join([*lines, f"    return {made}", ""])


def _loss(chance: random.Random, kind: str) -> str:
    flat = ".flatten(0, 1), target.flatten()" if kind == "tokens" else ", target"
    if chance.random() < 0.4:
        result = f'(nn.functional.cross_entropy(output{flat}, reduction="sum"), target.numel())'
    else:
        result = f"nn.functional.cross_entropy(output{flat})"
    return f"\ndef loss(output, target):\n    return {result}\n"


def _optimizer(chance: random.Random, layers: Sequence[str], alone: bool) -> Iterator[str]:
    """Yield the texts of ``optimizer``, ``scheduler`` and ``before_update``."""
    # torch's own error if only some of the parameters had a gradient at first
    without = {_FUSED} if any(layer.startswith("Detached") for layer in layers) else {}
    made = chance.choice([one for one in _OPTIMIZERS if one not in without])
    yield f"\ndef optimizer(params):\n    return torch.optim.{made}\n"
    if chance.random() < 0.5:
        made = chance.choice(_SCHEDULERS)
        yield f"\ndef scheduler(optimizer):\n    return lr_scheduler.{made}\n"
        if not alone and chance.random() < 0.2:
            yield '\nscheduler_interval = "epoch"\n'
    if chance.random() < 0.2:
        yield _BEFORE


def _data(chance: random.Random, kind: str, microbatches: int, own: bool, starts: bool) -> str:
    """Return the text of ``data``, with generators of its `own`; if it `starts`, anywhere."""
    sizes = [chance.randint(1, 3 * microbatches) for _ in range(chance.randint(2, 6))]
    sizes.insert(chance.randint(0, len(sizes)), 2 * microbatches + 1)
    source = "random.Random(7), torch.Generator().manual_seed(7)" if own else "random, None"
    # Generators of its own begin anew, so that what they drew before `start` is drawn again.
    skip = f"[batch(size, source, generator) for size in {sizes}[:start]]" if own else "None"
    return textwrap.dedent(_BATCH[kind]) + textwrap.dedent(
        f"""
        def data({"start" if starts else ""}):
            source, generator = {source}
            {skip if starts else "start = 0"}
            for size in {sizes}[start:]:
                time.sleep(PAUSE)
                yield batch(size, source, generator)
        """
    )
