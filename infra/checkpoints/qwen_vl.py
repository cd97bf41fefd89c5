"""Parts common to Qwen2.5-VL and Qwen3-VL: M-RoPE, vision tokens, image processor."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from infra.checkpoints.language import Language, draw_weights, load, save, save_shape
from infra.checkpoints.tokens import tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerFast
    from transformers.image_processing_base import ImageProcessingMixin

MERGE = 2
MIN_IMAGE_TOKENS, MAX_IMAGE_TOKENS = 4, 2048


@dataclass(frozen=True, kw_only=True)
class QwenVL(Language):
    """Sizes of a Qwen-VL shaped model.

    Its vision tower has 4 heads; `vision` overrides its configuration.

    `drawn`: with weights; without them vLLM's loader `dummy` makes some up.
    """

    patch: ClassVar[int]

    mrope_section: tuple[int, int, int]
    vision_depth: int
    vision_hidden: int = 128
    vision: Mapping[str, Any] = field(default_factory=dict)
    drawn: bool = True

    def write(self, folder: Path) -> None:
        """Write a checkpoint, its weights drawn from `seed`, into the existing `folder`."""
        import torch

        tokens = self.tokenizer()
        if not self.drawn:
            with torch.device("meta"):
                save_shape(self.model(tokens), tokens, folder)
            self.image_processor().save_pretrained(folder)
            return
        model = self.model(tokens)
        draw_weights(model, tokens, self.seed)
        self.save(model, tokens, folder)

    def tokenizer(self) -> PreTrainedTokenizerFast:
        """The family's tokenizer with its chat template."""
        return tokenizer(self.vocabulary, words=self.words)

    @abstractmethod
    def model(self, tokens: PreTrainedTokenizerFast) -> PreTrainedModel:
        """The model, its weights not yet drawn."""

    def save(self, model: PreTrainedModel, tokens: PreTrainedTokenizerFast, folder: Path) -> None:
        """Write configuration, bf16 weights, tokenizer and image processor into `folder`."""
        save(model, tokens, folder)
        self.image_processor().save_pretrained(folder)

    def load(self, tokens: PreTrainedTokenizerFast, folder: Path) -> PreTrainedModel:
        """The model with the weights that `save` wrote into `folder`, in fp32."""
        return load(self.model(tokens), folder)

    def config(self, ids: Callable[[str], Any], vision: dict[str, Any], **rope: Any) -> dict[str, Any]:
        """Keyword arguments of the model's configuration; `vision` and `rope` join its parts'."""
        return {
            "text_config": self.language_config(ids, mrope_section=list(self.mrope_section), **rope),
            "vision_config": {
                "depth": self.vision_depth,
                "hidden_size": self.vision_hidden,
                "intermediate_size": 2 * self.vision_hidden,
                "num_heads": 4,
                "out_hidden_size": self.hidden,
                "patch_size": self.patch,
                "spatial_merge_size": MERGE,
                "temporal_patch_size": 2,
                **vision,
            },
            "image_token_id": ids("<|image_pad|>"),
            "video_token_id": ids("<|video_pad|>"),
            "vision_start_token_id": ids("<|vision_start|>"),
            "vision_end_token_id": ids("<|vision_end|>"),
            "tie_word_embeddings": False,
        }

    def image_processor(self) -> ImageProcessingMixin:
        """Images of `MIN_IMAGE_TOKENS` to `MAX_IMAGE_TOKENS` tokens."""
        from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

        pixels_per_token = (self.patch * MERGE) ** 2
        return Qwen2VLImageProcessorPil(
            min_pixels=MIN_IMAGE_TOKENS * pixels_per_token,
            max_pixels=MAX_IMAGE_TOKENS * pixels_per_token,
            patch_size=self.patch,
            merge_size=MERGE,
        )
