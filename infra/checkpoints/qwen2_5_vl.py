"""Qwen2.5-VL: grouped-query attention, M-RoPE with its sections in blocks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from infra.checkpoints.tokens import printable_tokens, tokenizer
from infra.checkpoints.weights import generation_config, initialise

PATCH, MERGE = 14, 2
PIXELS_PER_TOKEN = (PATCH * MERGE) ** 2
MIN_IMAGE_TOKENS, MAX_IMAGE_TOKENS = 4, 2048


@dataclass(frozen=True)
class Qwen25VL:
    """Sizes of a Qwen2.5-VL shaped model. Its vision tower has 4 heads and one full-attention layer, the last."""

    vocabulary: int
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_size: int
    mrope_section: tuple[int, int, int]
    vision_depth: int
    vision_hidden: int
    context: int = 32768
    rope_theta: float = 10000.0
    seed: int = 0

    def write(self, folder: Path) -> None:
        """Write configuration, bf16 weights, tokenizer and image processor into the existing `folder`."""
        import torch
        from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration
        from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

        tokens = tokenizer(self.vocabulary)
        ids: Callable[[str], Any] = tokens.convert_tokens_to_ids
        config = Qwen2_5_VLConfig(
            text_config={
                "vocab_size": self.vocabulary,
                "hidden_size": self.hidden,
                "intermediate_size": self.intermediate,
                "num_hidden_layers": self.layers,
                "num_attention_heads": self.heads,
                "num_key_value_heads": self.kv_heads,
                "head_dim": self.head_size,
                "max_position_embeddings": self.context,
                "tie_word_embeddings": False,
                "rope_parameters": {
                    "rope_type": "default",
                    "rope_theta": self.rope_theta,
                    "mrope_section": list(self.mrope_section),
                },
                "eos_token_id": ids("<|im_end|>"),
                "bos_token_id": ids("<|endoftext|>"),
            },
            vision_config={
                "depth": self.vision_depth,
                "hidden_size": self.vision_hidden,
                "intermediate_size": 2 * self.vision_hidden,
                "num_heads": 4,
                "out_hidden_size": self.hidden,
                "fullatt_block_indexes": [self.vision_depth - 1],
                "patch_size": PATCH,
                "spatial_merge_size": MERGE,
                "temporal_patch_size": 2,
                "window_size": 4 * PATCH * MERGE,
            },
            image_token_id=ids("<|image_pad|>"),
            video_token_id=ids("<|video_pad|>"),
            vision_start_token_id=ids("<|vision_start|>"),
            vision_end_token_id=ids("<|vision_end|>"),
            tie_word_embeddings=False,
        )
        model = Qwen2_5_VLForConditionalGeneration(config)
        initialise(model.named_parameters(), self.seed, printable_tokens(tokens))
        model.generation_config = generation_config(tokens)
        model.to(torch.bfloat16).save_pretrained(folder)
        tokens.save_pretrained(folder)
        Qwen2VLImageProcessorPil(
            min_pixels=MIN_IMAGE_TOKENS * PIXELS_PER_TOKEN,
            max_pixels=MAX_IMAGE_TOKENS * PIXELS_PER_TOKEN,
            patch_size=PATCH,
            merge_size=MERGE,
        ).save_pretrained(folder)
