"""Text model recipes: Qwen2.5-shaped (GQA) and DeepSeek-V2-shaped (MLA, MoE)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from infra.checkpoints.language import Language, draw_weights, save
from infra.checkpoints.tokens import tokenizer


@dataclass(frozen=True, kw_only=True)
class Qwen2(Language):
    """Sizes of a Qwen2.5-shaped text model.

    `rope_scaling` joins its RoPE parameters, such as YaRN's.
    """

    context: int = 4096
    rope_scaling: Mapping[str, Any] = field(default_factory=dict)

    def write(self, folder: Path) -> None:
        """Write configuration, bf16 weights and tokenizer into the existing `folder`."""
        from transformers import Qwen2Config, Qwen2ForCausalLM

        tokens = tokenizer(self.vocabulary)
        config = Qwen2Config(**self.language_config(tokens.convert_tokens_to_ids, **self.rope_scaling))
        model = Qwen2ForCausalLM(config)
        draw_weights(model, tokens, self.seed)
        save(model, tokens, folder)


@dataclass(frozen=True)
class DeepSeekV2:
    """Sizes of a DeepSeek-V2-shaped text model.

    Latent and RoPE widths are those that vLLM's CPU kernel knows.
    """

    vocabulary: int = 512
    hidden: int = 256
    intermediate: int = 512
    expert: int = 128
    layers: int = 3
    dense_layers: int = 1  # the first ones; the others are mixtures of experts
    heads: int = 4
    experts: int = 4
    latent: int = 512
    rope: int = 64
    nope: int = 128
    value: int = 128
    context: int = 4096
    rope_scaling: Mapping[str, Any] = field(default_factory=lambda: {"rope_type": "default"})
    seed: int = 0

    def config(self, ids: Callable[[str], Any]) -> dict[str, Any]:
        """Keyword arguments of `DeepseekV2Config`."""
        return {
            "vocab_size": self.vocabulary,
            "hidden_size": self.hidden,
            "intermediate_size": self.intermediate,
            "moe_intermediate_size": self.expert,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.heads,
            "n_shared_experts": 1,
            "n_routed_experts": self.experts,
            "num_experts_per_tok": 2,
            "first_k_dense_replace": self.dense_layers,
            "kv_lora_rank": self.latent,
            "q_lora_rank": None,
            "qk_rope_head_dim": self.rope,
            "qk_nope_head_dim": self.nope,
            "v_head_dim": self.value,
            "max_position_embeddings": self.context,
            "rope_parameters": {"rope_theta": 10000.0, **self.rope_scaling},
            "topk_method": "greedy",
            "n_group": 1,
            "topk_group": 1,
            "routed_scaling_factor": 1.0,
            "norm_topk_prob": False,
            "tie_word_embeddings": False,
            "eos_token_id": ids("<|im_end|>"),
            "bos_token_id": ids("<|endoftext|>"),
        }

    def write(self, folder: Path) -> None:
        """Write configuration, bf16 weights and tokenizer into the existing `folder`."""
        from transformers import DeepseekV2Config, DeepseekV2ForCausalLM

        tokens = tokenizer(self.vocabulary)
        model = DeepseekV2ForCausalLM(DeepseekV2Config(**self.config(tokens.convert_tokens_to_ids)))
        draw_weights(model, tokens, self.seed)
        save(model, tokens, folder)
