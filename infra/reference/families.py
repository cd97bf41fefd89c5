"""Families of reference models: sizes, and their language models' training forward."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from infra.checkpoints import kimi_vl, llava
from infra.checkpoints.kimi_vl import KimiVL
from infra.checkpoints.llava import Llava
from infra.checkpoints.qwen2_5_vl import Qwen25VL
from infra.checkpoints.qwen3_vl import Qwen3VL
from infra.checkpoints.text import DeepSeekV2
from infra.checkpoints.tokens import VISION
from infra.reference.scenes import Form
from infra.reference.vision import Tower, kimi_tower, llava_tower, qwen_tower
from infra.reference.vocabulary import words


class Mropes(nn.Module):
    """The language model of a Qwen-VL shaped model: positions of three axes."""

    axes = 3

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model
        self.text = model.model.language_model

    @property
    def embedding(self) -> nn.Embedding:
        """Input embeddings of tokens."""
        return self.text.embed_tokens

    def forward(self, embedded: Tensor, positions: Tensor, sees: Tensor, cells: Tensor, extra: list[Tensor]) -> Tensor:
        """See `training.Language`."""
        more: dict[str, Any] = {}
        if extra:
            mask = torch.zeros(embedded.shape[:2], dtype=torch.bool, device=embedded.device)
            mask[:, cells] = True
            more = {"visual_pos_masks": mask, "deepstack_visual_embeds": [level.flatten(0, 1) for level in extra]}
        outputs = self.text(
            inputs_embeds=embedded,
            position_ids=positions,
            attention_mask=additive(sees, embedded.dtype),
            use_cache=False,
            **more,
        )
        return outputs.last_hidden_state

    def logits(self, hidden: Tensor) -> Tensor:
        """Scores of all tokens."""
        return self.model.lm_head(hidden)


class Plain(nn.Module):
    """A language model whose positions are one number: Llama's, DeepSeek-V2's."""

    axes = 1

    def __init__(self, text: Any, head: nn.Linear) -> None:
        super().__init__()
        self.text, self.head = text, head
        if hasattr(text.config, "kv_lora_rank"):
            from transformers import AttentionInterface

            AttentionInterface.register(_PLAIN, _plain_attention)
            text.set_attn_implementation(_PLAIN)

    @property
    def embedding(self) -> nn.Embedding:
        """Input embeddings of tokens."""
        return self.text.embed_tokens

    def forward(self, embedded: Tensor, positions: Tensor, sees: Tensor, cells: Tensor, extra: list[Tensor]) -> Tensor:
        """See `training.Language`."""
        mask = additive(sees, embedded.dtype)
        outputs = self.text(
            inputs_embeds=embedded, position_ids=positions[0], attention_mask=mask, use_cache=False
        )  # fmt: skip
        return outputs.last_hidden_state

    def logits(self, hidden: Tensor) -> Tensor:
        """Scores of all tokens."""
        return self.head(hidden)


_PLAIN = "two_products"


def _plain_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scaling: float, **_: Any
) -> tuple[Tensor, None]:
    """Attention by two matrix products.

    On CPUs the backward pass of PyTorch's own kernel takes three times as long.
    """
    scores = torch.matmul(query * scaling, key.transpose(-1, -2)) + mask
    return torch.matmul(torch.softmax(scores, -1), value).transpose(1, 2), None


def additive(sees: Tensor, dtype: torch.dtype) -> Tensor:
    """Additive attention mask [sets, 1, length, length] from a boolean [sets, length, length]."""
    kind = sees.device.type
    if torch.is_autocast_enabled(kind):
        dtype = torch.get_autocast_dtype(kind)
    return torch.zeros(sees.shape, dtype=dtype, device=sees.device).masked_fill_(~sees, torch.finfo(dtype).min)[:, None]


@dataclass(frozen=True)
class ReferenceFamily:
    """A reference family: recipe, training forward, and image placeholder of its template.

    `cell`: pixels of a cell's side, one token's. `levels`: of codes (see `training.Codes`). `forms`: of the pages
    that its tower is trained on; none: of any. `alike`: makes attention begin by looking for what resembles a token.
    `stride`: positions from a second of a clip to the next; 0: clips are not laid out here.
    """

    recipe: Any
    language: Callable[[Any], Any]
    tower: Callable[[Any, Any], Tower]
    tower_module: Callable[[Any], nn.Module]
    image: str
    cell_token: str
    cell: int
    levels: int = 1
    forms: tuple[Form, ...] = ()
    alike: Callable[[Any], None] | None = None
    stride: int = 0

    def form(self, wanted: Form) -> Form:
        """The form of pages nearest to the given one that the tower accepts.

        Where it knows one size alone, things are drawn more or less often.
        """
        if not self.forms:
            return wanted
        return replace(wanted, copies=self.forms[0].cells // wanted.things)


def _visual(model: Any) -> nn.Module:
    return model.model.visual


def _kimi_tower(model: Any) -> nn.Module:
    return nn.ModuleList([model["vision_tower"], model["multi_modal_projector"]])


def _llava_tower(model: Any) -> nn.Module:
    return nn.ModuleList([model.model.vision_tower, model.model.multi_modal_projector])


@torch.no_grad()
def _alike(language: Mropes | Plain) -> None:
    """Initialise queries half like keys ("mimetic initialisation", Trockman and Kolter 2023).

    A question's name then finds the cells that show it from the start. Without this kimi_vl did not learn the second
    hop, from a pencilled cell to the one that it refers to.
    """
    for layer in language.text.layers:
        attention = layer.self_attn
        if hasattr(attention, "kv_b_proj"):
            keys = _latent_keys(attention, attention.config)
        else:
            by_head = attention.k_proj.weight.unflatten(0, (-1, attention.head_dim))
            keys = by_head.repeat_interleave(attention.num_key_value_groups, 0).flatten(0, 1)
        attention.q_proj.weight.mul_(0.5**0.5).add_(0.5**0.5 * keys)


def _latent_keys(attention: Any, config: Any) -> Tensor:
    """Key weights [heads x head size, hidden] of a latent attention, as its queries' are given."""
    heads, nope, latent = config.num_attention_heads, config.qk_nope_head_dim, config.kv_lora_rank
    down, up = attention.kv_a_proj_with_mqa.weight, attention.kv_b_proj.weight
    by_head = up.unflatten(0, (heads, -1))[:, :nope] @ down[:latent]  # [heads, nope, hidden]
    rotary = down[latent:].expand(heads, -1, -1)
    return torch.cat([by_head, rotary], 1).flatten(0, 1)


