"""Which of vLLM's rotary embeddings chunks are relocated in, and by which frequencies."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.rotary_embedding import get_rope

from kvstore.operator.rotary import RotaryScheme, rotate
from prefill_workers.engine.attention_layers import AttentionLayers, UnsupportedEngine

WIDTH, POSITIONS, ORIGINAL = 64, 4096, 1024
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": ORIGINAL}
LLAMA = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": ORIGINAL}
DEEPSEEK = {"factor": 4.0, "original_max_position_embeddings": ORIGINAL, "mscale": 1.0, "mscale_all_dim": 0.5}
KINDS: dict[str, dict[str, Any]] = {
    "plain": {"rope_type": "default"},
    "of several axes": {"rope_type": "default", "mrope_section": [8, 12, 12]},
    "YaRN": YARN,
    "YaRN of several axes": {**YARN, "mrope_section": [8, 12, 12]},
    "YaRN of DeepSeek": {"rope_type": "deepseek_yarn", **DEEPSEEK},
    "linear": {"rope_type": "linear", "factor": 4.0},
    "Llama 3": {"rope_type": "llama3", "factor": 8.0, **LLAMA},
    "NTK": {"rope_type": "ntk", "factor": 4.0},
    "dynamic NTK": {"rope_type": "dynamic", "factor": 4.0, "original_max_position_embeddings": ORIGINAL},
    "dynamic NTK by alpha": {"rope_type": "dynamic", "alpha": 4.0},
}


def rope(**parameters: Any) -> Any:
    with set_current_vllm_config(VllmConfig()):
        return get_rope(WIDTH, POSITIONS, True, {"rope_theta": 5e5, **parameters}, dtype=torch.float32)


@pytest.mark.parametrize("kind", KINDS)
def test_keys_are_turned_as_the_engines_kernels_turn_them(kind: str):
    rotary = rope(**KINDS[kind])
    scheme = RotaryScheme(tuple(AttentionLayers.inverse_frequencies(rotary)))
    assert "_compute_inv_freq" not in vars(rotary), "it is left as it was"
    table = rotary.cos_sin_cache
    keys = torch.randn(5, WIDTH, generator=torch.Generator().manual_seed(1))

    def at(position: int) -> torch.Tensor:
        cos, sin = table[position].chunk(2)
        first, second = keys.chunk(2, -1)
        return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)

    torch.testing.assert_close(rotate(at(100), 3900, scheme), at(4000), rtol=1e-3, atol=1e-3)


def test_a_table_of_several_parts_is_refused():
    rotary = rope(rope_type="linear", factor=4.0)
    rotary.scaling_factors = [1.0, 4.0]  # as of adapters, each for contexts of another length
    with pytest.raises(UnsupportedEngine, match="fixed angle per position"):
        AttentionLayers.inverse_frequencies(rotary)


@pytest.mark.parametrize(
    ("turned", "words"), [([True, True], None), ([True, False], r"no rotary .*layers\.1\."), ([], "found")]
)
def test_every_layer_turns_its_keys_or_none_is_relocated(turned: list[bool], words: str | None):
    model = nn.Module()
    model.layers = nn.ModuleList()
    for turns in turned or [False]:
        attention = nn.Module()
        if turns:
            attention.rotary_emb = rope(rope_type="default")
        layer = nn.Module()
        layer.self_attn = attention
        model.layers.append(layer)
    names = [f"layers.{i}.self_attn.attn" for i in range(len(model.layers))]
    layers = AttentionLayers(SimpleNamespace(model=model))
    vars(layers)["group"] = SimpleNamespace(layer_names=names)
    if words is None:
        assert layers.rotary() is model.layers[0].self_attn.rotary_emb
    else:
        with pytest.raises(UnsupportedEngine, match=words):
            layers.rotary()
