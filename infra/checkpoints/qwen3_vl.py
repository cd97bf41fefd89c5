"""Qwen3-VL: grouped-query attention with normed queries and keys, interleaved M-RoPE, deepstack embeddings."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from infra.checkpoints.qwen2_5_vl import MAX_IMAGE_TOKENS, MERGE, MIN_IMAGE_TOKENS
from infra.checkpoints.tokens import printable_tokens, tokenizer
from infra.checkpoints.weights import generation_config, initialise

PATCH = 16
PIXELS_PER_TOKEN = (PATCH * MERGE) ** 2


@dataclass(frozen=True)
class Qwen3VL:
    """Sizes of a Qwen3-VL shaped model. Features of the vision layers `deepstack` enter the first language layers."""

    vocabulary: int = 512
    hidden: int = 256
    intermediate: int = 512
    layers: int = 4
    heads: int = 4
    kv_heads: int = 2
    head_size: int = 64
    mrope_section: tuple[int, int, int] = (12, 10, 10)
    vision_depth: int = 3
    vision_hidden: int = 128
    deepstack: tuple[int, ...] = (0, 1)
    context: int = 32768
    rope_theta: float = 10000.0
    seed: int = 0

    def write(self, folder: Path) -> None:
        """Write configuration, bf16 weights, tokenizer and both processors into the existing `folder`."""
        import torch
        from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration
        from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

        tokens = tokenizer(self.vocabulary)
        ids: Callable[[str], Any] = tokens.convert_tokens_to_ids
        config = Qwen3VLConfig(
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
                    "mrope_interleaved": True,
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
                "deepstack_visual_indexes": list(self.deepstack),
                "patch_size": PATCH,
                "spatial_merge_size": MERGE,
                "temporal_patch_size": 2,
                "num_position_embeddings": 256,
            },
            image_token_id=ids("<|image_pad|>"),
            video_token_id=ids("<|video_pad|>"),
            vision_start_token_id=ids("<|vision_start|>"),
            vision_end_token_id=ids("<|vision_end|>"),
            tie_word_embeddings=False,
        )
        model = Qwen3VLForConditionalGeneration(config)
        initialise(model.named_parameters(), self.seed, printable_tokens(tokens))
        model.generation_config = generation_config(tokens)
        model.to(torch.bfloat16).save_pretrained(folder)
        tokens.save_pretrained(folder)
        image = Qwen2VLImageProcessorPil(
            min_pixels=MIN_IMAGE_TOKENS * PIXELS_PER_TOKEN,
            max_pixels=MAX_IMAGE_TOKENS * PIXELS_PER_TOKEN,
            patch_size=PATCH,
            merge_size=MERGE,
        )
        image.save_pretrained(folder)
        settings = json.loads((folder / "preprocessor_config.json").read_text())
        video = settings | {"video_processor_type": "Qwen3VLVideoProcessor"}
        (folder / "video_preprocessor_config.json").write_text(json.dumps(video, indent=2))
