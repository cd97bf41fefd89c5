"""CUDA graphs that vLLM captured of forwards, replayed for batches of as many tokens.

vLLM captures what lies between attentions (PIECEWISE), over buffers of its model runner. A replay runs none of the
model's Python: hooks are not called, and methods that were replaced are not seen.

Checked on vLLM 0.32.0's first model runner.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from vllm.config import CUDAGraphMode


def captured_as(runner: Any, tokens: int) -> dict[str, Any] | None:
    """Arguments of a forward's context that replay the graph of so many tokens; None: none.

    Of a model without images vLLM captures token ids as its input, where we give embeddings.
    """
    if not runner.supports_mm_inputs or runner.model.requires_raw_input_tokens:
        return None
    mode, descriptor = runner.cudagraph_dispatcher.dispatch(tokens)
    if mode != CUDAGraphMode.PIECEWISE or descriptor.num_tokens != tokens:
        return None
    return {"cudagraph_runtime_mode": mode, "batch_descriptor": descriptor}


def in_static_buffers(runner: Any, positions: Tensor, embeddings: Tensor) -> tuple[Tensor, Tensor]:
    """Positions and embeddings [tokens, hidden], copied to where a graph reads them."""
    tokens = len(embeddings)
    places = runner.mrope_positions.gpu[:, :tokens] if runner.uses_mrope else runner.positions[:tokens]
    return places.copy_(positions), runner.inputs_embeds.gpu[:tokens].copy_(embeddings)
