"""Specification of a prefill or vision engine."""

from __future__ import annotations

from dataclasses import dataclass

from infra.vllm_arguments import ModelEngineSpec


@dataclass(frozen=True)
class EngineSpec(ModelEngineSpec):
    """A prefill engine, or with `encoder_only` a vision engine.

    Attributes:
        max_batch_tokens: tokens of one forward at most.
        hand_off: True: decode engines pull KV from it.
        device_bytes: GPU memory for copies of stored chunks, of one rank; several keep none.
        buckets: lengths, in tokens, to which forwards are padded, and on a GPU captured as graphs.
    """

    max_batch_tokens: int = 4096
    hand_off: bool = True
    encoder_only: bool = False
    device_bytes: int = 0
    buckets: tuple[int, ...] = ()
