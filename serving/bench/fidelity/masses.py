"""Attention masses of pages in the first layer, and the weights of their patches' sum.

Attention over several stretches of tokens is the mean of the attention over each, weighted by Z = exp(log-sum-exp).
Behind A_i alone a token of B gets (Z_i o_i + Z_B o_B) / (Z_i + Z_B), behind a set (Σ Z_i o_i + Z_B o_B) / (Σ Z_i +
Z_B), where Z_B stands for the fixed text and B itself. So a set adds to o_B a weighted sum of what its members add:

    Δo(S) = Σ c_i Δo(A_i),    c_i = (Z_i + Z_B) / (Σ_j Z_j + Z_B) = (1 + r_i) / (1 + Σ_j r_j),    r_i = Z_i / Z_B

for every token and head. In the first layer queries and keys are the same in any context. What
deeper layers add is not linear in Δo, and is weighted alike.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from prefill_workers.engine.attention import attention_shares
from prefill_workers.link.compose import attention_weights

if TYPE_CHECKING:
    from serving.bench.fidelity.reader import Prompt

_PARTS = ("embed_tokens.", "layers.0.self_attn.", "layers.0.input_layernorm.")


class FirstLayer:
    """A checkpoint's first layer by transformers: the engine does not expose its queries.

    Raises ValueError if the checkpoint does not hold such a layer.
    """

    def __init__(self, checkpoint: Path, text_config: Any) -> None:
        from safetensors.torch import load_file
        from transformers import AutoModel

        whole = text_config.to_dict()
        first = {"num_hidden_layers": 1} | ({"layer_types": whole["layer_types"][:1]} if "layer_types" in whole else {})
        config = type(text_config).from_dict(whole | first)
        model = AutoModel.from_config(config, attn_implementation="eager").float().eval()
        wanted = [name for name in model.state_dict() if name.startswith(_PARTS)]
        found = {
            name: weight
            for file in sorted(checkpoint.glob("*.safetensors"))
            for stored, weight in load_file(file).items()
            if "visual" not in stored and "vision" not in stored
            for name in wanted
            if stored.endswith(name)
        }
        if missing := sorted(set(wanted) - found.keys()):
            raise ValueError(f"{checkpoint} lacks {missing}")
        model.load_state_dict(found, strict=False)
        self._model = model

    def ratios(self, prompt: Prompt) -> Tensor:
        """r_i of the last page's tokens per earlier page of this prompt, [pages - 1, heads, tokens]."""
        embeddings = self._model.embed_tokens(prompt.token_ids.long())
        for place in prompt.places:
            assert place.page.embeddings is not None
            span, rows = place.page.span, place.page.embeddings.float()[:, : embeddings.shape[1]]
            at = torch.arange(span.count) if span.is_embed is None else span.is_embed.nonzero().flatten()
            embeddings[place.start + span.first + at] = rows
        positions = prompt.positions[..., None, :]  # [1, tokens] or [3, 1, tokens]
        out = self._model(
            inputs_embeds=embeddings[None], position_ids=positions, output_attentions=True, use_cache=False
        )
        *before, last = prompt.places
        rows = out.attentions[0][0, :, last.start : last.stop]  # [heads, tokens, prompt]
        masses = torch.stack([rows[..., place.start : place.stop].sum(-1) for place in before])
        return masses / (1 - masses.sum(0)).clamp_min(1e-6)


def weights(ratios: Tensor) -> Tensor:
    """c_i [antecedents, tokens] from r_i [antecedents, heads, tokens], by the heads' mean."""
    return attention_weights(attention_shares(ratios))


def relative_weights(placed: Tensor, alone: Tensor) -> Tensor:
    """c_i [antecedents, tokens] <= 1: mass of A_i in the prompt over its mass alone, all heads.

    `placed`, `alone`: r_i [antecedents, heads, tokens] in the very prompt, and where each A_i stands alone before B.
    The distance between A_i and B may differ, and with it what B pays.
    """
    taken, paid = attention_shares(placed)[0], attention_shares(alone)[1]
    return attention_weights(torch.stack([taken, paid])).clamp(max=1.0)
