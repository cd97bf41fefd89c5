"""vLLM's CPU kernels against what they stand for, computed in fp64, and against what vLLM does without them."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("vllm")
from infra.cpu import kernels as cpu_kernels

DTYPES = [torch.float32, torch.bfloat16]
SECTIONS = {32: [4, 6, 6], 64: [8, 12, 12], 128: [16, 24, 24]}


@pytest.fixture(scope="module", autouse=True)
def installed() -> Iterator[Any]:
    from vllm.config import CompilationConfig, CompilationMode, VllmConfig, set_current_vllm_config
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        pytest.skip("for CPUs")
    cpu_kernels.install()
    config = VllmConfig(compilation_config=CompilationConfig(mode=CompilationMode.NONE))
    with set_current_vllm_config(config):
        yield config


def off(found: Tensor, exact: Tensor) -> float:
    """In units of the dtype's rounding of the largest number."""
    worst = (found.double() - exact).abs().max() / exact.abs().max()
    return float(worst) / torch.finfo(found.dtype).eps


def numbers(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(len(shape) + shape[-1])).to(dtype)


def normalised(x: Tensor, weight: Tensor) -> Tensor:
    return x.double() / (x.double().square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight.double()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [16, 48, 1024])
def test_norms_are_rounded_once(dtype: torch.dtype, width: int) -> None:
    x, residual = (numbers(2, 5, width, dtype=dtype) * size for size in (1, 2))
    weight = numbers(width, dtype=dtype)
    # Of the rounding: where the CPU has no instruction for it, vLLM cuts bfloat16 off instead of rounding to the
    # nearest; in fp32 the sum of squares has roundings of its own.
    most = 2.0 if dtype is not torch.bfloat16 else 0.55 if torch.cpu._is_avx512_bf16_supported() else 1.0
    assert off(cpu_kernels.rms_norm(x, weight, 1e-6), normalised(x, weight)) < most
    heads = x.unflatten(-1, (-1, 16))[:, :, ::2]  # as a model takes them out of queries, keys and values
    assert off(cpu_kernels.rms_norm(heads, weight[:16], 1e-6), normalised(heads, weight[:16])) < most
    exact_sum = x.double() + residual.double()
    found, total = cpu_kernels.fused_add_rms_norm(x.clone(), residual.clone(), weight, 1e-6)
    assert off(total, exact_sum) < 1
    assert off(found, normalised(exact_sum, weight)) < 2  # of a sum that was rounded


def test_an_engines_norms_take_the_kernels_where_they_are_covered(installed: Any) -> None:
    from vllm import ir
    from vllm.config import CompilationConfig, CompilationMode
    from vllm.platforms import current_platform

    compiled = SimpleNamespace(compilation_config=CompilationConfig(mode=CompilationMode.VLLM_COMPILE))
    assert current_platform.get_default_ir_op_priority(compiled).rms_norm == ["native"]  # a compiler fuses them
    with current_platform.get_default_ir_op_priority(installed).set_priority():
        x, weight = numbers(3, 64, dtype=torch.float32), torch.ones(64)

        def taken(x: Tensor, weight: Tensor | None = weight, **more: Any) -> str:
            return ir.ops.rms_norm.dispatch(x, weight, 1e-6, **more).provider

        assert taken(x) == cpu_kernels.PROVIDER
        assert taken(x.view(3, 4, 16), weight[:16]) == cpu_kernels.PROVIDER
        assert taken(x[:, :32], weight[:32]) == cpu_kernels.PROVIDER
        assert taken(x[:, :24], weight[:24]) == "native"
        assert taken(x, None) == taken(x, variance_size=32) == taken(x.bfloat16()) == "native"
        assert ir.ops.fused_add_rms_norm.dispatch(x, x, weight, 1e-6).provider == cpu_kernels.PROVIDER
        assert ir.ops.fused_add_rms_norm.dispatch(x, torch.empty(64, 3).mT, weight, 1e-6).provider == "native"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("head", "rotary"), [(32, 32), (128, 128), (128, 64)])
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("three", [False, True])
@pytest.mark.parametrize("neox", [False, True])
def test_rotation_is_vllms(
    dtype: torch.dtype, head: int, rotary: int, interleaved: bool, three: bool, neox: bool, monkeypatch: Any
) -> None:
    from vllm.model_executor.layers.rotary_embedding.mrope import MRotaryEmbedding

    sections = SECTIONS[rotary]
    layer = MRotaryEmbedding(
        head, rotary, 4096, 1e4, neox, dtype, mrope_section=sections, mrope_interleaved=interleaved
    )
    exact = MRotaryEmbedding(
        head, rotary, 4096, 1e4, neox, torch.float64, mrope_section=sections, mrope_interleaved=interleaved
    )
    exact.cos_sin_cache = layer.cos_sin_cache.double()
    positions = torch.arange(27).view(3, 9) * 31 if three else torch.arange(9) * 31
    query, key, _ = numbers(9, 6 * head, dtype=dtype).split([4 * head, head, head], dim=-1)
    before = query.clone()
    called: list[bool] = []
    kernel = torch.ops._C.rotary_embedding
    monkeypatch.setattr(torch.ops._C, "rotary_embedding", lambda *given: (called.append(True), kernel(*given)))
    found = layer.forward_native(positions, query, key)
    assert called
    wanted = type(exact).forward_native.__wrapped__(exact, positions, query.double(), key.double())
    assert torch.equal(query, before)
    for part, whole in zip(found, wanted, strict=True):
        assert part.shape == whole.shape
        assert off(part, whole) < 2


def test_the_environment_switches_them_off(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm import ir

    monkeypatch.setattr(ir.ops.rms_norm, "impls", {})
    monkeypatch.setenv(cpu_kernels.SWITCH, "0")
    cpu_kernels.install()
    assert not ir.ops.rms_norm.impls
