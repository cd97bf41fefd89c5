"""HTTP application: vLLM's OpenAI routes on our engine client, files, health, metrics.

| route                                   | answered by                                   |
|-----------------------------------------|-----------------------------------------------|
| POST /v1/chat/completions               | vLLM's handler, see `chat.OrbitServingChat`   |
| POST /v1/responses                      | vLLM's handler, see `responses`               |
| POST /v1/completions, /detokenize       | vLLM's handlers; text only                    |
| POST /tokenize                          | vLLM's handler, chats' chunks resolved before |
| GET /v1/models                          | vLLM's handler                                |
| /v1/files                               | `files`                                       |
| /v1/vector_stores                       | `vector_stores`                               |
| /v1/orbit/operating_points              | `fidelity`                                    |
| /v1/orbit/sessions                      | `sessions`                                    |
| /v1/orbit/load_bearing                  | `load_bearing`                                |
| GET /console, /v1/orbit/files           | `console`                                     |
| GET /health, /metrics, /docs            | here                                          |
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from itertools import chain
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.middleware.cors import CORSMiddleware
from fastapi.responses import JSONResponse, PlainTextResponse
from prometheus_client.metrics_core import Metric
from vllm.entrypoints.openai.completion.api_router import router as completion_router
from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.entrypoints.openai.completion.serving import OpenAIServingCompletion
from vllm.entrypoints.openai.models.api_router import router as models_router
from vllm.entrypoints.openai.models.protocol import BaseModelPath
from vllm.entrypoints.openai.models.serving import OpenAIServingModels
from vllm.entrypoints.serve.tokenize.api_router import router as tokenize_router
from vllm.entrypoints.serve.tokenize.protocol import DetokenizeRequest, TokenizeChatRequest, TokenizeRequest
from vllm.entrypoints.serve.tokenize.serving import ServingTokenization
from vllm.renderers.chat_utils import load_chat_template
from vllm.renderers.online_renderer import OnlineRenderer

from kvstore.uploads.files import FileStore
from kvstore.uploads.vector_stores import VectorStores
from serving.api.auth import AnswerHead, Authenticate, BoundHeaders, Limit
from serving.api.autoscale import Planned, autoscale_router, planned_metrics
from serving.api.chat import UNSUPPORTED, OrbitServingChat, fixed_prefix, readable, refuse_longer, refuse_unsupported
from serving.api.chat_request import chat_router
from serving.api.client_disconnect import CancelOnDisconnect, answering
from serving.api.clips import Clips
from serving.api.compiling import compiling
from serving.api.console import console_router
from serving.api.errors import RetryLater, answer_errors
from serving.api.fidelity import families, fidelity_router, scraped
from serving.api.files import OnDelete, files_router
from serving.api.image_limits import ImageLimits
from serving.api.load_bearing import load_bearing_router
from serving.api.media import MediaResolver
from serving.api.metrics import Metrics, exposition, in_time, labelled
from serving.api.openapi import document_errors
from serving.api.pdf_pages import PdfPages
from serving.api.responses import OrbitServingResponses, responses_router
from serving.api.retrieval import Retrieval
from serving.api.sessions import counted_sessions, sessions_router
from serving.api.streams import opened
from serving.api.vector_stores import vector_stores_router
from serving.api_keys import KeyRing
from serving.config import OrbitServeConfig
from serving.frontend.client_text import ClientText
from serving.frontend.documents import Documents
from serving.frontend.engine_client import LinkedEngineClient
from serving.frontend.errors import InvalidRequest
from serving.frontend.fair_queue import FairQueue
from serving.frontend.rate_limits import RateLimits
from serving.frontend.report import OrbitOptions, RequestTrace, parse_options, set_trace
from serving.retrieval.protocol import RetrieverRole

_UNSUPPORTED_COMPLETION = {
    "prompt_logprobs": "prompt_logprobs is not supported",
    "echo": "echo is not supported",
    "prompt_embeds": "prompt_embeds is not supported",
    "use_beam_search": "beam search is not supported",
    "kv_transfer_params": "kv_transfer_params belongs to the server",
    "cache_salt": "cache_salt is not supported: content is salted by tenant",
}
_OF_CHATS = ("retrieve", "pages", "video", "order", "explain")  # options that chats alone read


class OrbitServingCompletion(OpenAIServingCompletion):
    """vLLM's completion handler; prompts are text or token ids and go the same way as chats."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._max_characters = self.model_config.max_model_len * self.renderer.get_tokenizer().max_chars_per_token

    async def create_completion(self, request: CompletionRequest, raw_request: Request | None = None) -> Any:
        """Refuse what the decode engine cannot know, then answer as vLLM does."""
        answering(raw_request)
        refuse_unsupported(request, _UNSUPPORTED_COMPLETION)
        prompts = request.prompt if isinstance(request.prompt, list) else [request.prompt]
        for text in (*prompts, request.suffix):
            if isinstance(text, str):
                _refuse_longer_text(text, self._max_characters)
        options = _options(request)
        _refuse_options(options, _OF_CHATS, "a completion has no chunks")
        set_trace(RequestTrace(options, raw_request.state.tenant if raw_request is not None else "local"))
        answer = await super().create_completion(request, raw_request)
        return await opened(answer) if isinstance(answer, AsyncGenerator) else answer


