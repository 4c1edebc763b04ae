"""Models of transformers as they are: the bits of their own forward, and their own folders."""

from __future__ import annotations

import copy
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import nn

import pipeworker
from pipeworker.plan.placement import Placement
from pipeworker.worker.model.classes import classes_of
from pipeworker.worker.stage.cut.part import Cut, plan_of
from pipeworker.worker.transport.structure import TypeRegistry
from support.in_process.pipelines import MODES, Pipeline, filled
from support.in_process.plain_loop import plain
from support.real_jobs.compare import assert_same
from support.real_jobs.jobs import Jobs

transformers = pytest.importorskip("transformers")
WORDS = 61
SMALL = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "vocab_size": WORDS}
TEXT = {**SMALL, "intermediate_size": 48, "num_key_value_heads": 2, "pad_token_id": 0}
OLD = {"n_embd": 32, "n_layer": 3, "n_head": 4, "vocab_size": WORDS}
QUIET = {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0}
EXPERTS = {"num_local_experts": 12, "num_experts_per_tok": 2}
HEADS = {"num_heads": 4, "d_kv": 8, "d_model": 32, "d_ff": 48, "num_layers": 2}
PLAIN = """
    Cohere Ernie4_5 Glm Granite Nemotron Olmo Olmo2 Persimmon Phi Phi3 Qwen3 SmolLM3 StableLm
    Starcoder2
"""
"""The architectures that one configuration fits."""
CAUSAL: dict[str, dict[str, Any]] = {
    "Llama": {**TEXT, "tie_word_embeddings": False},
    "Mistral": {**TEXT, "sliding_window": 8},
    "Qwen2": TEXT,
    "Gemma2": {**TEXT, "head_dim": 8},
    "Mixtral": {**TEXT, **EXPERTS, "output_router_logits": True},
    "GPT2": {**OLD, **QUIET},
    "GPTNeoX": {**SMALL, "intermediate_size": 48},
    "Bloom": {"hidden_size": 32, "n_layer": 3, "n_head": 4, "vocab_size": WORDS},
    "OPT": {**SMALL, "ffn_dim": 48, "word_embed_proj_dim": 32, "dropout": 0.0},
    "Falcon": {**SMALL},
    **dict.fromkeys(PLAIN.split(), TEXT),
    "SeedOss": {**TEXT, "attention_dropout": 0.0, "residual_dropout": 0.0},
    "GPTJ": {**OLD, **QUIET, "rotary_dim": 8},
    "CodeGen": {**OLD, **QUIET, "rotary_dim": 8},
    "Mamba": {"hidden_size": 32, "num_hidden_layers": 3, "vocab_size": WORDS, "state_size": 4},
}


def causal(name: str) -> nn.Module:
    config = getattr(transformers, f"{name}Config")(**CAUSAL[name])
    torch.manual_seed(0)
    made: nn.Module = transformers.AutoModelForCausalLM.from_config(config)
    return made.train()


def batches() -> list[Any]:
    torch.manual_seed(1)
    found = []
    for step in range(2):
        ids = torch.randint(3, WORDS, (4, 8 + step))
        mask = torch.ones_like(ids)
        mask[0, 5:] = 0
        found.append(({"input_ids": ids, "attention_mask": mask}, ids))
    return found


class Whole(nn.Module):
    def __init__(self, module: nn.Module, extra: dict[str, Any]) -> None:
        super().__init__()
        self.module, self.extra = module, extra

    def forward(self, batch: dict[str, torch.Tensor]) -> Any:
        return self.module(**batch, **self.extra)


def types() -> TypeRegistry:
    modules = [module for name, module in sys.modules.items() if name.startswith("transformers")]
    return TypeRegistry(classes_of(modules).values())


def compare(module: nn.Module, data: list[Any], loss: Any, **extra: Any) -> None:
    """Compare pipelines with the module's own forward, up to the sums of tied gradients."""
    expected = plain([Whole(copy.deepcopy(module), extra)], loss, data, 2)
    sample = {key: value[:2] for key, value in data[0][0].items()}
    registry = types()
    plan = plan_of(module, registry, sample)
    layers = list(Cut(module, registry, torch.device("cpu"), plan).parts_of(module).values())
    owned = [id(p) for layer in layers for p in layer.parameters()]
    tied = {id(p) for p in module.parameters() if owned.count(id(p)) > 1}
    named = [*module.named_parameters(remove_duplicate=False)]
    shared = {name for name, p in named if id(p) in tied}
    same = {name: [other for other, q in named if q is p] for name, p in named}
    for stages, mode in zip((1, 2, 3), MODES, strict=False):
        way = filled(Placement.identity(stages), mode)
        trained = Pipeline(layers, loss, data, way, microbatches=2, skips=plan.skips()).train(2)
        assert trained.losses == expected.losses
        for grads, wanted in zip(trained.grads, expected.grads, strict=True):
            own = {name.partition("^.")[2]: grad for name, grad in grads.items()}
            for name, grad in wanted.items():
                name = name.removeprefix("0.module.")
                found = next(own[other] for other in same[name] if other in own)
                if grad is None or found is None:
                    assert grad is found, name
                elif name in shared:
                    assert torch.allclose(found, grad, atol=1e-6), name
                else:
                    assert torch.equal(found, grad), name


