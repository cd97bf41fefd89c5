"""vLLM's own fused CPU kernels, where vLLM leaves them unused.

On a CPU vLLM leaves RMSNorm and the multimodal rotary embedding to torch, for a compiler to fuse. Engines that run
eagerly, as ours do there, then walk over every layer's activations some forty times in operations too small for their
threads. The kernels are in vLLM's library all the same (benchmark `cpu-kernels` says what they save). What they
do not cover goes the way it went before; with ORBITSERVE_CPU_KERNELS=0 in an engine's environment everything does.
"""

from __future__ import annotations

import os
from functools import wraps
from typing import Any

import torch
from torch import Tensor

SWITCH = "ORBITSERVE_CPU_KERNELS"
PROVIDER = "cpu_fused"
_LANES = 16  # rows of so many numbers are whole vector registers on every CPU


def install() -> None:
    """Have engines of this process use them, and `cpu_latent`, unless the environment says no.

    Can be called again.
    """
    if os.environ.get(SWITCH) == "0":
        return
    from vllm import ir
    from vllm.config.compilation import CompilationMode
    from vllm.config.kernel import IrOpPriorityConfig
    from vllm.model_executor.layers.rotary_embedding.mrope import MRotaryEmbedding
    from vllm.platforms import current_platform

    from infra.cpu import latent as cpu_latent

    if PROVIDER in ir.ops.rms_norm.impls:
        return
    current_platform.import_kernels()
    ir.ops.rms_norm.register_impl(PROVIDER, supports_args=_normalises)(rms_norm)
    ir.ops.fused_add_rms_norm.register_impl(PROVIDER, supports_args=_adds_and_normalises, inplace=True)(
        fused_add_rms_norm
    )

    def priority(cls: type, vllm_config: Any) -> IrOpPriorityConfig:
        compiled = vllm_config.compilation_config.mode not in (None, CompilationMode.NONE)
        first = ["native"] if compiled else [PROVIDER, "native"]
        return IrOpPriorityConfig.with_default(["native"], rms_norm=first, fused_add_rms_norm=first)

    platform: Any = type(current_platform)
    platform.get_default_ir_op_priority = classmethod(priority)
    kind: Any = MRotaryEmbedding
    kind.forward_native = _rotating(kind.forward_native)
    cpu_latent.install()


def rms_norm(x: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None = None) -> Tensor:
    """x / sqrt(mean(x²) + epsilon) · weight over the last dimension, rounded once."""
    rows = x.contiguous()  # heads of queries and keys that a model normalises lie apart
    out = torch.empty_like(rows)
    torch.ops._C.rms_norm(out, rows, weight, epsilon)
    return out


def fused_add_rms_norm(
    x: Tensor, x_residual: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None = None
) -> tuple[Tensor, Tensor]:
    """`rms_norm` of x + x_residual, and that sum; both in place."""
    torch.ops._C.fused_add_rms_norm(x, x_residual, weight, epsilon)
    return x, x_residual


def _normalises(x: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None = None) -> bool:
    plain = variance_size is None and weight is not None and weight.dtype == x.dtype
    return plain and x.shape[-1] % _LANES == 0


def _adds_and_normalises(
    x: Tensor, x_residual: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None = None
) -> bool:
    alike = x_residual.dtype == x.dtype and x_residual.shape == x.shape
    in_place = x.is_contiguous() and x_residual.is_contiguous()
    return alike and in_place and _normalises(x, weight, epsilon, variance_size)


def _rotating(native: Any) -> Any:
    """vLLM's `MRotaryEmbedding.forward_native` by the in-place kernel for plain positions.

    On copies: the kernel works in place.

    Where a token has three positions, the table that it reads is one of this very batch: [tokens, cos and sin].
    """
    from vllm.model_executor.layers.rotary_embedding.mrope import apply_interleaved_rope

    @wraps(native)
    def forward(
        self: Any, positions: Tensor, query: Tensor, key: Tensor | None = None, offsets: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        covered = offsets is None and self.rotary_dim % (2 * _LANES) == 0 and len(query) > 0
        if key is None or not covered or torch.compiler.is_compiling():  # a compiler fuses what it sees
            rotated: tuple[Tensor, Tensor | None] = native(self, positions, query, key, offsets)
            return rotated
        cache = self._match_cos_sin_cache_dtype(query)
        if positions.ndim == 2:
            halves = cache[positions].chunk(2, dim=-1)
            if self.mrope_interleaved:
                halves = [apply_interleaved_rope(half, self.mrope_section) for half in halves]
            else:
                split = (half.split(self.mrope_section, dim=-1) for half in halves)
                halves = [torch.cat([part[axis] for axis, part in enumerate(parts)], dim=-1) for parts in split]
            table = torch.cat(halves, dim=-1)
            places = torch.arange(len(table))
        else:
            table, places = cache, positions
        turned, turned_key = (side.clone(memory_format=torch.contiguous_format) for side in (query, key))
        torch.ops._C.rotary_embedding(places, turned, turned_key, self.head_size, table, self.is_neox_style)
        return turned, turned_key

    return forward
