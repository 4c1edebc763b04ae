"""Which architectures of transformers equal their own forward, to the bit, when they are cut.

python benchmarks/architectures.py [NAME ...] [--markdown]

Each causal language model that a small configuration can build is run by itself and as one, two
and three stages, in this process: logits and the gradients of all weights are compared. A weight
that several layers use is compared within 1e-6, because its gradients are added in another order.
It needs transformers.
"""

from __future__ import annotations

import argparse
import copy
import inspect
import logging
import signal
import sys
import warnings
from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
import transformers
from torch import nn
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from pipeworker.worker.model.classes import classes_of
from pipeworker.worker.stage.cut.part import Cut, Part, plan_of
from pipeworker.worker.stage.cut.plan import CutPlan
from pipeworker.worker.stage.skips import Table
from pipeworker.worker.transport.structure import TypeRegistry

WORDS, SECONDS, NEAR = 96, 60, 1e-6
NAMES: dict[Any, str] = {
    WORDS: "vocab_size vocab_size_per_layer_input",
    32: "hidden_size n_embd d_model dim n_embed embedding_size embedding_dim word_embed_proj_dim "
    "dim_model moe_intermediate_size shared_expert_intermediate_size expert_ffn_hidden_size "
    "expert_ffn_size lru_width attention_hidden_size emb_dim",
    64: "intermediate_size ffn_dim n_inner d_ff dim_ff feed_forward_size decoder_ffn_dim "
    "encoder_ffn_dim ffn_hidden_size dff inner_dim intermediate_size_mlp shared_intermediate_size "
    "dense_intermediate_size max_position_embeddings n_positions n_ctx max_seq_len block_ff_dim "
    "max_sequence_length context_length seq_length max_target_positions mamba_d_ssm d_inner",
    4: "num_hidden_layers n_layer n_layers num_layers decoder_layers num_decoder_layers num_blocks "
    "num_attention_heads n_head n_heads num_heads decoder_attention_heads num_experts "
    "encoder_attention_heads num_local_experts n_routed_experts moe_num_experts conv_kernel "
    "time_step_rank mamba_dt_rank conv1d_width linear_num_value_heads",
    2: "num_key_value_heads num_kv_heads num_experts_per_tok moe_top_k moe_topk moe_k "
    "n_mamba_heads encoder_layers linear_num_key_heads num_kv_shared_layers top_k_experts",
    1: "n_group topk_group n_shared_experts moe_num_shared_experts num_shared_experts "
    "first_k_dense_replace num_dense_layers mamba_n_groups n_groups mamba_ngroups",
    8: "head_dim dim_head attention_head_dim rotary_dim qk_rope_head_dim qk_nope_head_dim "
    "v_head_dim sliding_window attention_window window_size sliding_window_size state_size "
    "mamba_d_state ssm_state_size mamba_d_head mamba_head_dim mamba_n_heads mamba_num_heads "
    "mamba_chunk_size chunk_size kv_channels linear_key_head_dim linear_value_head_dim "
    "hidden_size_per_layer_input laurel_rank query_pre_attn_scalar mamba_headdim d_head",
    16: "q_lora_rank kv_lora_rank qk_head_dim",
    3: "altup_num_inputs conv_L_cache",
    0: "pad_token_id",
}
"""Small values for the attributes of configurations."""
DECODERS = "bert roberta electra camembert bert-generation big_bird ernie data2vec-text rembert "
DECODERS += "megatron-bert roberta-prelayernorm roc_bert roformer xlm-roberta xlm-roberta-xl"


def configured(name: str) -> Any:
    """Return a small configuration of an architecture, without dropout."""
    kind = CONFIG_MAPPING[name]
    known = {*inspect.signature(kind.__init__).parameters, *getattr(kind, "attribute_map", {})}
    known |= {*getattr(kind, "__dataclass_fields__", {})}
    given = {one: value for value, names in NAMES.items() for one in names.split() if one in known}
    for alias, target in getattr(kind, "attribute_map", {}).items():
        if target in given:
            given.pop(alias, None)
    if name in DECODERS.split():
        given["is_decoder"] = True
    config = kind(**given)
    for one, value in list(vars(config).items()):
        if ("drop" in one or one.endswith("_pdrop")) and isinstance(value, float):
            setattr(config, one, 0.0)
    config.use_cache = False
    return config


def build(name: str) -> nn.Module:
    torch.manual_seed(0)
    made: nn.Module = transformers.AutoModelForCausalLM.from_config(
        configured(name), attn_implementation="eager"
    )
    return made.train()


def batch() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(3, WORDS, (3, 16), generator=generator)
    mask = torch.ones_like(ids)
    mask[1, 12:] = mask[2, 9:] = 0
    return {"input_ids": ids, "attention_mask": mask}


