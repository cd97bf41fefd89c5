"""Language model sizes and saving, shared by the recipes of multimodal and text models."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from infra.checkpoints.tokens import printable_tokens
from infra.checkpoints.weights import generation_config, initialise

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerFast


@dataclass(frozen=True, kw_only=True)
class Language:
    """Sizes of a Llama-like language model, and its single-token words (see `tokens.tokenizer`)."""

    vocabulary: int = 512
    hidden: int = 256
    intermediate: int = 512
    layers: int = 4
    heads: int = 8
    kv_heads: int = 2
    head_size: int = 32
    context: int = 32768
    rope_theta: float = 10000.0
    seed: int = 0
    words: tuple[str, ...] = ()

    def language_config(self, ids: Callable[[str], Any], **rope: Any) -> dict[str, Any]:
        """Keyword arguments of the language model's configuration; `rope` joins its RoPE parameters."""
        return {
            "vocab_size": self.vocabulary,
            "hidden_size": self.hidden,
            "intermediate_size": self.intermediate,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_size,
            "max_position_embeddings": self.context,
            "tie_word_embeddings": False,
            "rope_parameters": {"rope_type": "default", "rope_theta": self.rope_theta, **rope},
            "eos_token_id": ids("<|im_end|>"),
            "bos_token_id": ids("<|endoftext|>"),
        }


def draw_weights(model: PreTrainedModel, tokens: PreTrainedTokenizerFast, seed: int) -> None:
    """Give a model its weights."""
    initialise(model.named_parameters(), seed, printable_tokens(tokens))


def save(model: PreTrainedModel, tokens: PreTrainedTokenizerFast, folder: Path) -> None:
    """Write a model in bf16 with its generation configuration, and its tokenizer."""
    import torch

    model.generation_config = generation_config(tokens)
    model.to(torch.bfloat16).save_pretrained(folder)
    tokens.save_pretrained(folder)


def save_shape(model: PreTrainedModel, tokens: PreTrainedTokenizerFast, folder: Path) -> None:
    """Write what `save` does but for the weights."""
    import torch

    model.config.architectures, model.config.dtype = [type(model).__name__], torch.bfloat16
    for part in (model.config, generation_config(tokens), tokens):
        part.save_pretrained(folder)


def load(model: PreTrainedModel, folder: Path) -> PreTrainedModel:
    """A model of this kind with the weights in `folder`, in fp32."""
    import torch

    found = type(model).from_pretrained(folder, dtype=torch.float32)
    found.config = model.config  # the loaded one would be saved with fp32 as its parts' type
    return found
