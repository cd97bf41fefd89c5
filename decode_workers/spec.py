"""Specification of a decode engine."""

from __future__ import annotations

from dataclasses import dataclass

from infra.vllm_arguments import ModelEngineSpec


@dataclass(frozen=True)
class DecodeSpec(ModelEngineSpec):
    """A decode engine.

    Attributes:
        max_num_seqs: sequences of one step at most.
        reasoning_parser: vLLM's; grammars begin behind what it takes for reasoning.
        hands_back: whether prefill workers may read the KV of answers, see `infra.hand_back`.
    """

    max_num_seqs: int = 16
    reasoning_parser: str = ""
    hands_back: bool = False