@pytest.mark.parametrize("name", CAUSAL)
def test_a_causal_language_model_equals_its_own_forward(name: str) -> None:
    compare(causal(name), batches(), pipeworker.causal_loss, use_cache=False)


def test_an_encoder_and_a_decoder_equal_their_own_forward() -> None:
    torch.manual_seed(0)
    config = transformers.T5Config(vocab_size=WORDS, dropout_rate=0.0, **HEADS)
    module = transformers.T5ForConditionalGeneration(config).train()
    data = [({**x, "decoder_input_ids": y}, y) for x, y in batches()]
    compare(module, data, pipeworker.causal_loss, use_cache=False)


def test_a_vision_model_equals_its_own_forward() -> None:
    torch.manual_seed(0)
    config = transformers.ViTConfig(
        **{**SMALL, "vocab_size": 3},
        intermediate_size=48,
        image_size=16,
        patch_size=8,
        hidden_dropout_prob=0.0,
    )
    module = transformers.ViTForImageClassification(config).train()
    data = [({"pixel_values": torch.randn(4, 3, 16, 16)}, torch.tensor([0, 1, 1, 0]))] * 2

    def loss(output: Any, target: torch.Tensor) -> Any:
        return nn.functional.cross_entropy(output.logits, target)

    compare(module, data, loss)


def test_the_loss_counts_tokens_and_takes_the_models_own() -> None:
    module: Any = causal("Llama")
    ((batch, labels), _) = batches()
    labels = labels.masked_fill(batch["attention_mask"] == 0, -100)
    own = module(**batch, labels=labels)
    total, count = pipeworker.causal_loss(own, labels)
    assert count == (labels[:, 1:] != -100).sum()
    assert torch.allclose(total / count, own.loss)
    plain_total, _ = pipeworker.causal_loss(module(**batch), labels)
    assert torch.allclose(plain_total, total)


TUNED = """
    import torch
    import transformers

    import pipeworker

    FOLDER = {folder!r}

    def model():
        config = transformers.AutoConfig.from_pretrained(FOLDER, use_cache=False)
        net = transformers.AutoModelForCausalLM.from_config(config)
        {adapt}
        return net

    loss = pipeworker.causal_loss

    def optimizer(params):
        return torch.optim.SGD([p for p in params if p.requires_grad], lr={rate})

    def data():
        ids = torch.arange(3, 51).view(4, 12)
        for _ in range(2):
            yield dict(input_ids=ids, attention_mask=torch.ones_like(ids)), ids
"""


