"""Attention layers of a vLLM engine: paged caches, and how they are written and rotated.

Checked on vLLM 0.32.0, whose internals these are.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from kvstore.operator.layout import Segment
from kvstore.operator.rotary import turns_evenly

_QUANTISED = {
    "fp8": torch.float8_e4m3fn,
    "fp8_e4m3": torch.float8_e4m3fn,
    "fp8_e5m2": torch.float8_e5m2,
}  # by vLLM's name of the cache dtype; vLLM keeps them as bytes
_DTYPE_NAMES = ("float32", "float16", "bfloat16")


class UnsupportedEngine(RuntimeError):
    """The model keeps or rotates its KV in a way that chunks cannot be relocated in."""


class AttentionLayers:
    """The layers of one rank's model that keep KV.

    Properties raise UnsupportedEngine where they keep it otherwise than chunks need it.
    """

    segments: Sequence[Segment] = ()  # of this rank's share of a token's KV

    def __init__(self, model_runner: Any) -> None:
        self._runner = model_runner

    @property
    def names(self) -> Sequence[str]:
        """vLLM's names of the layers, in order."""
        names: Sequence[str] = self.group.layer_names
        return names

    @property
    def block_size(self) -> int:
        """Tokens of a block."""
        return int(self.group.kv_cache_spec.block_size)

    @property
    def backend(self) -> str:
        """vLLM's name of the attention backend."""
        return str(self.group.backend.get_name())

    @property
    def features(self) -> int:
        """Numbers that this rank keeps of a token in a layer."""
        return sum(segment.features for segment in self.segments)

    @property
    def is_latent(self) -> bool:
        """True for MLA."""
        return bool(self._runner.vllm_config.model_config.use_mla)

    @cached_property
    def group(self) -> Any:
        """vLLM's one group of layers that keep their KV alike."""
        groups = [group for groups in self._runner.attn_groups for group in groups]
        if len(groups) != 1:
            kinds = ", ".join(type(group.kv_cache_spec).__name__ for group in groups)
            raise UnsupportedEngine(f"the model's layers keep KV in {len(groups)} different ways ({kinds}), not in one")
        return groups[0]

    @cached_property
    def builder(self) -> Any:
        """Builder of the backend's description of a batch."""
        return self._new_builder()

    @cached_property
    def other_builder(self) -> Any:
        """Builder for a second description in one forward: builders keep parts of the first."""
        return self._new_builder()

    def _new_builder(self) -> Any:
        """Builder with buffers for one row per token; vLLM's own has `max_num_seqs` rows."""
        config = copy.copy(self._runner.vllm_config)
        scheduler = config.scheduler_config = copy.copy(config.scheduler_config)
        scheduler.max_num_seqs = scheduler.max_num_batched_tokens
        group = replace(self.group, metadata_builders=[])
        group.create_metadata_builders(config, self._runner.device)
        return group.get_metadata_builder()

    @cached_property
    def walker(self) -> Any:
        """The module that runs the layers which keep KV, one after the other."""
        named = self._runner.model.named_modules()
        layers = self.names[0]
        walkers = [m for name, m in named if hasattr(m, "end_layer") and layers.startswith(f"{name}.")]
        if len(walkers) != 1:
            raise UnsupportedEngine(f"expected one module that walks the model's layers, found {len(walkers)}")
        return walkers[0]

    @property
    def scale(self) -> float:
        """Scale of the first layer's query-key products."""
        return float(self.layer(0).impl.scale)

    @property
    def can_tell_attention(self) -> bool:
        """True if queries and keys alone determine the first layer's attention.

        MLA's are up-projected first; windows, sinks, caps, biases and scales of quantised ones would have to be known.
        """
        if self.is_latent or self.quantised is not None:
            return False
        found = self.layer(0).impl
        if getattr(found, "sinks", None) is not None or getattr(found, "alibi_slopes", None) is not None:
            return False
        unbounded = getattr(found, "sliding_window", None) in (None, -1, (-1, -1))
        return unbounded and not getattr(found, "logits_soft_cap", None)

    @property
    def layers(self) -> list[Any]:
        """All layers' attention modules, in order."""
        return [self.layer(layer) for layer in range(len(self.names))]

    @property
    def cache_dtype(self) -> str:
        """vLLM's name of the KV cache's number format."""
        return str(self._runner.vllm_config.cache_config.cache_dtype)

    @cached_property
    def quantised(self) -> torch.dtype | None:
        """Number format of a quantised KV cache's bytes."""
        name = self.cache_dtype
        if name in ("auto", *_DTYPE_NAMES):
            return None
        scales = {float(getattr(self.layer(0), scale)) for scale in ("_k_scale", "_v_scale")}
        if name not in _QUANTISED or scales != {1.0}:
            raise UnsupportedEngine(
                f"KV cache dtype {name!r} with scales {sorted(scales)} is not supported; use one of "
                f"{', '.join(_QUANTISED)} without calibrated scales, or auto"
            )
        return _QUANTISED[name]

    def layer(self, layer: int) -> Any:
        """One layer's attention module."""
        context = self._runner.vllm_config.compilation_config.static_forward_context
        return context[self.names[layer]]

    def cache(self, layer: int) -> Tensor:
        """One layer's paged KV as vLLM keeps it, blocks first."""
        return self.layer(layer).kv_cache

    def elements(self, layer: int) -> Tensor:
        """`cache` as numbers: vLLM keeps quantised ones as bytes."""
        cache = self.cache(layer)
        return cache if self.quantised is None else cache.view(self.quantised)

    def update(self, layer: int, kv: Tensor, slots: Tensor) -> None:
        """Write rows [tokens, features] of one layer by the backend's own update op."""
        attention = self.layer(layer)
        parts = kv.split([segment.features for segment in self.segments], dim=-1)
        first, second = (
            part.reshape(len(kv), segment.heads, segment.width)
            for part, segment in zip(parts, self.segments, strict=True)
        )
        update, cache = attention.impl.do_kv_cache_update, self.cache(layer)
        if self.is_latent:
            update(first.squeeze(1), second, cache, slots, attention.kv_cache_dtype, attention._k_scale)
        else:
            update(attention, first, second, cache, slots)

    def rotary(self) -> Any:
        """The rotary embedding that all layers share."""
        blocks = tuple(name.rsplit(".", 1)[0] + "." for name in self.names)
        named = self._runner.model.named_modules(remove_duplicate=False)
        rotary = [(name, m) for name, m in named if name.startswith(blocks) and hasattr(m, "cos_sin_cache")]
        without = [block for block in blocks if not any(name.startswith(block) for name, _ in rotary)]
        if rotary and without:
            raise UnsupportedEngine(f"some layers have no rotary embedding: {', '.join(without)}")
        modules = [m for _, m in rotary]
        kinds = {(m.base, m.rotary_dim, type(m).__name__) for m in modules}
        if len(kinds) != 1:
            raise UnsupportedEngine(f"expected one rotary embedding for all layers, found {sorted(map(str, kinds))}")
        return modules[0]

    @staticmethod
    def inverse_frequencies(rotary: Any) -> list[float]:
        """The engine's own fp32 frequencies, checked against the table that its kernels read.

        They are what its table is computed from when that is done once more, where it was done: computed otherwise they
        would differ in the last bits, which a shift of thousands of positions magnifies. Scaled variants (YaRN, linear,
        Llama 3, NTK) change the frequencies and may multiply the table by a constant: keys still turn by a fixed angle
        per position, so relocation stays exact. Whatever else a table holds is refused.
        """
        factors = getattr(rotary, "scaling_factors", None) or [1.0]
        compute, computed = rotary._compute_inv_freq, list[Tensor]()

        def noted(argument: Any) -> Tensor:
            computed.append(compute(argument))
            return computed[-1]

        rotary._compute_inv_freq = noted
        try:
            with rotary.cos_sin_cache.device:
                rotary._compute_cos_sin_cache()
        finally:
            del rotary._compute_inv_freq
        if len(computed) == len(factors) == 1:
            frequencies = computed[0].double().cpu() / factors[0]
            if turns_evenly(rotary.cos_sin_cache.cpu(), frequencies):
                return frequencies.tolist()
        raise UnsupportedEngine(
            f"{type(rotary).__name__} does not turn keys by a fixed angle per position: chunks cannot be relocated"
        )