def _options(request: Any) -> OrbitOptions:
    return parse_options((request.model_extra or {}).get("orbit"))


def _refuse_options(options: OrbitOptions, names: Sequence[str], reason: str) -> None:
    """Raise InvalidRequest for the first of these options that is set: nothing would heed it."""
    for name in names:
        if getattr(options, name) != getattr(OrbitOptions(), name):
            raise InvalidRequest(f"orbit.{name}: {reason}", parameter=f"orbit.{name}")


def _refuse_longer_text(text: str, most: int) -> None:
    """Raise InvalidRequest for more text than a prompt can hold: vLLM would tokenise it all where it may cut it."""
    if len(text) > most:
        raise InvalidRequest(
            f"the prompt has {len(text)} characters; the longest has at most {most}", parameter="prompt"
        )


class OrbitServingTokenization(ServingTokenization):
    """vLLM's tokenisation handler, with a chat's images resolved by us.

    It would fetch them itself and let clients choose their names.
    """

    def __init__(self, *arguments: Any, media: MediaResolver, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._media = media
        self._max_tokens = self.model_config.max_model_len
        self._max_characters = self._max_tokens * self.renderer.get_tokenizer().max_chars_per_token

    async def create_tokenize(self, request: TokenizeRequest, raw_request: Request) -> Any:
        """Resolve a chat's chunks as for an answer, then tokenise as vLLM does.

        In the thread that renders all prompts.

        Raises:
            InvalidRequest: more text than a prompt can hold.
        """
        answering(raw_request)
        options = _options(request)
        if isinstance(request, TokenizeChatRequest):
            refuse_unsupported(request, UNSUPPORTED)
            _refuse_options(options, ("retrieve", "order"), "a chat is tokenised as it is sent")
            messages = readable(request.messages)
            prefix = fixed_prefix(messages, request)
            refuse_longer(messages, prefix, self._max_characters, request.chat_template_kwargs)
            tenant = raw_request.state.tenant
            request.messages = await self._media.resolve_messages(messages, tenant, options.pages, options.video)
        else:
            _refuse_options(options, _OF_CHATS, "a text has no chunks")
            _refuse_longer_text(request.prompt, self._max_characters)
        return await super().create_tokenize(request, raw_request)

    async def create_detokenize(self, request: DetokenizeRequest, raw_request: Request) -> Any:
        """Detokenise as vLLM does. Raises InvalidRequest for more tokens than a prompt can hold."""
        if len(request.tokens) > self._max_tokens:
            raise InvalidRequest(
                f"{len(request.tokens)} tokens; the longest prompt has at most {self._max_tokens}", parameter="tokens"
            )
        return await super().create_detokenize(request, raw_request)


Counted = Callable[[], Awaitable[Mapping[str, Sequence[Metric]]]]


async def build_api(
    client: LinkedEngineClient,
    config: OrbitServeConfig,
    on_delete: OnDelete,
    replica: str = "ingress",
    counted: Counted | None = None,
    planned: Planned | None = None,
    retriever: RetrieverRole | None = None,
) -> FastAPI:
    """The ASGI application of one ingress replica.

    Args:
        replica: its name in metrics.
        counted: gives what all ingress replicas counted, by name; None: this is the only one.
        planned: gives the planner's status; None: nothing is planned.
        on_delete: called with (content id, owner) when the last file of some content was deleted; the owner is a
            tenant, or DYNAMIC_TENANT when no vector store holds the content any more.
        retriever: None: vector stores are not searched.
    """
    http, model = config.http, config.model
    files = FileStore(config.files_url, config.files)
    stores = VectorStores(files)
    text = ClientText.of(client.renderer, model.chat_template)
    documents = client.forgets.group().register(Documents(client.renderer.get_tokenizer(), text=text))
    cache = client.renderer._mm_processor_only_cache
    if cache is not None:
        client.forgets.group(client.renderer._mm_executor.submit).register(ProcessedImages(cache))
    text.install(client.renderer)
    documents.install(client.renderer)
    longest = client.model_config.max_model_len * client.renderer.get_tokenizer().max_chars_per_token
    limits = ImageLimits.of(client.renderer, http.max_resized_pixels)

    def is_processed(content: str) -> bool:
        return cache is not None and cache.is_cached([content])[0]

    pdfs = PdfPages(config.documents, files, http.max_image_pixels)
    has_images = not model.is_text_only
    clips = Clips.of(client.renderer, config.video)
    media = MediaResolver(http, files, stores, documents, longest, limits, is_processed, pdfs, has_images, clips)
    retrieval = Retrieval(stores, retriever)
    metrics = Metrics()
    metrics.patches.set_function(lambda: len(client.orderer.index))
    metrics.unlogged.set_function(lambda: client.access_log.dropped if client.access_log else 0)

    app = FastAPI(title="OrbitServe", description="Multimodal serving that does not pay twice for what it has seen.")
    app.state.metrics = metrics
    client.observe, client.answering = metrics.observe, metrics.answering
    client.request_timeout_s = http.request_timeout_s
    await _add_openai(app, client, config, media, documents, retrieval)
    most_bytes = max(http.max_file_bytes, config.documents.max_pdf_bytes, config.video.max_bytes if clips else 0)
    app.include_router(files_router(files, stores, media, most_bytes, on_delete))
    app.include_router(vector_stores_router(stores, on_delete, media, retrieval))
    app.include_router(fidelity_router(client.roles))
    app.include_router(sessions_router(client.roles))
    app.include_router(load_bearing_router(client.roles))
    if planned is not None:
        app.include_router(autoscale_router(planned))
    app.include_router(console_router(media))
    _add_operations(app, client, metrics, replica, counted, planned)
    answer_errors(app)
    document_errors(app)
    app.add_middleware(AnswerHead)
    app.add_middleware(RetryLater)
    app.add_middleware(CancelOnDisconnect)
    rates = RateLimits(config.tenants.of, config.ingress.least_replicas)
    alone = config.tenants.most_of_one(http.max_concurrent_requests) if http.has_tenants else None
    app.add_middleware(Limit, http, metrics, rates, alone, most_bytes)
    client.limits = rates
    if config.places is not None:
        shares = config.tenants
        client.queue = queue = FairQueue(
            config.places,
            shares.most_of_one(config.places),
            shares.max_waiting,
            weight=lambda tenant: shares.of(tenant).weight,
        )
        metrics.waiting.set_function(lambda: queue.waiting)
    app.add_middleware(Authenticate, KeyRing.of(http), http.admin_paths)
    if http.cors_origins:  # before keys are asked for: a browser's question whether it may call carries none
        app.add_middleware(CORSMiddleware, allow_origins=http.cors_origins, allow_methods=["*"], allow_headers=["*"])
    app.add_middleware(BoundHeaders)
    app.state.model_name = model.served_name
    return app


class ProcessedImages:
    """vLLM's cache of processed images, on the thread where vLLM reads and writes it."""

    def __init__(self, cache: Any) -> None:
        self._cache = cache

    def forget(self, content: str, tenant: str) -> None:
        """Drop a deleted image's processed fields; ids are salted by tenant."""
        self._cache._cache.pop(content, None)


async def _add_openai(
    app: FastAPI,
    client: LinkedEngineClient,
    config: OrbitServeConfig,
    media: MediaResolver,
    documents: Documents,
    retrieval: Retrieval,
) -> None:
    model = config.model
    template = load_chat_template(model.chat_template)
    tools = {
        "enable_auto_tools": model.enable_auto_tool_choice and model.tool_call_parser is not None,
        "tool_parser": model.tool_call_parser,
        "reasoning_parser": model.reasoning_parser or "",
    }
    # vLLM would tell the checkpoint's path, as `root`.
    models = OpenAIServingModels(client, [BaseModelPath(name=model.served_name, model_path=model.served_name)])
    renderer = OnlineRenderer(
        client.model_config,
        client.renderer,
        request_logger=None,
        chat_template=template,
        chat_template_content_format="auto",
        **tools,
    )
    renderer.warmup()
    shared: dict[str, Any] = {
        "online_renderer": renderer,
        "request_logger": None,
        "enable_prompt_tokens_details": True,
    }
    app.state.engine_client = client
    app.state.openai_serving_models = models
    app.state.openai_serving_chat = OrbitServingChat(
        client,
        models,
        "assistant",
        chat_template=template,
        chat_template_content_format="auto",
        media=media,
        documents=documents,
        default_max_tokens=model.default_max_tokens,
        retrieval=retrieval,
        **tools,
        **shared,
    )
    app.state.openai_serving_responses = OrbitServingResponses(
        client,
        models,
        chat=app.state.openai_serving_chat,
        chat_template=template,
        chat_template_content_format="auto",
        **tools,
        **shared,
    )
    app.state.openai_serving_completion = OrbitServingCompletion(client, models, **shared)
    app.state.serving_tokenization = OrbitServingTokenization(
        models, renderer, request_logger=None, chat_template=template, chat_template_content_format="auto", media=media
    )
    for router in (models_router, completion_router, tokenize_router, chat_router(), responses_router()):
        app.include_router(router)


def _add_operations(
    app: FastAPI,
    client: LinkedEngineClient,
    metrics: Metrics,
    replica: str,
    counted: Counted | None,
    planned: Planned | None,
) -> None:
    async def by_replica() -> Mapping[str, Sequence[Metric]]:
        found = await in_time(counted(), None, "other ingress replicas") if counted is not None else None
        return found or {replica: metrics.collect()}

    @app.get("/health", summary="Whether every role answers", tags=["operations"])
    async def health() -> JSONResponse:
        try:
            await client.check_health()
        except Exception as error:
            return JSONResponse({"status": "unhealthy", "reason": str(error)}, 503)
        return JSONResponse({"status": "ok"})

    @app.get("/metrics", summary="Prometheus metrics", tags=["operations"], response_class=PlainTextResponse)
    async def prometheus() -> Response:
        roles = client.roles
        measured, compiled, sessions, own, plans = await asyncio.gather(
            scraped(roles), compiling(roles), counted_sessions(roles), by_replica(), planned_metrics(planned)
        )
        text = exposition(chain(labelled(own), families(measured), compiled, sessions, plans))
        return Response(text, media_type="text/plain; version=0.0.4")
