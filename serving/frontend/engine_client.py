"""The engine that vLLM's OpenAI server talks to: ours.

vLLM's serving code (chat templates, tools, logprobs, stop, n, structured output, streaming, usage) needs one thing from
an engine: `generate`, from a rendered prompt to a stream of outputs. Here that is the way through the roles:

    rendered prompt → segments → link on a prefill worker → NIXL → stock decode engine → outputs
                          ├ pixels needed? → vision encoder → link again with embeddings
                          └ first token → output (see `answer_stream`)

The prefill worker loads what is stored from the moment that the images are known (`prefetch`), while the prompt
is rendered and its other images are encoded (mpic.md §3.2). It answers with the images that are not stored: those are
encoded as soon as they are processed, and the link comes with them.

The roles are reached through `Roles`: Ray Serve handles in the application, plain objects in tests.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, aclosing, closing, nullcontext
from contextvars import Context
from dataclasses import replace
from functools import partial
from typing import Any, Literal
from urllib.parse import quote

from vllm.config import VllmConfig
from vllm.exceptions import GenerationError, RetryableRequestError, VLLMValidationError
from vllm.outputs import RequestOutput
from vllm.renderers import renderer_from_config
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.engine.input_processor import InputProcessor

from infra.hand_back import asking
from infra.kv_window import refusal, window_of
from kvstore.forget import ForgetRegistry
from prefill_workers.modes import Mode
from prefill_workers.protocol import (
    Compaction,
    CompactionRefused,
    LinkRequest,
    LinkResult,
    Overloaded,
    PixelsNeeded,
    PrefetchRequest,
    PromptTooLarge,
)
from prefill_workers.settings import PrefillSettings
from serving.access_log import AccessLog
from serving.errors import NoReplica, RoleUnavailable
from serving.frontend.answer_stream import AnswerStream, sampling_of
from serving.frontend.bounded_outputs import in_time, metered
from serving.frontend.documents import Document
from serving.frontend.engine_over_roles import EngineOverRoles
from serving.frontend.errors import InvalidRequest, OverloadedError
from serving.frontend.fair_queue import FairQueue
from serving.frontend.link_lease import LinkLease
from serving.frontend.link_report import note_link
from serving.frontend.prompt_segments import Delimiters, Segments, image_delimiters, segment
from serving.frontend.rate_limits import RateLimits
from serving.frontend.report import (
    LOAD_BEARING,
    OrbitReport,
    RequestTrace,
    current_trace,
)
from serving.frontend.roles import Roles
from serving.frontend.rounds import in_rounds
from serving.frontend.single_flight_encoder import SingleFlightEncoder
from serving.placement.orderer import PatchAwareOrderer

logger = logging.getLogger(__name__)

MOST_CHOICES = 128  # of one request, OpenAI's limit: each pulls a prompt's KV for itself
_ANSWER_SECONDS = 0.01  # an answer to `prefetch` was on its way while the prompt was rendered


Answering = Callable[[], AbstractContextManager[Callable[[int], None]]]


def _uncounted() -> AbstractContextManager[Callable[[int], None]]:
    return nullcontext(lambda tokens: None)


async def _lacking_by_now(lacking: asyncio.Future[Collection[str]] | None) -> Collection[str]:
    """Images of which nothing is stored, if the worker tells that within a moment.

    A link would be told the same.
    """
    if lacking is None:
        return ()
    await asyncio.wait([lacking], timeout=_ANSWER_SECONDS)
    told = lacking.done() and not lacking.cancelled() and lacking.exception() is None
    return lacking.result() if told else ()


class LinkedEngineClient(EngineOverRoles):
    """vLLM's `EngineClient` over the roles."""

    access_log: AccessLog | None = None  # where requests are logged, if they are
    observe: Callable[[OrbitReport], None] | None = None  # told of every prompt's report at its end
    answering: Answering = staticmethod(_uncounted)  # around every answer, as `Metrics.answering`
    queue: FairQueue | None = None  # of answers, where tenants share the decode workers
    limits: RateLimits | None = None  # of tenants' tokens
    compaction = Compaction()  # of requests that ask for none
    request_timeout_s: float | None = None  # from a request's arrival to its last output; None: no deadline

    def __init__(
        self,
        vllm_config: VllmConfig,
        roles: Roles,
        compose_up_to: int = 0,
        prefill: PrefillSettings | None = None,
    ) -> None:
        """`prefill`: what the prefill workers were told; None: the defaults."""
        prefill = prefill or PrefillSettings()
        self.vllm_config = vllm_config
        self.model_config = vllm_config.model_config
        self.renderer = renderer_from_config(vllm_config)
        self.input_processor = InputProcessor(vllm_config, self.renderer)
        self._roles = roles
        self._encodings = SingleFlightEncoder(roles.encode)
        self._delimiters = Delimiters.of(self.model_config, self.renderer.get_tokenizer())
        self._image_delimiters = image_delimiters(self.renderer, self._delimiters)
        self.forgets = ForgetRegistry()
        orderer = PatchAwareOrderer(compose_up_to=compose_up_to, free_text=prefill.free)
        self.orderer = self.forgets.group().register(orderer)
        self._first_tokens, self._vocabulary = prefill.first_token, vllm_config.model_config.get_vocab_size()
        self._lease_seconds = prefill.lease_seconds
        self._keeps_answers = prefill.prefix_cache and prefill.keep_answers
        self._telling: set[asyncio.Task[None]] = set()

    # -- generate -----------------------------------------------------------------------------------------------------

    def generate(
        self,
        prompt: Any,
        sampling_params: SamplingParams,
        request_id: str,
        *,
        prompt_text: str | None = None,
        lora_request: Any = None,
        tokenization_kwargs: dict[str, Any] | None = None,
        trace_headers: Mapping[str, str] | None = None,
        priority: int = 0,
        data_parallel_rank: int | None = None,
        session_id: str | None = None,
        kv_hints: Any = None,
        reasoning_ended: bool | None = None,
        reasoning_parser_kwargs: dict[str, Any] | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Link and decode one rendered prompt.

        The request's trace is read now, not at the first output.

        Raises VLLMValidationError at once for what no engine takes: it would fail there, with everybody's forward.
        """
        if lora_request is not None:
            raise VLLMValidationError("LoRA adapters are not supported", parameter="model")
        if (sampling_params.n or 1) > MOST_CHOICES:
            raise VLLMValidationError(f"n must be at most {MOST_CHOICES}, not {sampling_params.n}", parameter="n")
        self._check_tokens(prompt)
        options = {
            "priority": priority,
            "reasoning_ended": reasoning_ended,
            "reasoning_parser_kwargs": reasoning_parser_kwargs,
        }
        trace = current_trace().of_prompt()
        outputs = self._observed(prompt, sampling_params, request_id, trace, options)
        if self.limits is not None:
            given = len(prompt["prompt_token_ids"])
            most = sampling_params.max_tokens
            if most is None:
                most = self.model_config.max_model_len - given
            outputs = metered(outputs, given, most, sampling_params, trace, self.limits)
        return in_time(outputs, trace.received, self.request_timeout_s)

    def _check_tokens(self, prompt: Any) -> None:
        """Check token ids as vLLM checks its own input.

        A prompt of text alone may name none but the model's own tokens.

        A tokenizer may know more, which stand for images: in an image's place nothing looks them up.
        """
        token_ids = prompt["prompt_token_ids"]
        self.input_processor._validate_prompt_len(len(token_ids), "decoder")
        self.renderer.validate_token_ids(token_ids)
        if prompt["type"] == "token" and (largest := max(token_ids)) >= self._vocabulary:
            raise VLLMValidationError(f"Token id {largest} is out of vocabulary", parameter="prompt")

    def prefetch(self, contents: Sequence[str], trace: RequestTrace) -> None:
        """Let a prefill worker load a prompt's stored chunks while the prompt is being rendered."""
        mode = Mode.parse(trace.options.mode)
        if contents and mode != Mode.OFF:
            request = PrefetchRequest(
                tuple(contents),
                self._image_delimiters,
                documents=frozenset(document.content for document in trace.documents),
                mode=mode,
                tenant=trace.tenant,
                prefix=trace.prefix_tokens,
                session=trace.session,
            )
            trace.lacking = asyncio.ensure_future(self._roles.prefetch(request))

    async def _observed(
        self, prompt: Any, params: SamplingParams, request_id: str, trace: RequestTrace, options: dict[str, Any]
    ) -> AsyncGenerator[RequestOutput, None]:
        """Outputs of one prompt, once it has a place among those of its request, and its tenant one for every choice.

        Its report is observed at the end.
        """
        place = nullcontext() if self.queue is None else self.queue.place(trace.tenant, params.n or 1)
        with self.answering() as generated:
            outputs = self._generate(prompt, params, request_id, trace, options)
            async with trace.places, place, aclosing(outputs):
                try:
                    async for output in outputs:
                        generated(sum(len(one.token_ids) for one in output.outputs))
                        yield output
                finally:
                    if self.observe is not None:
                        self.observe(trace.report)

    async def _generate(
        self, prompt: Any, params: SamplingParams, request_id: str, trace: RequestTrace, options: dict[str, Any]
    ) -> AsyncGenerator[RequestOutput, None]:
        segments = self.segments(prompt, trace.documents)
        if trace.tool is None:
            outputs = self._round(segments, params, request_id, trace, options)
        else:
            generate = partial(self._observed_round, first=trace, options=options)
            outputs = in_rounds(generate, trace.tool, segments, params, request_id, trace)
        async with aclosing(outputs):
            async for output in outputs:
                yield output

    async def _observed_round(
        self,
        segments: Segments,
        params: SamplingParams,
        request_id: str,
        trace: RequestTrace,
        *,
        first: RequestTrace,
        options: dict[str, Any],
    ) -> AsyncGenerator[RequestOutput, None]:
        """`_round`, observed at its end unless it is the first: that one's report is the answer's."""
        if trace is first and trace.tool is not None and trace.tool.is_forced:
            options = {**options, "reasoning_ended": True}  # else its grammar would hold behind a reasoning alone
        try:
            async with aclosing(self._round(segments, params, request_id, trace, options)) as outputs:
                async for output in outputs:
                    yield output
        finally:
            if trace is not first and self.observe is not None:  # the answer's has the chunks, and the one TTFT
                self.observe(trace.report.model_copy(update={"chunks": [], "ttft_ms": None}))

    def segments(self, prompt: Any, documents: Sequence[Document]) -> Segments:
        """A rendered prompt, cut into chunks and text."""
        return segment(prompt, self._delimiters, documents)

    @property
    def end_tokens(self) -> frozenset[int]:
        """Tokens that end a turn."""
        params = SamplingParams()
        eos = self.input_processor.renderer.get_eos_token_id()
        params.update_from_generation_config(self.input_processor.generation_config_fields, eos)
        return frozenset(params.all_stop_token_ids)

    async def _round(
        self, segments: Segments, params: SamplingParams, request_id: str, trace: RequestTrace, options: dict[str, Any]
    ) -> AsyncGenerator[RequestOutput, None]:
        """Outputs of one prompt, linked once."""
        mode = Mode.parse(trace.options.mode)
        request = LinkRequest(
            request_id=request_id,
            token_ids=segments.token_ids,
            chunks=segments.chunks,
            mode=mode,
            tenant=trace.tenant,
            prefix=trace.prefix_tokens,
            text=trace.options.text,
            readers=params.n or 1,
            sampling=sampling_of(params, self._vocabulary) if self._first_tokens else None,
            head=segments.head(trace.opening_tokens),
            session=trace.session,
            compaction=self._compaction(segments.token_ids, params, trace),
            load_bearing=trace.options.load_bearing,
        )
        request = replace(request, patched=self.orderer.patched(request))
        if request.load_bearing:
            trace.report.load_bearing = f"{LOAD_BEARING}/{quote(request_id, safe='')}"
        trace.mark("rendered")
        answer = AnswerStream(segments.token_ids, params, self.input_processor)
        told = ended = False
        for attempt in (1, 2):
            try:
                linked = await self._link(request, segments, trace)
                outputs = self._outputs(answer, linked, request, f"{request_id}-{attempt}", trace, options)
                async with aclosing(outputs):
                    async for output in outputs:
                        offer, output.kv_transfer_params = output.kv_transfer_params, None  # which is no client's
                        output.request_id = request_id
                        output.prompt_token_ids = segments.token_ids
                        output.num_cached_tokens = linked.tokens_reused
                        told, ended = True, output.finished
                        if ended:
                            self._keep_answer(answer, linked, request, offer)
                        yield output
                return
            except RoleUnavailable as error:
                if ended:
                    return
                if attempt == 2 or isinstance(error, NoReplica) or (answer.decoded and not answer.begun):
                    lost = GenerationError if told else RetryableRequestError  # 503: another try is safe
                    raise lost(f"a worker was lost: {error}") from error
                if answer.decoded:
                    answer.go_on()
                    compaction = self._compaction(answer.prompt, params, trace)
                    request = replace(request, token_ids=answer.prompt, sampling=None, compaction=compaction)
                logger.warning("request %.100r: %s; trying another replica", request_id, error)
            except CompactionRefused as error:
                raise InvalidRequest(f"orbit.{error}", parameter="orbit.kv_budget") from error
            except PromptTooLarge as error:
                raise InvalidRequest(str(error)) from error
            except Overloaded as error:
                if told:
                    raise GenerationError(f"a worker was lost, and the others are full: {error}") from error
                raise OverloadedError(str(error)) from error

    def _compaction(self, token_ids: Sequence[int], params: SamplingParams, trace: RequestTrace) -> Compaction:
        """Compaction of a prompt as asked for.

        Repetition penalties read the prompt's ids, grammars whether it ends a reasoning: so many entries stay as there
        are different ids, to name them all. A budget of thinking counts tokens of the prompt: all stay.

        Raises:
            InvalidRequest: a window is asked for where decode workers take none.
        """
        asked = trace.options.compaction(self.compaction)
        if asked.window is not None and (reason := refusal()) is not None:
            raise InvalidRequest(f"orbit.{reason}", parameter="orbit.elastic.window")
        if asked.budget < 1 and params.thinking_token_budget is not None:
            return replace(asked, least=len(token_ids))
        reads_ids = params.repetition_penalty != 1 or params.structured_outputs is not None
        return replace(asked, least=len(set(token_ids))) if asked.budget < 1 and reads_ids else asked

    async def _outputs(
        self,
        answer: AnswerStream,
        linked: LinkResult,
        request: LinkRequest,
        decode_id: str,
        trace: RequestTrace,
        options: dict[str, Any],
    ) -> AsyncGenerator[RequestOutput, None]:
        """Outputs of an answer, from its first token on; its lease ends with them."""
        async with LinkLease(self._roles, linked, request.readers, self._lease_seconds) as lease:
            if linked.first_token is not None and not answer.begun:
                answer.begin(linked.first_token)
            if answer.begun:
                self._served(request, trace, linked, "prefill")
                if (first := answer.first()) is not None:
                    yield first
                if answer.finished:
                    return
            began = time.perf_counter()
            prompt = len(request.token_ids)
            given = answer.given(prompt, prompt if linked.kv is None else linked.kv.kept)
            params = answer.params
            if params.max_tokens is None and len(given) < len(answer.prompt):  # its positions go on as if all were kept
                params = params.clone()
                params.max_tokens = self.model_config.max_model_len - len(answer.prompt)
            transfer = asking(linked.transfer) if self._is_wanted_back(linked, request) else linked.transfer
            outputs = self._roles.generate(given, transfer, params, decode_id, **options)
            generated = Counter[int]()
            async with aclosing(outputs):
                async for output in outputs:
                    lease.pulled(output)
                    if not answer.decoded:
                        trace.decoding((time.perf_counter() - began) * 1e3)
                        whole = answer.params.output_kind == RequestOutputKind.FINAL_ONLY
                        self._served(request, trace, linked, "decode", alone=not whole)
                    for choice in output.outputs:
                        before = generated[choice.index] if params.output_kind == RequestOutputKind.DELTA else 0
                        generated[choice.index] = before + len(choice.token_ids)
                    trace.dropped(linked.transfer, len(given), generated.values())
                    yield answer.joined(output)

    def _is_kept(self, request: LinkRequest) -> bool:
        """True if the worker that links a prompt keeps its answer's KV; of several answers, none's."""
        return self._keeps_answers and request.readers == 1 and request.mode != Mode.OFF

    def _is_wanted_back(self, linked: LinkResult, request: LinkRequest) -> bool:
        """True if the worker that linked a prompt reads the answer's KV: if the decode engine has all of both."""
        is_whole = linked.kv is None or linked.kv.kept == linked.kv.tokens
        return linked.reads_answer and self._is_kept(request) and is_whole and window_of(linked.transfer) is None

    def _keep_answer(
        self, answer: AnswerStream, linked: LinkResult, request: LinkRequest, offer: Mapping[str, Any] | None
    ) -> None:
        """Tell the worker that linked a prompt the answer that its chat will bring back."""
        if not self._is_kept(request):
            return
        told = self._roles.keep_answer(linked.lease, answer.token_ids[len(request.token_ids) :], offer)
        task = asyncio.create_task(told, context=Context())  # or Serve would cancel it with the request
        self._telling.add(task)
        task.add_done_callback(self._telling.discard)

    def _served(
        self,
        request: LinkRequest,
        trace: RequestTrace,
        linked: LinkResult,
        by: Literal["prefill", "decode"],
        alone: bool = True,
    ) -> None:
        """Note once that a request has its first token, and the role that gave it."""
        if trace.report.first_token is not None:
            return
        trace.first_token(by, alone)
        if self.access_log is not None:
            self.access_log.offer(request, trace.groups, linked, trace.report.ttft_ms)

    async def _link(self, request: LinkRequest, segments: Segments, trace: RequestTrace) -> LinkResult:
        began = time.perf_counter()
        vision_ms, embeddings = 0.0, dict[int, Any]()
        contents = [chunk.content for chunk in segments.chunks]
        pixels = {content: item for content, item in zip(contents, segments.items, strict=True) if item is not None}
        lacking, trace.lacking = trace.lacking, None
        known = pixels if request.mode == Mode.OFF else await _lacking_by_now(lacking if pixels else None)
        needed = [i for i, content in enumerate(contents) if content in pixels and content in known]
        with closing(self._encodings.of_request(request.tenant, pixels, lacking)) as encodings:
            while True:
                if needed:
                    encoding = time.perf_counter()
                    found = await encodings.get({contents[i] for i in needed})
                    embeddings |= {i: found[contents[i]] for i in needed}
                    vision_ms += (time.perf_counter() - encoding) * 1e3
                try:
                    result = await self._roles.link(request, tuple(embeddings), tuple(embeddings.values()))
                    break
                except PixelsNeeded as more:  # again if stored KV turns out to be unreadable only while it is loaded
                    needed = list(more.chunks)
                    if embeddings.keys() >= set(needed):
                        raise RuntimeError(f"chunks {needed} were encoded, and asked for again") from more
        vision_ms += result.stages_ms.get("vision", 0.0)
        self.orderer.learn(request, result)
        if trace.report.first_token is None:  # else the report is of the link that the answer began with
            encoded = sum(segments.chunks[i].count for i in embeddings)
            whole_ms = (time.perf_counter() - began) * 1e3
            note_link(trace, len(segments.token_ids), result, request.compaction, encoded, vision_ms, whole_ms)
        return result
