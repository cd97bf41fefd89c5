"""The decode engine: stock vLLM with the stock NixlConnector, text-only.

It is given plain token ids whose KV a prefill worker has linked, pulls that KV over NIXL and generates. It never sees
an image: the linker has shifted the keys so that the last prompt token's position equals its index.

vLLM computes a prompt's last token even if the KV of all of it was pulled. So the answer's first token, if the prefill
worker has drawn it, is given as the prompt's last: the slot that is pulled for it holds nothing yet.

Two things that are harmless in an ordinary engine would be wrong here, and are ruled out:
- prefix caching: placeholder token ids of different images are equal, their KV is not;
- preemption: vLLM would recompute a preempted prompt from its token ids, without its images. `Admission` therefore
  lets a sequence in only when the pool has room for its prompt and everything it may still generate.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import count
from operator import attrgetter
from typing import Any

import psutil
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.inputs import TokensPrompt
from vllm.outputs import RequestOutput
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.engine import EngineCoreOutput
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError

from decode_workers.admission import Admission
from decode_workers.spec import DecodeSpec
from infra.gpu import uses_gpu
from infra.hand_back import HELD_SECONDS, is_asked, is_offer, offered
from infra.kv_window import held_tokens, refusal, window_of
from infra.pace import Pace
from infra.vllm_arguments import hand_off_arguments
from infra.vllm_env import BLOCK_SIZE

logger = logging.getLogger(__name__)

_PULL_SECONDS = 10.0  # for pulls to begin, and for small ones to end
_PULLED_A_SECOND = 1000  # tokens, until a prefill worker's pace is known: of the largest models a third of a GB
_PULL_MARGIN = 10.0  # times what a pull is expected to take, until it has ended
_TELLING_TOKENS = 512.0  # shorter prompts' pulls take what a step and a notification take
_LOOK_SECONDS = 2.0  # between looks whether it has ended


class NonFiniteLogits(RuntimeError):
    """NaN among the logits that an answer's next token would be drawn from."""

    def __init__(self) -> None:
        super().__init__("the model gave logits that are not numbers")


@dataclass(frozen=True)
class DecodeStats:
    """A snapshot of a decode worker, for routing, health and tests."""

    running: int  # sequences
    waiting: int  # sequences
    blocks_reserved: int
    blocks_awaited: int  # by requests that wait for room
    blocks_total: int


def engine_arguments(spec: DecodeSpec) -> dict[str, Any]:
    """vLLM's arguments of a decode engine."""
    on_gpu = uses_gpu()
    hand_off = hand_off_arguments()
    connector = hand_off["kv_transfer_config"]
    if not on_gpu:
        connector.kv_connector = "EliminatingConnector"
        connector.kv_connector_module_path = "decode_workers.elimination"
    elif spec.hands_back:
        connector.kv_connector, connector.kv_connector_module_path = "HandBackConnector", "decode_workers.hand_back"
    if spec.hands_back:
        connector.kv_connector_extra_config["decoder_kv_blocks_ttl"] = HELD_SECONDS
    return {
        **spec.arguments(),
        **hand_off,
        "enforce_eager": not on_gpu,
        "max_num_seqs": spec.max_num_seqs,
        "reasoning_parser": spec.reasoning_parser,
        "language_model_only": True,
        **({} if on_gpu else {"worker_cls": "decode_workers.cpu_worker.SharingCPUWorker"}),
    }


