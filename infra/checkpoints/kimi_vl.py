"""Kimi-VL: a MoonViT tower before a DeepSeek-V2-shaped language model (multi-head latent attention, MoE)."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from infra.checkpoints.language import draw_weights
from infra.checkpoints.text import DeepSeekV2
from infra.checkpoints.tokens import tokenizer
from infra.checkpoints.weights import initialise

PATCH, MERGE = 14, 2
MEDIA_TOKENS = ("<|media_start|>", "<|media_content|>", "<|media_pad|>", "<|media_end|>")
IMAGE = "<|media_start|>image<|media_content|><|media_pad|><|media_end|>"
_PROCESSING = "kimi_vl_processing"


@dataclass(frozen=True)
class KimiVL:
    """Sizes of a Kimi-VL shaped model. Its tower has 4 heads."""

    text: DeepSeekV2 = field(default_factory=DeepSeekV2)
    vision_depth: int = 2
    vision_hidden: int = 128
    seed: int = 0

    @property
    def vocabulary(self) -> int:
        """Token ids in all."""
        return self.text.vocabulary

    def write(self, folder: Path) -> None:
        """Write configuration, bf16 weights, tokenizer and processor code into the existing `folder`.

        The library that writes the others has no Kimi-VL: the language model is its DeepSeek-V2, the tower is written
        by the names that vLLM's loader knows.
        """
        import torch
        from safetensors.torch import load_file, save_file
        from transformers import DeepseekV2Config, DeepseekV2ForCausalLM

        tokens = tokenizer(self.vocabulary, added=MEDIA_TOKENS, image=IMAGE)
        ids: Callable[[str], Any] = tokens.convert_tokens_to_ids
        language = DeepseekV2ForCausalLM(DeepseekV2Config(**self.text.config(ids)))
        tower = {name: torch.empty(shape) for name, shape in self._vision_shapes()}
        draw_weights(language, tokens, self.seed)
        initialise(tower.items(), self.seed + 1, ())
        language.to(torch.bfloat16).save_pretrained(folder)
        weights = {f"language_model.{name}": tensor for name, tensor in load_file(folder / "model.safetensors").items()}
        weights |= {name: tensor.to(torch.bfloat16) for name, tensor in tower.items()}
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
        tokens.save_pretrained(folder)
        shutil.copy(Path(__file__).parent / f"{_PROCESSING}.py", folder)
        self._write_json(folder / "config.json", self._config(json.loads((folder / "config.json").read_text()), ids))
        names = {"AutoImageProcessor": "KimiVLImageProcessor", "AutoProcessor": "KimiVLProcessor"}
        preprocessor = {
            "auto_map": {auto: f"{_PROCESSING}.{name}" for auto, name in names.items()},
            "image_processor_type": "KimiVLImageProcessor",
            "processor_class": "KimiVLProcessor",
            "patch_size": PATCH,
            "merge_kernel_size": [MERGE, MERGE],
            "in_token_limit": 4096,
        }
        self._write_json(folder / "preprocessor_config.json", preprocessor)

    def _config(self, text: dict[str, Any], ids: Callable[[str], Any]) -> dict[str, Any]:
        return {
            "architectures": ["KimiVLForConditionalGeneration"],
            "model_type": "kimi_vl",
            "dtype": "bfloat16",
            "text_config": text,
            "vision_config": {
                "model_type": "moonvit",
                "patch_size": PATCH,
                "init_pos_emb_height": 8,
                "init_pos_emb_width": 8,
                "num_attention_heads": 4,
                "num_hidden_layers": self.vision_depth,
                "hidden_size": self.vision_hidden,
                "intermediate_size": 2 * self.vision_hidden,
                "merge_kernel_size": [MERGE, MERGE],
            },
            "media_placeholder_token_id": ids("<|media_pad|>"),
            "pad_token_id": ids("<|endoftext|>"),
            "eos_token_id": ids("<|im_end|>"),
            "bos_token_id": ids("<|endoftext|>"),
            "tie_word_embeddings": False,
        }

    def _vision_shapes(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        width, merged = self.vision_hidden, self.vision_hidden * MERGE**2

        def linear(name: str, features: int, inputs: int) -> Iterator[tuple[str, tuple[int, ...]]]:
            yield f"{name}.weight", (features, inputs)
            yield f"{name}.bias", (features,)

        def norm(name: str) -> Iterator[tuple[str, tuple[int, ...]]]:
            yield f"{name}.weight", (width,)
            yield f"{name}.bias", (width,)

        yield "vision_tower.patch_embed.proj.weight", (width, 3, PATCH, PATCH)
        yield "vision_tower.patch_embed.proj.bias", (width,)
        yield "vision_tower.patch_embed.pos_emb.weight", (8, 8, width)
        for layer in range(self.vision_depth):
            block = f"vision_tower.encoder.blocks.{layer}"
            yield from norm(f"{block}.norm0")
            yield from norm(f"{block}.norm1")
            yield from linear(f"{block}.wqkv", 3 * width, width)
            yield from linear(f"{block}.wo", width, width)
            yield from linear(f"{block}.mlp.fc0", 2 * width, width)
            yield from linear(f"{block}.mlp.fc1", width, 2 * width)
        yield from norm("vision_tower.encoder.final_layernorm")
        yield from norm("multi_modal_projector.pre_norm")
        yield from linear("multi_modal_projector.linear_1", merged, merged)
        yield from linear("multi_modal_projector.linear_2", self.text.hidden, merged)

    @staticmethod
    def _write_json(path: Path, document: dict[str, Any]) -> None:
        path.write_text(json.dumps(document, indent=2))
