"""Outputs of a request within its tenant's limit of tokens and before its deadline."""

from __future__ import annotations

import asyncio
import time
import weakref
from collections import Counter
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing, asynccontextmanager

from vllm.outputs import RequestOutput
from vllm.sampling_params import RequestOutputKind, SamplingParams

from serving.frontend.errors import DeadlineExceeded
from serving.frontend.rate_limits import RateLimits
from serving.frontend.report import RequestTrace


def metered(
    outputs: AsyncGenerator[RequestOutput, None],
    given: int,
    most: int,
    params: SamplingParams,
    trace: RequestTrace,
    limits: RateLimits,
) -> AsyncGenerator[RequestOutput, None]:
    """Outputs whose tokens count against a tenant's limit: at first all that there may be.

    Prompts of later rounds (`serving.frontend.rounds`) are charged as they come: an answer is not cut for them.

    Args:
        outputs: of all choices.
        given: tokens of the prompt.
        most: tokens of a choice.
        params: of the request.
        trace: of the request.
        limits: of tenants.

    Raises:
        RateLimited: the limit is used up; at once, before an output is asked for.
    """
    reserved = given + most * (params.n or 1)
    limits.take(trace.tenant, "tokens", reserved)
    begun: list[Callable[[], object]] = []
    charged = _charged(outputs, given, reserved, params.output_kind == RequestOutputKind.DELTA, trace, limits, begun)
    # Of several prompts one may be refused before the others begin: what never begins has no `finally`.
    unbegun = weakref.finalize(charged, limits.give, trace.tenant, "tokens", reserved)
    unbegun.atexit = False
    begun.append(unbegun.detach)
    return charged


async def _charged(
    outputs: AsyncGenerator[RequestOutput, None],
    given: int,
    reserved: int,
    in_deltas: bool,
    trace: RequestTrace,
    limits: RateLimits,
    begun: list[Callable[[], object]],
) -> AsyncGenerator[RequestOutput, None]:
    begun.pop()()
    said, charged = Counter[int](), given
    try:
        async with aclosing(outputs):
            async for output in outputs:
                if trace.tool is not None and (more := trace.tool.log.prompt_tokens - charged) > 0:
                    limits.charge(trace.tenant, "tokens", more)
                    charged += more
                for choice in output.outputs:
                    before = said[choice.index] if in_deltas else 0
                    said[choice.index] = before + len(choice.token_ids)
                yield output
    finally:
        limits.give(trace.tenant, "tokens", max(0, reserved - given - said.total()))


@asynccontextmanager
async def before_deadline(received: float, seconds: float | None) -> AsyncGenerator[None, None]:
    """Run a block no longer than until the deadline of its request; arguments as of `in_time`.

    Raises:
        DeadlineExceeded: the block had not ended by then, and was cancelled.
    """
    due = None
    if seconds is not None:
        due = asyncio.get_running_loop().time() + received + seconds - time.perf_counter()
    try:
        async with asyncio.timeout_at(due) as limit:
            yield
    except TimeoutError:
        if seconds is None or not limit.expired():
            raise
        raise DeadlineExceeded(seconds) from None


async def in_time(
    outputs: AsyncGenerator[RequestOutput, None], received: float, seconds: float | None
) -> AsyncGenerator[RequestOutput, None]:
    """Outputs until the deadline of their request.

    Args:
        outputs: of the request.
        received: when the request came, by `time.perf_counter`.
        seconds: from then to the last output; None: no deadline.

    Raises:
        DeadlineExceeded: the next one does not come before it.
    """
    async with aclosing(outputs):
        while True:
            async with before_deadline(received, seconds):
                output = await anext(outputs, None)
            if output is None:
                return
            yield output