class DecodeEngine:
    """One stock vLLM engine behind `Admission`."""

    def __init__(self, spec: DecodeSpec) -> None:
        self._engine = AsyncLLM.from_engine_args(AsyncEngineArgs(**engine_arguments(spec)))
        fail_on_nan(self._engine.output_processor)
        cache = self._engine.vllm_config.cache_config
        blocks, block_size = cache.num_gpu_blocks, cache.block_size
        assert blocks is not None
        assert block_size is not None
        self.admission = Admission(blocks - 1, block_size)  # vLLM keeps block 0 as its null block
        self.max_model_len = min(self._engine.model_config.max_model_len, self.admission.longest)
        self.progressed = time.monotonic()  # when the engine last gave an output
        self._canaries = count()
        self._pulls = Pace(_TELLING_TOKENS)  # tokens, by prefill engine: all tokens of a model have as many bytes of KV
        self._offers: dict[str, asyncio.Event] = {}  # of answers' KV, by vLLM's name of the request: none needs it now

    async def generate(
        self,
        token_ids: list[int],
        transfer: dict[str, Any] | None,
        params: SamplingParams,
        request_id: str,
        **options: Any,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Stream vLLM's outputs for a linked prompt.

        Args:
            transfer: the prefill worker's `kv_transfer_params`; None computes the (text-only) prompt here.
            options: what vLLM's `generate` takes besides (priority, reasoning state, trace headers).

        The last output of an answer that is to be handed back offers its KV (`kv_transfer_params`); its blocks count
        until `end_hand_back` is called.

        Raises:
            NonFiniteLogits: NaN among a step's logits; that step's token is not given out.
            ValueError: the pool could never hold it, fewer blocks are offered than the prompt has, or a window is asked
                for where attention knows none.
        """
        params = params.clone()
        whole = transfer is not None and params.output_kind == RequestOutputKind.FINAL_ONLY
        if whole:  # of an answer that vLLM gives whole nothing would say that its KV has been pulled
            params.output_kind = RequestOutputKind.DELTA
        if transfer is not None:
            source = {**transfer, "remote_block_ids": _blocks_of(len(token_ids), transfer)}
            params.extra_args = {**(params.extra_args or {}), "kv_transfer_params": source}
            # Else vLLM pulls nothing, and computes the prompt from its ids alone.
            params.skip_reading_prefix_cache = False
        budget = params.max_tokens if params.max_tokens is not None else self.max_model_len - len(token_ids)
        longest = min(len(token_ids) + budget, self.max_model_len)
        held = held_tokens(len(token_ids), longest, window_of(transfer), self.admission.block_size)
        admitted = False
        try:
            if transfer is not None:
                _check(len(token_ids), transfer)
            async with self.admission.admit(held, params.n or 1) as room:
                admitted = True
                if transfer is not None:  # a request may be aborted while its KV is pulled: vLLM holds the blocks
                    room.until = partial(self._pulls_ended, _source(transfer), len(token_ids) * (params.n or 1))
                prompt, pulled, began = TokensPrompt(prompt_token_ids=token_ids), set[int](), time.monotonic()
                answer: RequestOutput | None = None
                try:
                    async for output in self._engine.generate(prompt, params, request_id, **options):
                        self.progressed = time.monotonic()
                        pulled.update(choice.index for choice in output.outputs)
                        if transfer is not None and room.until is not None and len(pulled) >= (params.n or 1):
                            tokens, seconds = len(token_ids) * len(pulled), time.monotonic() - began
                            self._pulls.learn(_source(transfer), tokens, seconds)
                            room.until = None
                        if output.finished and is_offer(output.kv_transfer_params):
                            room.until = self._offered(output)
                        if not whole:
                            yield output
                        else:
                            answer = _joined(answer, output)
                            if answer.finished:
                                yield answer
                except Exception as error:  # vLLM's: it ended the request itself
                    room.until = None
                    if isinstance(error, EngineGenerateError) and isinstance(error.__cause__, NonFiniteLogits):
                        if is_asked(transfer):  # and holds the answer, if it was the last token's
                            room.until = partial(asyncio.sleep, HELD_SECONDS + _LOOK_SECONDS)
                        raise error.__cause__ from None
                    raise
        finally:
            if transfer is not None and not admitted:
                await self.abandon(transfer, params.n or 1)

    def _offered(self, output: RequestOutput) -> Callable[[], Coroutine[Any, Any, None]]:
        """Complete the offer of an answer's KV; returns what waits until vLLM has freed it."""
        assert output.kv_transfer_params is not None
        output.kv_transfer_params = offered(output.kv_transfer_params, self.admission.block_size)
        name = str(output.kv_transfer_params["remote_request_id"])
        ended = self._offers[name] = asyncio.Event()
        return partial(self._handed_back, name, ended)

    async def _handed_back(self, name: str, ended: asyncio.Event) -> None:
        try:
            async with asyncio.timeout(HELD_SECONDS + _LOOK_SECONDS):  # by then vLLM has freed it by itself
                await ended.wait()
        except TimeoutError:
            logger.info("nobody has read the KV of answer %s, which was held for %d s", name, HELD_SECONDS)
        finally:
            del self._offers[name]
        for _ in range(2):  # vLLM's core answers between two steps, and frees in a step what it was told of before
            with suppress(EngineDeadError):
                await self.all_blocks_free()

    def end_hand_back(self, request: str) -> None:
        """Note that vLLM was told of an answer that it is read, or never will be; of others nothing."""
        if (ended := self._offers.get(request)) is not None:
            ended.set()

    async def _pulls_ended(self, source: str, tokens: int) -> None:
        """Wait until vLLM holds no blocks for abandoned pulls of so many tokens.

        They may have just begun.

        That is until it holds none at all, or so long that every pull has ended, by the pace of those from the same
        source.
        """
        expected = self._pulls.seconds(source, tokens)
        longest = tokens / _PULLED_A_SECOND if expected is None else _PULL_MARGIN * expected
        until = time.monotonic() + _PULL_SECONDS + longest
        while time.monotonic() < until:
            await asyncio.sleep(_LOOK_SECONDS)
            with suppress(EngineDeadError):
                if await self.all_blocks_free():
                    return

    async def abandon(self, transfer: dict[str, Any], readers: int) -> None:
        """Let the prefill worker free KV that `readers` sequences of this engine will never pull."""
        for reader in range(readers):
            name = f"abandon-{transfer['remote_request_id']}-{reader}"
            await self._engine.notify_kv_transfer_request_rejected(name, transfer)

    async def compute_one_token(self) -> None:
        """Generate one token, as proof that the engine computes.

        While the pool is full its core has to answer instead: blocks are reserved by others.
        """
        if not self.admission.has_room(2):
            await self.all_blocks_free()
            return
        params = SamplingParams(max_tokens=1, temperature=0, detokenize=False, ignore_eos=True)
        async for _ in self.generate([1], None, params, f"canary-{next(self._canaries)}"):
            pass

    def cpu_seconds(self) -> float:
        """CPU time that the engine core's processes have spent, by which a long step on a CPU shows."""
        seconds = 0.0
        for process in self._engine.engine_core.resources.engine_manager.processes:
            with suppress(psutil.Error):
                times = psutil.Process(process.pid).cpu_times()
                seconds += times.user + times.system
        return seconds

    async def check_health(self) -> None:
        """Raise when the engine core died."""
        await self._engine.check_health()

    @property
    def is_alive(self) -> bool:
        """True while the engine core runs."""
        return not self._engine.errored

    def stats(self) -> DecodeStats:
        """Queue lengths and reserved blocks."""
        a = self.admission
        return DecodeStats(a.running, a.waiting, a.reserved, a.blocks_awaited, a.total)

    async def all_blocks_free(self) -> bool:
        """True if vLLM's own pool holds no KV block.

        Nothing else keeps one: prefix caching is off.
        """
        return await self._engine.reset_prefix_cache()  # refuses while any block is held; there is no cache to lose

    def shutdown(self) -> None:
        """Stop the engine core."""
        self._engine.shutdown()


def fail_on_nan(processor: Any) -> None:
    """Have an AsyncLLM's output processor end requests whose logits hold NaN.

    vLLM counts those (VLLM_COMPUTE_NANS_IN_LOGITS) and gives out the token all the same, or lets the whole engine die.
    """
    process = processor.process_outputs

    def process_finite(outputs: list[EngineCoreOutput], *arguments: Any, **options: Any) -> Any:
        broken = [output for output in outputs if output.num_nans_in_logits]
        for output in broken:
            state = processor.request_states.get(output.request_id)
            if state is not None:
                state.queue.put(NonFiniteLogits())  # whoever waits for the queue aborts the request
        sound = [output for output in outputs if not output.num_nans_in_logits] if broken else outputs
        return process(sound, *arguments, **options)

    processor.process_outputs = process_finite


def _joined(answer: RequestOutput | None, more: RequestOutput) -> RequestOutput:
    """vLLM's outputs so far with the new one appended, choices in order."""
    if answer is None:
        return more
    answer.add(more, aggregate=True)
    answer.outputs.sort(key=attrgetter("index"))
    return answer


def _source(transfer: Mapping[str, Any]) -> str:
    """The prefill engine that a transfer comes from."""
    return str(transfer["remote_engine_id"])


def _check(tokens: int, transfer: Mapping[str, Any]) -> None:
    """Raise ValueError for a transfer that would end the engine core instead of its request, or be misread."""
    needed = -(-tokens // transfer[BLOCK_SIZE])
    if any(len(blocks) < needed for blocks in transfer["remote_block_ids"]):
        raise ValueError(f"{tokens} tokens need {needed} KV blocks, and fewer are offered")
    if window_of(transfer) is not None and (reason := refusal()) is not None:
        raise ValueError(reason)


def _blocks_of(tokens: int, transfer: Mapping[str, Any]) -> tuple[list[int], ...]:
    """The blocks of each group that hold a prompt's tokens.

    Of more than it needs vLLM takes the last ones.

    They are of the prefill worker's size, which may be another than this one's, as in a rolling update that changes it.
    """
    count = -(-tokens // transfer[BLOCK_SIZE])
    return tuple(list(blocks[:count]) for blocks in transfer["remote_block_ids"])
