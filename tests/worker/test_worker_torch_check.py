"""The check of torch: it names a private name that is missing or that behaves differently."""

from __future__ import annotations

import configparser
import re
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from pipeworker.errors import UsageError
from pipeworker.worker import internals, torch_check
from support.in_process.single_worker import SingleWorker
from support.real_jobs.jobs import Jobs
from support.real_jobs.ranks import Scripts, script
from support.slow import slow

ROOT = Path(__file__).parents[2]
FOUND = re.findall(r'_find\("(.+?)"\)', Path(internals.__file__).read_text(encoding="utf-8"))
"""The names that are looked up when the module is imported."""
ALTERED: dict[str, tuple[str, Any]] = {
    "torch.utils._pytree": ("pytree.tree_flatten", lambda tree: ([tree], None)),
    "torch.autograd.Variable._execution_engine": ("engine", lambda *_: (torch.zeros(2),)),
    "torch._C._functions.AccumulateGrad": ("AccumulateGrad", nn.Module),
    "torch.autograd.graph.Node._raw_saved_result": ("SAVED_PREFIX", "_saved_"),
    "torch.Tensor._indices, _values": ("dense_parts", lambda x: (x, x.to_dense())),
    "torch.autograd.graph.Node._sequence_nr": ("sequence_of", lambda node: 0),
    "torch.Tensor._version": ("version_of", lambda _: 0),
    "torch.Tensor._base": ("base_of", lambda _: None),
    "torch.nn.Module._buffers": ("buffers_of", lambda module: dict(module.named_buffers())),
    "torch.nn.Module._modules": ("submodules_of", lambda module: dict(module.named_children())),
    "torch.utils.data.DataLoader._iterator": ("kept_iterator", lambda loader: loader),
    "torch.ops.aten.alias": ("alias_of", torch.clone),
    "torch._foreach_mul_": ("multiply", torch._foreach_mul),
    "torch._foreach_div_": ("divide", torch._foreach_div),
    "torch._C._storage_Use_Count(UntypedStorage._cdata)": ("storage_uses", lambda _: 1),
    "torch.utils._python_dispatch.TorchDispatchMode": ("observing", lambda _: nullcontext()),
    "torch._C._FunctionBase.apply": ("apply_of", lambda function: lambda x: function.forward(x, x)),
    "torch.nn.Module._load_from_state_dict": ("loads_itself", lambda _: False),
    "torch.Tensor._backward_hooks": ("move_hooks", lambda *_: None),
    "torch._C._swap_tensor_impl, _post_accumulate_grad_hooks": (
        "move_module",
        lambda module, device: module.to(device),
    ),
    "torch.distributed.distributed_c10d._get_default_store": ("default_store", lambda: None),
    "torch._C._distributed_c10d.ProcessGroupGloo._Options": ("ProcessGroupGloo", nn.Module),
    "torch._C._distributed_c10d.ProcessGroupNCCL": ("nccl_kind", lambda: (None, nn.Module())),
    "torch.nn.modules.batchnorm._BatchNorm": ("BatchNorm", nn.BatchNorm1d),
    "torch.nn.Module._non_persistent_buffers_set": ("unsaved_buffers_of", lambda _: set()),
    "torch.nn.Module._forward_hooks, _forward_pre_hooks, _backward_hooks": (
        "take_hooks",
        lambda _: [],
    ),
    "torch._C._current_graph_task_id": ("current_backward", lambda: 1),
    "torch._C._autograd._top_saved_tensors_default_hooks": ("saved_tensor_hooks", lambda: None),
    "torch.nn.Module._backward_pre_hooks": ("has_backward_hooks", lambda _: False),
    "torch._ops.OpOverload._schema": ("changed_by", lambda *_: iter(())),
    "torch.overrides._push_mode, _pop_mode": ("suspended", lambda _: nullcontext()),
    "torch._dynamo.callback.callback_handler": ("calling_around_compilations", None),
    "torch._dynamo.config": ("allow_any_number_of_graphs", None),
    "torch._functorch.config._config": ("graphs_donate_buffers", lambda: True),
}
"""By private name, what of our module depends on it, and a value that behaves differently."""


