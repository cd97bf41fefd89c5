"""Hand-back of an answer's KV: what a decode engine is asked, and what it offers.

A decode engine that is asked to holds the blocks of an answer that has ended, until the prefill worker that linked the
prompt has read them, or `HELD_SECONDS` have passed. Without torch.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from infra.vllm_env import BLOCK_SIZE

HELD_SECONDS = 30  # for a prefill worker to read, between two forwards; one that has died never will
_ASKED, _UNTIL = "hands_back", "held_until"  # in `kv_transfer_params`
_MARGIN_SECONDS = 10  # by which hosts' clocks may differ


def asking(transfer: Mapping[str, Any]) -> dict[str, Any]:
    """`kv_transfer_params` of a linked prompt whose answer's KV is wanted back."""
    return {**transfer, _ASKED: True}


def is_asked(transfer: Mapping[str, Any] | None) -> bool:
    """True if `kv_transfer_params` ask for the answer's KV."""
    return bool((transfer or {}).get(_ASKED))


def is_offer(transfer: Mapping[str, Any] | None) -> bool:
    """True if vLLM's `kv_transfer_params` of an answer that has ended name blocks to be read."""
    return any((transfer or {}).get("remote_block_ids") or ())


def offered(transfer: Mapping[str, Any], block_size: int) -> dict[str, Any]:
    """Offer of an answer that has just ended: vLLM's, block size, and until when it is held."""
    return {**transfer, BLOCK_SIZE: block_size, _UNTIL: time.time() + HELD_SECONDS}


def is_held(offer: Mapping[str, Any]) -> bool:
    """True while the blocks on offer are still the answer's.

    Afterwards they may be another request's.
    """
    return time.time() < float(offer[_UNTIL]) - _MARGIN_SECONDS