@pytest.mark.parametrize("name", ["Llama", "Mixtral"])
def test_a_folder_is_tuned_and_exported(name: str, jobs: Jobs, tmp_path: Path) -> None:
    """Its weights are read in part; ``from_pretrained`` loads what is exported.

    A folder of Mixtral has a tensor for each expert, and the module one for all.
    """
    module: Any = causal(name)
    folder = tmp_path / "base"
    module.save_pretrained(folder, max_shard_size="20KB")
    run = jobs.train(
        *("--stages", "2", "--microbatches", "2", "--init-from", str(folder)),
        source=TUNED.format(folder=str(folder), adapt="", rate=0.0),
    )
    ids = torch.arange(3, 51).view(4, 12)
    with torch.no_grad():
        total, count = pipeworker.causal_loss(module.train()(input_ids=ids), ids)
    assert run.metrics[0]["loss"] == pytest.approx((total / count).item(), rel=1e-5)
    out = tmp_path / "tuned"
    done = jobs.pipeworker("export", "--like", str(folder), str(run.path), str(out))
    assert done.returncode == 0, done.stderr
    loaded, info = transformers.AutoModelForCausalLM.from_pretrained(out, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    for key, tensor in module.state_dict().items():
        assert torch.equal(loaded.state_dict()[key], tensor), key
    assert json.loads((out / "config.json").read_text())["model_type"] == name.lower()
    assert names_in(out) == names_in(folder)


def names_in(folder: Path) -> set[str]:
    files = folder.glob("*.safetensors")
    return {name for file in files for name in safetensors.torch.load_file(file)}


ADAPTED = """
    import torch
    import transformers
    from peft import LoraConfig, get_peft_model

    import pipeworker

    def model():
        base = transformers.LlamaConfig(
            vocab_size=61, hidden_size=32, intermediate_size=48, num_hidden_layers=4,
            num_attention_heads=4, num_key_value_heads=2, use_cache=False,
        )
        adapters = LoraConfig(
            r=4, task_type="CAUSAL_LM", target_modules=["q_proj", "v_proj"],
            layers_to_transform=[2, 3], lora_dropout=0.1,
        )
        return get_peft_model(transformers.AutoModelForCausalLM.from_config(base), adapters)

    loss = pipeworker.causal_loss

    def optimizer(params):
        return torch.optim.AdamW([p for p in params if p.requires_grad], lr=0.01)

    def data():
        for step in range(3):
            ids = torch.randint(3, 61, (8, 10 + step))
            yield {"input_ids": ids}, ids
"""


def test_adapters_train_and_the_rest_is_frozen(jobs: Jobs) -> None:
    pytest.importorskip("peft")
    one, three = (
        jobs.train("--stages", k, "--microbatches", "4", "--balance", "even", source=ADAPTED)
        for k in "13"
    )
    assert_same(one, three)
    first = jobs.train("--stages", "1", "--steps", "1", source=ADAPTED).weights
    changed = {name for name, value in one.weights.items() if not torch.equal(value, first[name])}
    assert changed
    assert all("lora_" in name and (".2." in name or ".3." in name) for name in changed)


def test_adapters_of_a_folder_are_trained_and_exported(jobs: Jobs, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    base: Any = causal("Llama")
    nn.init.uniform_(base.model.norm.weight)  # a copy of it is trained
    base.save_pretrained(tmp_path / "base")
    adapt = """
        from peft import LoraConfig, get_peft_model
        net = get_peft_model(net, LoraConfig(
            r=4, task_type="CAUSAL_LM", target_modules=["q_proj"], modules_to_save=["norm"],
        ))
    """
    folder = str(tmp_path / "base")
    run = jobs.train(
        *("--stages", "2", "--microbatches", "2", "--init-from", folder, "--checkpoint-every", "1"),
        source=TUNED.format(folder=folder, adapt=adapt.strip(), rate=1.0),
    )
    frozen = "model-00001-of-00002-frozen.safetensors"
    first, second = (run.path / "checkpoints" / f"step-0000000{step}" for step in (1, 2))
    assert (first / frozen).samefile(second / frozen)
    ids = torch.arange(3, 51).view(4, 12)
    with torch.no_grad():
        total, count = pipeworker.causal_loss(base.train()(input_ids=ids), ids)
    assert run.metrics[0]["loss"] == pytest.approx((total / count).item(), rel=1e-5)
    assert run.metrics[1]["loss"] < run.metrics[0]["loss"]

    out = tmp_path / "adapters"
    refused = jobs.pipeworker("export", "--adapters", str(run.path), f"{out}.safetensors")
    assert "--adapters" in refused.stderr
    assert "give a folder" in refused.stderr
    done = jobs.pipeworker("export", "--adapters", str(run.path), str(out))
    assert done.returncode == 0, done.stderr
    assert {file.name for file in out.iterdir()} == {
        "adapter_config.json",
        "adapter_model.safetensors",
    }
    config = json.loads((out / "adapter_config.json").read_text())
    assert config["inference_mode"] is True  # as peft itself saves it
    loaded = peft.PeftModel.from_pretrained(base, out)
    found = loaded.state_dict()
    assert {name for name in run.weights if "lora_" in name} == {n for n in found if "lora_" in n}
    for name, tensor in run.weights.items():
        assert torch.equal(found[name], tensor), name
    whole = jobs.pipeworker("export", str(run.path), str(tmp_path / "whole/"))
    assert "note: the run has adapters" in whole.stderr


def test_a_run_without_adapters_exports_none(jobs: Jobs, tmp_path: Path) -> None:
    base: Any = causal("Llama")
    base.save_pretrained(tmp_path / "base")
    source = TUNED.format(folder=str(tmp_path / "base"), adapt="", rate=0.0)
    run = jobs.train("--stages", "1", source=source)
    done = jobs.pipeworker("export", "--adapters", str(run.path), str(tmp_path / "out/"))
    assert "has none; model() must return a model of peft" in done.stderr