def test_the_check_passes_and_changes_nothing() -> None:
    before = torch.get_rng_state()
    with torch.inference_mode():  # as a user's process may have it
        torch_check.check()
        torch_check.check(compiles=True)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("name", [*torch_check.BEHAVIOURS, *torch_check.COMPILER])
def test_a_name_that_behaves_differently_is_named(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    attribute, value = ALTERED[name]
    internals.preload()  # not with the altered name
    monkeypatch.setattr(f"pipeworker.worker.internals.{attribute}", value)
    monkeypatch.setattr("torch.distributed.is_nccl_available", lambda: "NCCL" in name)
    monkeypatch.setattr(torch, "__version__", "9.9")
    text = rf"torch 9\.9: its private name {re.escape(name)} (behaves differently|is missing)"
    with pytest.raises(UsageError, match=rf"^{text}.*; install torch 2\.13 to 2\.15$"):
        torch_check.check(compiles=True)


def test_what_names_do_may_be_left_to_another_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(internals, "version_of", lambda _: 0)
    torch_check.check(behaviours=False)
    monkeypatch.setattr(internals, "missing", ["torch._gone"])
    with pytest.raises(UsageError, match=r"its private name torch\._gone is missing"):
        torch_check.check(behaviours=False)


@pytest.mark.parametrize(
    ("local_rank", "generation", "checks"), [(0, 1, True), (1, 1, False), (0, 2, False)]
)
def test_the_first_worker_of_a_host_checks_what_names_do(
    local_rank: int, generation: int, checks: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def note(*, compiles: bool, behaviours: bool) -> None:
        raise UsageError(f"{compiles} {behaviours}")

    monkeypatch.setattr(torch_check, "check", note)
    worker = SingleWorker(local_rank=local_rank, generation=generation)
    with pytest.raises(UsageError, match=f"False {checks}"):
        worker.begin(tmp_path, "")


WITHOUT = """
import os, pkgutil, sys, torch
resolve = pkgutil.resolve_name
def without(name):
    if name == missing:
        raise AttributeError(name)
    return resolve(name)
pkgutil.resolve_name = without
for missing in sys.argv[1:]:
    pid = os.fork()
    if not pid:
        for module in [m for m in sys.modules if m.startswith("pipeworker.worker")]:
            del sys.modules[module]
        try:
            import pipeworker.worker.worker
            pipeworker.worker.torch_check.check()
        except BaseException as error:
            print(error, flush=True)
        os._exit(0)
    os.waitpid(pid, 0)
"""


@slow
def test_a_missing_name_is_named_after_all_is_imported(jobs: Jobs) -> None:
    assert len(FOUND) > 10
    stdout, stderr = jobs.python("-c", WITHOUT, *FOUND).communicate(timeout=60)
    told = f"torch {torch.__version__}: its private name {{}} is missing; install torch"
    assert [line.removesuffix(" 2.13 to 2.15") for line in stdout.splitlines()] == [
        told.format(name) for name in FOUND
    ], stderr


def test_a_worker_checks_torch_before_it_loads_the_job(scripts: Scripts) -> None:
    """However it was started: this one is in a process of the user's."""
    source = script("""
        import torch
        from pipeworker.worker import internals

        internals.missing.append("torch._gone")
        pipeworker.Pipeline(
            [torch.nn.Linear(2, 2)],
            loss=lambda output, target: output.sum(),
            optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
            run_dir="run",
        )
    """)
    (ended,) = scripts.start(source, 1, alone=True).end()
    message = "its private name torch._gone is missing; install torch 2.13 to 2.15"
    assert f"UsageError: torch {torch.__version__}: {message}" in ended.stderr


def test_the_versions_are_those_of_the_metadata_and_the_readme() -> None:
    parser = configparser.ConfigParser()
    parser.read(ROOT / "setup.cfg")
    first, last = (int(part.split(".")[1]) for part in torch_check.SUPPORTED.split(" to "))
    assert f"\ntorch>=2.{first},<2.{last + 1}\n" in parser["options"]["install_requires"]
    assert f"torch {torch_check.SUPPORTED}" in (ROOT / "README.md").read_text(encoding="utf-8")
