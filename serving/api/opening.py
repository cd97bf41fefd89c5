"""Openings of prompts as tokens: a fixed prefix as the chat template writes it.

An opening ends before a conversation's first word.
Patches of sets are formed behind an opening (`prefill_workers.patches.orbit_patches`): no prompt begins with the fixed
prefix's own tokens.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Sequence
from itertools import takewhile
from typing import TYPE_CHECKING, Any

from blake3 import blake3

from serving.api.prefix import TokenCache, leads

if TYPE_CHECKING:
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest

_TURN = {"role": "user", "content": ""}


class Openings:
    """Cache of openings, by tenant.

    Args:
        render: a request to its prompt's token ids, as conversations are rendered.
    """

    def __init__(self, render: Callable[[ChatCompletionRequest], Awaitable[tuple[int, ...]]]) -> None:
        self._render = render
        self._kept = TokenCache()

    async def token_ids(
        self, tenant: str, prefix: str, request: ChatCompletionRequest, messages: Sequence[Any]
    ) -> tuple[int, ...]:
        """Token ids of an empty conversation behind a request's fixed prefix.

        A prompt has the first of them in common. `messages` are the request's, not resolved. Variables that the request
        gives to the template are left out: they are the tenant's, and the opening of an empty prefix is everybody's. ()
        where the template takes no such conversation.
        """
        leading = [_words_of(message) for message in takewhile(leads, messages)]
        key = blake3(json.dumps([prefix, leading]).encode(errors="surrogatepass")).digest()
        asked = {"messages": [*leading, _TURN], "chat_template_kwargs": None, "continue_final_message": False}

        async def rendered() -> tuple[int, ...]:
            try:
                return await self._render(request.model_copy(update=asked))
            except (ValueError, TypeError):  # of its template: requests are told by their own rendering
                return ()

        return await self._kept.get((tenant, key), rendered)


def _words_of(message: Any) -> Any:
    """A message of the fixed prefix without images and documents."""
    content = message.get("content")
    if isinstance(content, list):
        content = [part for part in content if isinstance(part, dict) and part.get("type") == "text"]
    return {"role": message["role"], "content": content}


def token_ids_of(rendered: Any) -> tuple[int, ...]:
    """Token ids of what vLLM's `OnlineRenderer.render_chat` answers; () of an error."""
    if not isinstance(rendered, tuple):
        return ()
    _, (prompt,) = rendered
    return tuple(prompt["prompt_token_ids"])
