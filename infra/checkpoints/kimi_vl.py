"""Kimi-VL recipe: a MoonViT tower and a DeepSeek-V2-shaped language model (MLA, MoE)."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from infra.checkpoints.language import draw_weights
from infra.checkpoints.text import DeepSeekV2
from infra.checkpoints.tokens import tokenizer
from infra.checkpoints.weights import generation_config, initialise

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

PATCH, MERGE = 14, 2
POSITIONS, HEADS = 8, 4  # of the tower: its learnt grid of positions is so many a side
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
    words: tuple[str, ...] = ()

    @property
    def vocabulary(self) -> int:
        """Token ids in all."""
        return self.text.vocabulary

    @property
    def hidden(self) -> int:
        """Width of the language model."""
        return self.text.hidden

    def write(self, folder: Path) -> None:
        """Write a checkpoint with weights drawn from `seed` into the existing `folder`."""
        tokens = self.tokenizer()
        model = self.model(tokens)
        draw_weights(model["language_model"], tokens, self.seed)
        tower = {
            name: parameter for name, parameter in model.named_parameters() if not name.startswith("language_model.")
        }
        initialise(tower.items(), self.seed + 1, ())
        self.save(model, tokens, folder)

    def tokenizer(self) -> PreTrainedTokenizerFast:
        """The family's tokenizer with its chat template."""
        return tokenizer(self.vocabulary, added=MEDIA_TOKENS, image=IMAGE, words=self.words)

    def model(self, tokens: PreTrainedTokenizerFast) -> Any:
        """The uninitialised model: `language_model`, `vision_tower`, `multi_modal_projector`.

        The library that writes the others has no Kimi-VL: the language model is its DeepSeek-V2, the tower is ours.
        """
        from torch import nn
        from transformers import DeepseekV2Config, DeepseekV2ForCausalLM

        from infra.checkpoints.moonvit import MoonViT, Projector

        language = DeepseekV2ForCausalLM(DeepseekV2Config(**self.text.config(tokens.convert_tokens_to_ids)))
        return nn.ModuleDict(
            {
                "language_model": language,
                "vision_tower": MoonViT(self.vision_hidden, self.vision_depth, PATCH),
                "multi_modal_projector": Projector(self.vision_hidden, self.text.hidden, MERGE),
            }
        )

    def image_processor(self) -> Any:
        """The image processor that comes with the checkpoint."""
        from infra.checkpoints.kimi_vl_processing import KimiVLImageProcessor

        return KimiVLImageProcessor(PATCH, (MERGE, MERGE))

    def save(self, model: Any, tokens: PreTrainedTokenizerFast, folder: Path) -> None:
        """Write configuration, bf16 weights, tokenizer and processor code into `folder`."""
        import torch
        from safetensors.torch import load_file, save_file

        language = model.to(torch.bfloat16)["language_model"]
        language.generation_config = generation_config(tokens)
        language.save_pretrained(folder)
        weights = {f"language_model.{name}": tensor for name, tensor in load_file(folder / "model.safetensors").items()}
        for part in ("vision_tower", "multi_modal_projector"):
            weights |= {f"{part}.{name}": tensor for name, tensor in model[part].state_dict().items()}
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
        tokens.save_pretrained(folder)
        shutil.copy(Path(__file__).parent / f"{_PROCESSING}.py", folder)
        ids: Callable[[str], Any] = tokens.convert_tokens_to_ids
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

    def load(self, tokens: PreTrainedTokenizerFast, folder: Path) -> Any:
        """The model with the weights that `save` wrote into `folder`, in fp32."""
        from safetensors.torch import load_file

        model = self.model(tokens)
        model.load_state_dict(load_file(folder / "model.safetensors"))
        return model

    def _config(self, text: dict[str, Any], ids: Callable[[str], Any]) -> dict[str, Any]:
        return {
            "architectures": ["KimiVLForConditionalGeneration"],
            "model_type": "kimi_vl",
            "dtype": "bfloat16",
            "text_config": text,
            "vision_config": {
                "model_type": "moonvit",
                "patch_size": PATCH,
                "init_pos_emb_height": POSITIONS,
                "init_pos_emb_width": POSITIONS,
                "num_attention_heads": HEADS,
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

    @staticmethod
    def _write_json(path: Path, document: dict[str, Any]) -> None:
        path.write_text(json.dumps(document, indent=2))
