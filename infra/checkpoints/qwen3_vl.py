"""Qwen3-VL recipe: GQA with normed queries and keys, interleaved M-RoPE, deepstack."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from infra.checkpoints.qwen_vl import QwenVL

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerFast


@dataclass(frozen=True, kw_only=True)
class Qwen3VL(QwenVL):
    """Sizes of a Qwen3-VL shaped model.

    Features of the vision layers `deepstack` enter the first language layers.
    """

    patch: ClassVar[int] = 16

    heads: int = 4
    head_size: int = 64
    mrope_section: tuple[int, int, int] = (12, 10, 10)
    vision_depth: int = 3
    deepstack: tuple[int, ...] = (0, 1)

    def model(self, tokens: PreTrainedTokenizerFast) -> PreTrainedModel:
        """The model, its weights not yet drawn."""
        from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration

        vision = {"deepstack_visual_indexes": list(self.deepstack), "num_position_embeddings": 256}
        ids = tokens.convert_tokens_to_ids
        return Qwen3VLForConditionalGeneration(
            Qwen3VLConfig(**self.config(ids, vision | dict(self.vision), mrope_interleaved=True))
        )

    def save(self, model: PreTrainedModel, tokens: PreTrainedTokenizerFast, folder: Path) -> None:
        """Write configuration, bf16 weights, tokenizer and both processors into `folder`."""
        super().save(model, tokens, folder)
        settings = json.loads((folder / "preprocessor_config.json").read_text())
        video = settings | {"video_processor_type": "Qwen3VLVideoProcessor"}
        (folder / "video_preprocessor_config.json").write_text(json.dumps(video, indent=2))
