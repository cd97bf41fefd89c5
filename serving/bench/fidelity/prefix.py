"""Prefix caching's reuse of a prompt: leading whole blocks shared with one seen before.

Its answers are an exact prefill's, by construction: it only ever reuses KV that this very prompt would compute. What
sets it apart from `exact` is how much it computes, and that depends on what was seen before:

| history | what was seen once |
|---|---|
| same | the same prompt |
| another order | the same pages and question, in another order: the mean over the other orders (24 sampled of more) |
| other text | the same pages in the same order, behind a system prompt that this one does not have |

The main tables count `another order`: what the other arms are asked to serve from KV of the pages alone.
"""

from __future__ import annotations

import statistics
from functools import lru_cache
from itertools import takewhile

from kvstore.operator.patch import orderings
from serving.bench.fidelity.reader import Prompt

HISTORIES = ("same", "another order", "other text")
BLOCK = 16  # tokens; what vLLM takes by default on GPUs


def cached(prompt: Prompt, leading: int, block: int) -> int:
    """Tokens that prefix caching in `block`s takes from a prompt with the same `leading` pages.

    With all of them the same, the prompts are the same. The last token is computed in any case: it predicts what
    follows. Of the first page that differs its opening delimiters are still the same.
    """
    last = len(prompt) - len(prompt.answer)  # the answer is behind the prompt
    if leading == len(prompt.places):
        return last // block * block
    place = prompt.places[leading]
    return (place.start + place.page.span.first) // block * block


def computed(prompt: Prompt, history: str) -> float:
    """The share of the tokens of a prompt's pages that prefix caching computes, 0 to 1."""
    pages = len(prompt.places)
    if history == "other text":
        return 1.0
    leading = (pages,) if history == "same" else _agreeing(pages)
    return statistics.mean(_share_of_pages(prompt, cached(prompt, count, BLOCK)) for count in leading)


@lru_cache
def _agreeing(pages: int) -> tuple[int, ...]:
    """Number of leading pages that each other order shares with the present one."""
    others = [order for order in orderings(range(pages)) if order != tuple(range(pages))]
    return tuple(sum(1 for _ in takewhile(lambda at: at[0] == at[1], enumerate(order))) for order in others)


def _share_of_pages(prompt: Prompt, reused: int) -> float:
    left = sum(max(0, place.stop - max(place.start, reused)) for place in prompt.places)
    return left / sum(place.stop - place.start for place in prompt.places)
