"""Tied weights in real processes: equal on all stages, and close to the plain loop."""

from __future__ import annotations

import textwrap
from typing import Any

import pytest
import torch

from support.real_jobs.compare import assert_same
from support.real_jobs.jobs import Jobs, Reference
from support.slow import slow

EAGER = """
    import torch
    from torch import nn

    class Tok(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = nn.Parameter(torch.randn(11, 8) * 0.1)

        def forward(self, ids):
            return nn.functional.embedding(ids, self.table)

    class Head(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = nn.Parameter(torch.zeros(11, 8))

        def forward(self, x):
            return x @ self.table.t()

    def model():
        tok, head, twice = Tok(), Head(), nn.Linear(8, 8)
        head.table = tok.table
        return nn.Sequential(tok, twice, nn.Tanh(), nn.Linear(8, 8), twice, nn.Tanh(), twice, head)

    def loss(output, target):
        return nn.functional.cross_entropy(output.flatten(0, 1), target.flatten())

    def optimizer(params):
        return torch.optim.AdamW(params, lr=0.02)

    def before_update(params):
        for p in params:
            p.grad += 1e-3 * torch.randn_like(p.grad)

    def data():
        generator = torch.Generator().manual_seed(3)
        for _ in range(5):
            ids = torch.randint(11, (6, 4), generator=generator)
            yield ids, ids.roll(1, 1)
"""

LAZY = """
    def model():
        return [Tok, lambda: nn.Linear(8, 8), nn.Tanh, lambda: nn.Linear(8, 8), Head]

    tied = [("4.table", "0.table"), ("1.weight", "3.weight")]
"""


@pytest.mark.parametrize(
    ("source", "one"),
    [
        (EAGER, ("--stages", "1", "--accumulate", "1")),
        (EAGER + LAZY, ("--stages", "2", "--recompute", "never")),
    ],
    ids=["eager", "lazy"],
)
@slow
def test_tied_weights_are_equal_on_all_stages(
    jobs: Jobs, source: str, one: tuple[str, ...]
) -> None:
    words = ("--microbatches", "3", "--clip-grad-norm", "0.7")
    three = ("--stages", "3", "--backend", "gloo")
    runs = [jobs.train(*way, *words, source=source) for way in (one, three)]
    assert_same(*runs)
    weights = runs[1].weights
    last = max(int(key.partition(".")[0]) for key in weights)
    assert torch.equal(weights["0.table"], weights[f"{last}.table"])
    states = runs[1].optimizer_state
    assert "0.table" in states
    assert f"{last}.table" not in states  # once


