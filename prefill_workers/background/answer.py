"""An answer behind its prompt, whose KV the next turn of its chat begins with."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from prefill_workers.block_index import Forms
from prefill_workers.prefix_digests import PrefixChain, prefix_chain
from prefill_workers.protocol import LinkRequest


@dataclass(frozen=True)
class Answer:
    """Answer behind its prompt.

    `request` has the tokens of both, of which the first `prompt` are the prompt's, the first one at position `frame`.
    `forms`: how the prompt's chunks were linked, which the answer was generated behind.
    """

    request: LinkRequest
    prompt: int
    frame: int
    forms: Forms
    block_size: int

    @cached_property
    def chain(self) -> PrefixChain:
        """Digests of the beginnings of both."""
        request = self.request
        return prefix_chain(request.tenant, request.token_ids, request.chunks, self.block_size)

    @cached_property
    def tokens(self) -> int:
        """Tokens up to the last place where a later prompt may go on."""
        return self.chain.ends[-1] if self.chain.ends else 0

    @cached_property
    def known(self) -> int:
        """Tokens up to the last such place in the prompt."""
        behind = self.chain.index(self.prompt + 1)
        return self.chain.ends[behind - 1] if behind else 0
