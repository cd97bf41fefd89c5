"""Fixed prefixes as tokens: what keys the patches of chunks that follow one."""

from __future__ import annotations

import asyncio
import json
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING, Any

from blake3 import blake3

if TYPE_CHECKING:
    from concurrent.futures import Executor

    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionToolsParam

LEADING_ROLES = ("system", "developer")  # of messages that a fixed prefix takes up, at a conversation's beginning
_ENTRY = 16  # token ids that an entry's key and tuple weigh as much as


def leads(message: Any) -> bool:
    """True for a message of the fixed prefix, if all before it are."""
    return message.get("role") in LEADING_ROLES


def tools_text(tools: Iterable[ChatCompletionToolsParam]) -> str:
    """A request's tools as its fixed prefix begins with them."""
    return json.dumps([tool.model_dump() for tool in tools], sort_keys=True)


def with_tools_of_requests(prefix: str) -> str:
    """Rewrite the JSON array of tools that a fixed prefix begins with as `tools_text` does.

    A prefix without one is left as it is.
    """
    tools, rest = split_tools(prefix)
    return "\n".join([tools_text(tools), *([rest] if rest else [])]) if tools else prefix


def split_tools(prefix: str) -> tuple[list[ChatCompletionToolsParam], str]:
    """The tools that a fixed prefix begins with, as a JSON array in lines of its own; the rest.

    No tools where it begins with something else.
    """
    if not prefix.startswith("["):
        return [], prefix
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionToolsParam

    try:
        found, end = json.JSONDecoder().raw_decode(prefix)
        tools = [ChatCompletionToolsParam.model_validate(tool) for tool in found]
    except ValueError:
        return [], prefix
    rest = prefix[end:]
    return (tools, rest[1:]) if tools and rest[:1] in ("", "\n") else ([], prefix)


class TokenCache:
    """LRU cache of token ids, by tenant and name.

    Speed must not tell of others' prompts.

    Args:
        limit: token ids that are kept.
    """

    def __init__(self, limit: int = 1 << 20) -> None:
        self._limit = limit
        self._kept: OrderedDict[tuple[str, bytes], tuple[int, ...]] = OrderedDict()
        self.held = 0  # token ids, and what entries weigh besides

    def __len__(self) -> int:
        return len(self._kept)

    async def get(self, key: tuple[str, bytes], make: Callable[[], Awaitable[tuple[int, ...]]]) -> tuple[int, ...]:
        """The token ids that are kept under a key, or else those that are made now."""
        known = self._kept.get(key)
        found = await make() if known is None else known
        if key not in self._kept:
            self.held += len(found) + _ENTRY
        self._kept[key] = found
        self._kept.move_to_end(key)
        while self.held > self._limit:
            _, forgotten = self._kept.popitem(last=False)
            self.held -= len(forgotten) + _ENTRY
        return found


class Prefixes:
    """Cache of tokenised fixed prefixes, by tenant.

    Args:
        executor: whose threads tokenise, of a tokenizer of vLLM's those that it has copies of itself for.
        limit: token ids that are kept; the least recently used prefixes go first.
    """

    def __init__(self, tokenizer: Any, executor: Executor | None = None, limit: int = 1 << 20) -> None:
        self._tokenizer, self._executor = tokenizer, executor
        self._kept = TokenCache(limit)

    async def token_ids(self, tenant: str, text: str) -> tuple[int, ...]:
        """A prefix's own tokens.

        One that is not known is tokenised in a thread: it may be as long as a prompt.
        """
        key = tenant, blake3(text.encode(errors="surrogatepass")).digest()
        return await self._kept.get(key, partial(self._tokenised, text))

    async def _tokenised(self, text: str) -> tuple[int, ...]:
        encode = partial(self._tokenizer.encode, text, add_special_tokens=False)
        return tuple(await asyncio.get_running_loop().run_in_executor(self._executor, encode))
