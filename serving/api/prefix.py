"""Fixed prefixes as tokens: what keys the patches of chunks that follow one."""

from __future__ import annotations

import asyncio
import json
from collections import OrderedDict
from collections.abc import Iterable
from functools import partial
from typing import TYPE_CHECKING, Any

from blake3 import blake3

if TYPE_CHECKING:
    from concurrent.futures import Executor

    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionToolsParam

_ENTRY = 16  # token ids that an entry's key and tuple weigh as much as


def tools_text(tools: Iterable[ChatCompletionToolsParam]) -> str:
    """A request's tools as its fixed prefix begins with them."""
    return json.dumps([tool.model_dump() for tool in tools], sort_keys=True)


def with_tools_of_requests(prefix: str) -> str:
    """Rewrite the JSON array of tools that a fixed prefix begins with as `tools_text` does.

    A prefix without one is left as it is.
    """
    if not prefix.startswith("["):
        return prefix
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionToolsParam

    try:
        found, end = json.JSONDecoder().raw_decode(prefix)
        tools = [ChatCompletionToolsParam.model_validate(tool) for tool in found]
    except ValueError:
        return prefix
    rest = prefix[end:]
    return tools_text(tools) + rest if tools and rest[:1] in ("", "\n") else prefix


class Prefixes:
    """Cache of tokenised fixed prefixes, by tenant.

    Speed must not tell of others' prompts.

    Args:
        executor: whose threads tokenise, of a tokenizer of vLLM's those that it has copies of itself for.
        limit: token ids that are kept; the least recently used prefixes go first.
    """

    def __init__(self, tokenizer: Any, executor: Executor | None = None, limit: int = 1 << 20) -> None:
        self._tokenizer, self._executor, self._limit = tokenizer, executor, limit
        self._kept: OrderedDict[tuple[str, bytes], tuple[int, ...]] = OrderedDict()
        self._held = 0

    async def token_ids(self, tenant: str, text: str) -> tuple[int, ...]:
        """A prefix's own tokens.

        One that is not known is tokenised in a thread: it may be as long as a prompt.
        """
        key = tenant, blake3(text.encode(errors="surrogatepass")).digest()
        known = self._kept.get(key)
        found = await self._tokenised(text) if known is None else known
        if key not in self._kept:
            self._held += len(found) + _ENTRY
        self._kept[key] = found
        self._kept.move_to_end(key)
        while self._held > self._limit:
            _, forgotten = self._kept.popitem(last=False)
            self._held -= len(forgotten) + _ENTRY
        return found

    async def _tokenised(self, text: str) -> tuple[int, ...]:
        encode = partial(self._tokenizer.encode, text, add_special_tokens=False)
        return tuple(await asyncio.get_running_loop().run_in_executor(self._executor, encode))
