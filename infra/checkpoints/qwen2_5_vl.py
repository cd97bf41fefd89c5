"""Qwen2.5-VL: grouped-query attention, M-RoPE with its sections in blocks."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from infra.checkpoints.language import save
from infra.checkpoints.qwen_vl import MERGE, QwenVL
from infra.checkpoints.tokens import tokenizer


@dataclass(frozen=True, kw_only=True)
class Qwen25VL(QwenVL):
    """Sizes of a Qwen2.5-VL shaped model. Its vision tower has one full-attention layer, the last."""

    patch: ClassVar[int] = 14

    def write(self, folder: Path) -> None:
        """Write configuration, bf16 weights, tokenizer and image processor into the existing `folder`."""
        from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

        tokens = tokenizer(self.vocabulary)
        vision = {"fullatt_block_indexes": [self.vision_depth - 1], "window_size": 4 * self.patch * MERGE}
        config = Qwen2_5_VLConfig(**self.config(tokens.convert_tokens_to_ids, vision))
        save(Qwen2_5_VLForConditionalGeneration(config), tokens, self.seed, folder)
        self.image_processor().save_pretrained(folder)
