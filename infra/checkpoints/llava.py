"""LLaVA-1.5 recipe: multi-head attention, plain RoPE, a CLIP tower, images of one size."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from infra.checkpoints.language import Language, draw_weights
from infra.checkpoints.tokens import tokenizer
from infra.checkpoints.weights import generation_config

if TYPE_CHECKING:
    from transformers import CLIPImageProcessor, PreTrainedModel, PreTrainedTokenizerFast

IMAGE = "<image>"
_TOWER, _STORED_TOWER = "vision_tower.", "vision_tower.vision_model."  # vLLM's loader knows transformers 4's names


@dataclass(frozen=True, kw_only=True)
class Llava(Language):
    """Sizes of a LLaVA-1.5 shaped model; an image takes (`image_size` / `patch`)² tokens."""

    heads: int = 4
    kv_heads: int = 4
    head_size: int = 64
    context: int = 4096
    vision_depth: int = 3
    vision_hidden: int = 128
    image_size: int = 84
    patch: int = 14

    def write(self, folder: Path) -> None:
        """Write a checkpoint with weights drawn from `seed` into the existing `folder`."""
        tokens = self.tokenizer()
        model = self.model(tokens)
        draw_weights(model, tokens, self.seed)
        self.save(model, tokens, folder)

    def tokenizer(self) -> PreTrainedTokenizerFast:
        """The family's tokenizer with its chat template."""
        return tokenizer(self.vocabulary, added=(IMAGE,), image=IMAGE, words=self.words)

    def model(self, tokens: PreTrainedTokenizerFast) -> PreTrainedModel:
        """The model, its weights not yet drawn."""
        from transformers import LlavaConfig, LlavaForConditionalGeneration

        ids: Callable[[str], Any] = tokens.convert_tokens_to_ids
        config = LlavaConfig(
            text_config={"model_type": "llama", **self.language_config(ids)},
            vision_config={
                "model_type": "clip_vision_model",
                "hidden_size": self.vision_hidden,
                "intermediate_size": 2 * self.vision_hidden,
                "num_hidden_layers": self.vision_depth,
                "num_attention_heads": 4,
                "image_size": self.image_size,
                "patch_size": self.patch,
                "projection_dim": self.vision_hidden,
            },
            image_token_index=ids(IMAGE),
            image_seq_length=(self.image_size // self.patch) ** 2,
            vision_feature_layer=-2,
            vision_feature_select_strategy="default",
            tie_word_embeddings=False,
        )
        return LlavaForConditionalGeneration(config)

    def image_processor(self) -> CLIPImageProcessor:
        """Images of one size, scaled and cropped to it."""
        from transformers import CLIPImageProcessor

        return CLIPImageProcessor(
            size={"shortest_edge": self.image_size},
            crop_size={"height": self.image_size, "width": self.image_size},
        )

    def save(self, model: PreTrainedModel, tokens: PreTrainedTokenizerFast, folder: Path) -> None:
        """Write configuration, bf16 weights, tokenizer and processor into the existing `folder`."""
        import torch
        from safetensors.torch import save_file
        from transformers import LlavaProcessor

        model.config.architectures = ["LlavaForConditionalGeneration"]
        model.config.dtype = torch.bfloat16
        model.config.save_pretrained(folder)
        generation_config(tokens).save_pretrained(folder)
        weights = {
            name.replace(_TOWER, _STORED_TOWER): tensor.to(torch.bfloat16).contiguous()
            for name, tensor in model.state_dict().items()
            if "position_ids" not in name
        }
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
        processor = LlavaProcessor(
            self.image_processor(),
            tokens,
            patch_size=self.patch,
            vision_feature_select_strategy="default",
            chat_template=tokens.chat_template,
            image_token=IMAGE,
            num_additional_image_tokens=1,
        )
        processor.save_pretrained(folder)

    def load(self, tokens: PreTrainedTokenizerFast, folder: Path) -> PreTrainedModel:
        """The model with the weights that `save` wrote into `folder`, in fp32."""
        from safetensors.torch import load_file

        model = self.model(tokens)
        stored = load_file(folder / "model.safetensors")
        weights = {name.replace(_STORED_TOWER, _TOWER): tensor for name, tensor in stored.items()}
        kept = {name: tensor for name, tensor in model.state_dict().items() if "position_ids" in name}
        model.load_state_dict(weights | kept)
        return model