VOCABULARY = 384

FAMILIES: dict[str, ReferenceFamily] = {
    "qwen2_5_vl": ReferenceFamily(
        Qwen25VL(
            vocabulary=VOCABULARY, hidden=256, intermediate=384, layers=5, heads=4, kv_heads=2, head_size=64,
            mrope_section=(8, 12, 12), vision_depth=2, vision_hidden=128, words=tuple(words()),
            vision={"fullatt_block_indexes": [0, 1]},
        ),
        Mropes, qwen_tower, _visual, VISION, "<|image_pad|>", cell=28, stride=4,
    ),
    "qwen3_vl": ReferenceFamily(
        Qwen3VL(
            vocabulary=VOCABULARY, hidden=256, intermediate=384, layers=5, heads=4, kv_heads=2, head_size=64,
            vision_hidden=128, words=tuple(words()),
        ),
        Mropes, qwen_tower, _visual, VISION, "<|image_pad|>", cell=32, levels=3,
        alike=_alike,
    ),
    "kimi_vl": ReferenceFamily(
        KimiVL(
            DeepSeekV2(
                vocabulary=VOCABULARY, hidden=256, intermediate=384, layers=5, dense_layers=5, nope=64, value=64,
            ),
            vision_hidden=96, words=tuple(words()),
        ),
        lambda model: Plain(model["language_model"].model, model["language_model"].lm_head),
        kimi_tower, _kimi_tower, kimi_vl.IMAGE, "<|media_pad|>", cell=28, alike=_alike,
    ),
    "llava": ReferenceFamily(
        # every page has 12 x 12 cells
        Llava(
            vocabulary=VOCABULARY, hidden=256, intermediate=384, layers=5, heads=4, kv_heads=4, head_size=64,
            image_size=12 * 28, patch=28, words=tuple(words()),
        ),
        lambda model: Plain(model.model.language_model, model.lm_head),
        llava_tower, _llava_tower, llava.IMAGE, llava.IMAGE, cell=28, forms=(Form(3, 12, 12),), alike=_alike,
    ),
}  # fmt: skip