def logits_of(output: Any) -> torch.Tensor:
    found: torch.Tensor = output.logits if hasattr(output, "logits") else output[0]
    return found


class Stages:
    """The layers of a cut module in several stages, whose graphs are apart."""

    def __init__(self, cut: Cut, parts: list[Part], bounds: list[int]) -> None:
        self.cut, self.parts, self.bounds = cut, parts, bounds
        self._boundaries: list[list[tuple[torch.Tensor, torch.Tensor]]] = []

    def forward(self, value: Any) -> Any:
        stashed: dict[str, Any] = {}
        for first, stop in zip(self.bounds, self.bounds[1:], strict=False):
            arriving = [name for name in stashed if first <= int(name.partition(">")[2]) < stop]
            table = Table({name: stashed.pop(name) for name in arriving})
            own = self.parts[first:stop]
            with table.active():
                value = self.cut.run(own, [part.unit for part in own], value)
            if stop < len(self.parts):
                self._boundaries.append([])
                value = tuple(self._crossed(item) for item in value)
                names = [s.name for s in self.cut.plan.skips() if s.source < stop <= s.target]
                left = table.leave([name for name in names if name not in stashed])
                stashed |= {name: self._crossed(tensor) for name, tensor in left.items()}
        return value

    def _crossed(self, item: Any) -> Any:
        if not isinstance(item, torch.Tensor) or not item.requires_grad:
            return item.detach() if isinstance(item, torch.Tensor) else item
        leaf = item.detach().requires_grad_()
        self._boundaries[-1].append((item, leaf))
        return torch.ops.aten._unsafe_view(leaf, leaf.shape)

    def backward(self, loss: torch.Tensor) -> None:
        loss.backward()  # type: ignore[no-untyped-call]
        for pairs in reversed(self._boundaries):
            used = [(item, leaf.grad) for item, leaf in pairs if leaf.grad is not None]
            torch.autograd.backward([item for item, _ in used], [grad for _, grad in used])


def differences(module: nn.Module, name: str) -> Iterator[str]:
    """Yield what differs between the stages of a module and its own forward."""
    inputs, alone = batch(), copy.deepcopy(module)
    expected = logits_of(alone(**inputs))
    weights = torch.randn(expected.shape, generator=torch.Generator().manual_seed(3))
    (expected.float() * weights).sum().backward()  # type: ignore[no-untyped-call]
    loaded = [one for key, one in sys.modules.items() if key.startswith("transformers")]
    types = TypeRegistry(classes_of(loaded).values())
    plan = CutPlan.unpack(plan_of(module, types, inputs).pack())
    cut = Cut(module, types, torch.device("cpu"), plan)
    parts: list[Any] = list(cut.parts_of(module).values())
    uses = Counter(id(p) for part in parts for p in part.parameters())
    count = len(parts)
    for bounds in ([0, count], [0, count // 2, count], [0, count // 3, 2 * count // 3, count]):
        module.zero_grad()
        stages = Stages(cut, parts, bounds)
        logits = logits_of(stages.forward(inputs))
        if not torch.equal(logits, expected):
            yield f"logits of {len(bounds) - 1} stages"
        stages.backward((logits.float() * weights).sum())
        wanted = dict(alone.named_parameters())
        for key, parameter in module.named_parameters():
            one, other = parameter.grad, wanted[key].grad
            if one is None or other is None:
                same = one is other
            elif uses[id(parameter)] > 1:
                same = torch.allclose(one, other, atol=NEAR, rtol=1e-4)
            else:
                same = torch.equal(one, other)
            if not same:
                yield f"gradient of {key} with {len(bounds) - 1} stages"
                break


def outcome(name: str) -> tuple[str, str]:
    """Return how an architecture fares, and why."""
    try:
        module = build(name)
        module(**batch())
    except Exception as error:
        return "not built", f"{type(error).__name__}: {error}"
    try:
        found = list(differences(module, name))
    except Exception as error:
        return "refused", f"{type(error).__name__}: {error}"
    return ("differs", found[0]) if found else ("equal", "")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("names", nargs="*")
    parser.add_argument("--markdown", action="store_true", help="print the table of a page")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.disable(logging.ERROR)
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)

    def late(*_: Any) -> None:
        raise TimeoutError(f"more than {SECONDS} s")

    signal.signal(signal.SIGALRM, late)
    counts: Counter[str] = Counter()
    for name in args.names or sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES):
        signal.alarm(SECONDS)
        how, why = outcome(name)
        signal.alarm(0)
        counts[how] += 1
        why = " ".join(why.split())[:120]
        print(
            f"| {name} | {how} | {why} |" if args.markdown else f"{how:9} {name} {why}", flush=True
        )
    print(", ".join(f"{count} {how}" for how, count in counts.most_common()))


if __name__ == "__main__":
    main()