def test_tied_weights_train_as_in_the_plain_loop_and_are_saved_once(jobs: Jobs) -> None:
    source = textwrap.dedent(EAGER).replace("before_update", "unused")
    words = ("--microbatches", "3")
    one, run = (jobs.train("--stages", k, *words, source=source) for k in "13")
    assert_same(one, run)
    assert "7.table" not in run.optimizer_state  # once
    namespace: dict[str, Any] = {}
    exec(source, namespace)
    torch.manual_seed(0)
    net = namespace["model"]()
    optimizer = namespace["optimizer"](net.parameters())
    losses = []
    for x, y in namespace["data"]():
        optimizer.zero_grad()
        loss = namespace["loss"](net(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert [row["loss"] for row in run.metrics] == pytest.approx(losses, rel=1e-4)
    assert run.weights.keys() == net.state_dict().keys()
    for key, value in net.state_dict().items():
        torch.testing.assert_close(run.weights[key], value, rtol=1e-2, atol=1e-3)
    out = jobs.folder / "weights.pt"
    assert jobs.pipeworker("export", str(run.path), str(out)).returncode == 0
    exported = torch.load(out, weights_only=True)
    assert exported["0.table"].data_ptr() == exported["7.table"].data_ptr()
    net.load_state_dict(exported)


@pytest.mark.parametrize(
    ("tied", "message"),
    [
        ("[('0.table', '9.x')]", "tied: names '9.x'"),
        ("[('0.table', '4.nothing')]", "layer 4 (Head) has no parameter 'nothing'"),
    ],
)
def test_mistakes(jobs: Jobs, tied: str, message: str) -> None:
    source = textwrap.dedent(EAGER + LAZY) + f"\ntied = {tied}\n"
    run = jobs.run("--stages", "2", "--microbatches", "2", source=source)
    assert run.status == 2, run.stderr
    assert message in run.stderr


SHARED = """
    _tok, _twice = Tok(), nn.Linear(8, 8)

    class Tail(nn.Module):
        def __init__(self, weight):
            super().__init__()
            self.table = weight

        forward = Head.forward

    def model():
        return [lambda: _tok, lambda: _twice, nn.Tanh, lambda: _twice, lambda: Tail(_tok.table)]
"""
PAIRS = (("0.table", "4.table"), ("1.weight", "3.weight"), ("1.bias", "3.bias"))


@pytest.mark.parametrize("stages", [*(pytest.param(k, marks=slow) for k in "15"), "2"])
def test_layers_that_share_a_parameter_must_declare_it(jobs: Jobs, stages: str) -> None:
    source = f"{textwrap.dedent(EAGER + SHARED)}\ntied = {list(PAIRS[1:])}\n"
    run = jobs.run("--stages", stages, "--microbatches", "2", source=source)
    assert run.status == 2, run.stderr
    assert (
        f"layers 0 and 4: were built with one parameter in both; declare it, tied = [{PAIRS[0]}]"
        in (run.stderr)
    )


@slow
def test_declared_ties_of_layers_that_share_parameters_are_equal_on_all_stages(jobs: Jobs) -> None:
    source = f"{textwrap.dedent(EAGER + SHARED)}\ntied = {list(PAIRS)}\n"
    runs = [
        jobs.train("--stages", stages, "--microbatches", "3", source=source)
        for stages in ("1", "3")
    ]
    assert_same(*runs)
    weights = runs[0].weights
    assert all(torch.equal(weights[one], weights[other]) for one, other in PAIRS)


FROZEN = """
    for _p in (*_twice.parameters(), _tok.table):
        _p.requires_grad_(False)

    _shared = model

    def model():
        return [*_shared(), lambda: nn.Linear(11, 11)]
"""


def test_layers_may_share_frozen_parameters(jobs: Jobs) -> None:
    words, source = ("--microbatches", "2"), EAGER + SHARED + FROZEN
    assert_same(*(jobs.train("--stages", stages, *words, source=source) for stages in ("1", "2")))


@pytest.mark.parametrize(
    ("stages", "model", "user"),
    [
        ("3", "nn.Sequential(_tok, nn.Linear(8, 8), User())", "layer 2 (User)"),
        ("1", "[_tok, nn.Tanh(), lambda x: x @ _tok.table.t()]", "layer 2 (lambda)"),
        *(
            pytest.param(*case, marks=slow)
            for case in (
                ("1", "nn.Sequential(_tok, nn.Linear(8, 8), User())", "layer 2 (User)"),
                ("3", "[_tok, nn.Tanh(), lambda x: x @ _tok.table.t()]", "layer 2 (lambda)"),
                ("1", "[lambda: _tok, nn.Tanh, User]", "layer 2 (User)"),
                ("3", "[lambda: _tok, nn.Tanh, User]", "layer 2 (User)"),
            )
        ),
    ],
)
def test_a_forward_that_uses_a_parameter_of_another_layer_is_an_error(
    jobs: Jobs, stages: str, model: str, user: str
) -> None:
    uses = f"""
    _tok = Tok()

    class User(nn.Module):
        def forward(self, x):
            return x @ _tok.table.t()

    def model():
        return {model}
    """
    run = jobs.run("--stages", stages, "--microbatches", "2", source=EAGER + uses)
    assert run.status == 2, run.stderr
    assert f"error: {user}: uses the parameter 0.table of another layer" in run.stderr


CUT = """
    class Cut(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.ones(()))
            self.tok, self.head = Tok(), nn.Linear(8, 11)
            self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))

        def forward(self, ids):
            x = self.tok(ids)
            for layer in self.layers:
                x = x + layer(x)
            return self.head(x) + FORWARD

    torch.manual_seed(0)
    whole = Cut()

    def model():
        return whole

    def loss(output, target):
        error = nn.functional.cross_entropy(output.flatten(0, 1), target.flatten())
        return error + LOSS
"""


@pytest.mark.parametrize("stages", [pytest.param("1", marks=slow), "2"])
def test_the_loss_may_use_parameters_of_a_cut_module_that_the_last_layer_has(
    jobs: Jobs, stages: str
) -> None:
    source = EAGER + CUT.replace("FORWARD", "0")
    options = ["--stages", stages, "--microbatches", "2"]
    run = jobs.run(*options, source=source.replace("LOSS", "whole.tok.table.norm()"))
    assert run.status == 2, run.stderr
    assert "error: loss(): uses the parameter tok.table of another layer" in run.stderr
    jobs.train(*options, source=source.replace("LOSS", "whole.head.weight.norm()"))


def test_the_loss_may_use_parameters_that_no_layer_uses(jobs: Jobs) -> None:
    source = EAGER + CUT.replace("FORWARD", "0").replace("+ LOSS", "* whole.scale")
    assert_same(
        *(jobs.train("--stages", stages, "--microbatches", "2", source=source) for stages in "12")
    )


def test_a_cut_forward_that_reaches_parameters_by_a_global_is_an_error(jobs: Jobs) -> None:
    source = EAGER + CUT.replace("LOSS", "0").replace("FORWARD", "whole.tok.table.sum()")
    run = jobs.run("--stages", "3", "--microbatches", "2", source=source)
    assert run.status == 2, run.stderr
    assert "error: model(): uses the parameter tok.table of another layer, which on" in run.stderr
    assert "have forward reach it by attributes of the module" in run.stderr


CACHED = """
    import functools

    @functools.cache
    def tok():
        with torch.random.fork_rng():
            SEEDED
            return Tok()

    def head():
        made = Head()
        made.table = tok().table
        return made

    def model():
        return [tok, lambda: nn.Linear(8, 8), head]

    tied = [("0.table", "2.table")]
"""


def test_layers_may_share_what_a_function_keeps(jobs: Jobs) -> None:
    source = EAGER + CACHED.replace("SEEDED", "torch.manual_seed(3)")
    assert_same(
        *(jobs.train("--stages", stages, "--microbatches", "2", source=source) for stages in "12")
    )


def test_a_function_that_keeps_other_numbers_on_each_worker_is_an_error(jobs: Jobs) -> None:
    source = EAGER + CACHED.replace("SEEDED", "pass")
    run = jobs.run("--stages", "3", "--microbatches", "2", source=source)
    assert run.status == 2, run.stderr
    assert run.stderr.startswith("error: tok() of the job: keeps parameters (functools.cache), and")


BY_NAME = """
    def optimizer(named_parameters):
        for name, p in named_parameters:
            assert not name.endswith("7.table"), name
        marked = [p for _, p in named_parameters if getattr(p, "plain", False)]
        other = [p for _, p in named_parameters if not getattr(p, "plain", False)]
        groups = [{"params": group, "weight_decay": decay}
                  for group, decay in ((marked, 0.0), (other, 0.1)) if group]
        return torch.optim.AdamW(groups, lr=0.02)

    _model = model

    def model():
        net = _model()
        net[0].table.plain = True
        net[0].table.register_hook(lambda gradient: gradient * 0.5)
        return net
"""


@slow
def test_names_marks_and_hooks_are_those_of_the_first_place(jobs: Jobs) -> None:
    runs = [
        jobs.train("--stages", str(k), "--microbatches", "3", source=EAGER + BY_NAME)
        for k in (1, 4)
    ]
    assert_same(*runs)
    weights = runs[1].weights
    assert torch.equal(weights["0.table"], weights["7.table"])


MANY = """
    def model():
        block = nn.Sequential(*(nn.Linear(8, 8) for _ in range(7)))
        return nn.Sequential(Tok(), *[block] * 20, nn.Linear(8, 11))
"""


@slow
def test_more_places_than_one_frame_carries(jobs: Jobs) -> None:
    """One block at 20 places: 280 gradients of 14 parameters."""
    source = EAGER.replace("model()", "unused()") + MANY
    runs = [
        jobs.train("--stages", str(k), "--microbatches", "2", "--steps", "2", source=source)
        for k in (1, 2)
    ]
    assert_same(*runs)


TABLES = """
    import torch
    from torch import nn

    class Rotary(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("cos", torch.linspace(0.5, 1.5, 8))

        def forward(self, x):
            return x * self.cos

    class Block(nn.Module):
        def __init__(self, rotary):
            super().__init__()
            self.linear, self.rotary = nn.Linear(8, 8), rotary

        def forward(self, x):
            return torch.tanh(self.rotary(self.linear(x)))

    def blocks():
        rotary = Rotary()
        return [Block(rotary) for _ in range(3)]

    class Network(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList(blocks())
            self.register_buffer("scale", torch.rand(8))

        def forward(self, x):
            for block in self.blocks:
                x = block(x * self.scale)
            return x

    def model():
        return nn.Sequential(*blocks())

    def loss(output, target):
        return (output - target).pow(2).mean()

    def optimizer(params):
        return torch.optim.AdamW(params, lr=0.02)

    def data():
        for _ in range(4):
            x = torch.randn(6, 8)
            yield x, x.roll(1, 1)
"""
TABLES_CUT = """
    def model():
        return Network()
"""


@pytest.mark.parametrize(
    "way", [("--stages", "3"), pytest.param(("--stages", "2", "--balance", "1,2"), marks=slow)]
)
@pytest.mark.parametrize(
    "source",
    [pytest.param(TABLES, marks=slow, id="sequence"), pytest.param(TABLES + TABLES_CUT, id="cut")],
)
def test_stages_have_the_same_tables(
    jobs: Jobs, reference: Reference, source: str, way: tuple[str, ...]
) -> None:
    words = ("--microbatches", "3", "--no-profile")
    one = reference("--stages", "1", *words, source=source)
    assert_same(one, jobs.train(*way, *words, source=source))


def test_a_table_that_changes_without_a_trace_is_an_error(jobs: Jobs) -> None:
    source = TABLES.replace("return x * self.cos", "self.cos.data += 1; return x * self.cos")
    run = jobs.run("--stages", "3", "--microbatches", "3", "--no-profile", source=source)
    assert run.status == 2, run.stderr
    assert "(Block): the buffer " in run.stderr
    assert ".rotary.cos has changed, as the end of step 1 shows" in run.stderr
