"""Qwen2.5-VL: grouped-query attention, M-RoPE with its sections in blocks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from infra.checkpoints.qwen_vl import MERGE, QwenVL

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerFast


@dataclass(frozen=True, kw_only=True)
class Qwen25VL(QwenVL):
    """Sizes of a Qwen2.5-VL shaped model. The last layer of its vision tower has full attention."""

    patch: ClassVar[int] = 14

    def model(self, tokens: PreTrainedTokenizerFast) -> PreTrainedModel:
        """The model, its weights not yet drawn."""
        from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

        vision = {"fullatt_block_indexes": [self.vision_depth - 1], "window_size": 4 * self.patch * MERGE}
        config = Qwen2_5_VLConfig(**self.config(tokens.convert_tokens_to_ids, vision | dict(self.vision)))
        return Qwen2_5_VLForConditionalGeneration(config)
