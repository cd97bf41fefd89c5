"""Arithmetic of fixed-point elimination (elastic_cache.md section 3.3).

    prompt ............... | gap: dropped, whole blocks | the last `window` tokens and up to a block more

The truncation point N_tl is the first block's end behind the prompt. What is dropped follows from prompt, generated
tokens and window alone, so that scheduler, attention and admission agree on it without a word. Without torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from infra.vllm_env import is_cpu_build

_WINDOW = "elimination_window"  # in `kv_transfer_params`


def refusal() -> str | None:
    """Reason why decode workers of this installation take no windows; None if they do.

    See `decode_workers/README.md` for what GPUs lack.
    """
    return None if is_cpu_build() else "elastic.window: decode workers on GPUs keep all KV of an answer"


def window_parameter(window: int) -> dict[str, int]:
    """`kv_transfer_params` of a request whose answer's KV is a window."""
    return {_WINDOW: window}


def window_of(transfer: Mapping[str, Any] | None) -> int | None:
    """Window in `kv_transfer_params`; None: everything is kept."""
    window = (transfer or {}).get(_WINDOW)
    return None if window is None else int(window)


def gap(prompt: int, computed: int, window: int, block_size: int) -> tuple[int, int]:
    """Blocks [first, stop) of a sequence that hold nothing but dropped tokens.

    `computed`: tokens with KV, before the one that attends.
    """
    first = -(-prompt // block_size)
    return first, max(first, max(prompt, computed - window) // block_size)


def dropped(prompt: int, generated: int, window: int, block_size: int) -> int:
    """Entries that an answer of so many tokens has dropped at its end; the last token has none."""
    first, stop = gap(prompt, prompt + max(0, generated - 2), window, block_size)
    return (stop - first) * block_size


def held_tokens(prompt: int, longest: int, window: int | None, block_size: int) -> int:
    """Tokens whose blocks a sequence of up to `longest` tokens holds at most at once."""
    if window is None:
        return longest
    blocks = -(-prompt // block_size) + -(-window // block_size) + 1
    return min(longest, blocks * block_size)
