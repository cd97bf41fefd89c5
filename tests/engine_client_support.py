"""Roles that fail as told, and the ingress' engine client over them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

from vllm.outputs import CompletionOutput, RequestOutput
from vllm.sampling_params import RequestOutputKind, SamplingParams

from kvstore.forget import ForgetRegistry
from prefill_workers.modes import OperatingPoint
from prefill_workers.protocol import ChunkOutcome, HandedOff, LeaseState, LinkRequest, LinkResult, PrefetchRequest
from serving.frontend.engine_client import LinkedEngineClient
from serving.frontend.prompt_segments import Delimiters
from serving.frontend.report import RequestTrace, set_trace
from serving.frontend.single_flight_encoder import SingleFlightEncoder
from serving.placement.orderer import PatchAwareOrderer

OUTPUTS = 3
EOS = 99
DELIMITERS = (4, 5)  # around an image


class Roles:
    """Roles that fail as told. `failures` maps a primitive to what its next calls raise.

    `first_tokens` are what the next links that are asked for one give.
    """

    def __init__(
        self, first_tokens: Sequence[int] = (), kept: int | None = None, **failures: list[Exception | None]
    ) -> None:
        """`kept`: KV entries of a prompt that are handed off; None: all, and nothing is said of that."""
        self.failures, self.kept = failures, kept
        self.first_tokens = list(first_tokens)
        self.generated: list[tuple[list[int], SamplingParams]] = []
        self.calls: list[str] = []
        self.abandoned: list[tuple[str, int]] = []
        self.renewed: list[str] = []
        self.kept_answers: list[tuple[str, list[int]]] = []
        self.offers: list[Mapping[str, Any] | None] = []  # with them
        self.lease = LeaseState.HELD  # what a renewal answers
        self.admits_after = 2  # renewals
        self.admits: asyncio.Event | None = None  # what `generate` waits for
        self.lost_pulls = 0  # so many generations cannot pull the KV
        self.linked: list[LinkRequest] = []
        self.prefetched: list[PrefetchRequest] = []
        self.encoded: list[list[str]] = []
        self.lacking: list[str] = []  # what a prefetch answers
        self.reads_answers = True
        self.tokens_computed: list[int] = []  # what the next links say of themselves

    def _maybe_fail(self, name: str) -> None:
        self.calls.append(name)
        pending = self.failures.get(name)
        error = pending.pop(0) if pending else None
        if error is not None:
            raise error

    async def prefetch(self, request: PrefetchRequest) -> Sequence[str]:
        self.prefetched.append(request)
        return self.lacking

    async def encode(self, items: Sequence[Any]) -> list[str]:
        self.encoded.append([content for _, content in items])
        self._maybe_fail("encode")
        return [f"embedding of {item}" for item in items]

    async def link(self, request: LinkRequest, indices: Sequence[int], embeddings: Any) -> LinkResult:
        self.linked.append(request)
        self._maybe_fail("link")
        outcome = ChunkOutcome(5, OperatingPoint.ENCODED if indices else OperatingPoint.PATCHED, 0, "because")
        lease = f"lease-{len(self.linked)}"
        first = self.first_tokens.pop(0) if self.first_tokens and request.sampling is not None else None
        computed = self.tokens_computed.pop(0) if self.tokens_computed else 7
        stages = {"forward": 1.0}
        kv = None if self.kept is None else HandedOff(len(request.token_ids), self.kept, 100 * self.kept)
        transfer = {"remote_request_id": lease}
        return LinkResult(
            lease, transfer, (outcome,), 5, computed, stages, first_token=first, kv=kv, reads_answer=self.reads_answers
        )

    async def generate(
        self, token_ids: list[int], transfer: dict[str, Any], params: Any, request_id: str, **options: Any
    ) -> AsyncGenerator[Any, None]:
        self.generated.append((token_ids, params))
        self._maybe_fail("generate")
        if self.admits is not None:
            await self.admits.wait()
        if self.lost_pulls:  # as vLLM ends it with `kv_load_failure_policy` fail
            self.lost_pulls -= 1
            failed = CompletionOutput(0, "", [], None, None, finish_reason="error")
            yield RequestOutput(request_id, None, None, None, [failed], True)
            return
        for i in range(OUTPUTS):
            completion = CompletionOutput(0, "", [100 + i], None, None)
            yield RequestOutput(request_id, None, None, None, [completion], i == OUTPUTS - 1)
            self._maybe_fail("between")

    async def renew(self, lease: str) -> LeaseState:
        self.renewed.append(lease)
        if len(self.renewed) == self.admits_after and self.admits is not None:
            self.admits.set()
        return self.lease

    async def keep_answer(self, lease: str, token_ids: Sequence[int], offer: Mapping[str, Any] | None = None) -> None:
        self.offers.append(offer)
        self.kept_answers.append((lease, list(token_ids)))

    async def abandon(self, transfer: dict[str, Any], readers: int) -> None:
        self.abandoned.append((transfer["remote_request_id"], readers))

    async def check_health(self) -> None:
        self._maybe_fail("health")


def client_of(roles: Roles) -> LinkedEngineClient:
    """A client without vLLM's renderer, which none of these tests reaches."""
    client = object.__new__(LinkedEngineClient)
    client._roles = roles
    client._encodings = SingleFlightEncoder(roles.encode)
    client._delimiters, client._image_delimiters = Delimiters(), DELIMITERS
    client.forgets = ForgetRegistry()
    client.orderer = PatchAwareOrderer()
    client._first_tokens, client._vocabulary = True, 1000
    client._lease_seconds = 0.06
    client._keeps_answers, client._telling = True, set()
    client.renderer = SimpleNamespace(validate_token_ids=lambda ids: None)
    client.input_processor = SimpleNamespace(
        _validate_prompt_len=lambda length, kind: None,
        tokenizer=None,
        generation_config_fields={},
        renderer=SimpleNamespace(get_eos_token_id=lambda: EOS),
        model_config=SimpleNamespace(max_model_len=1000),
    )
    return client


async def ask(roles: Roles, trace: RequestTrace | None = None, **params: Any) -> list[Any]:
    set_trace(trace or RequestTrace())
    prompt = {"type": "token", "prompt_token_ids": list(range(12))}
    sampling = SamplingParams(**{"output_kind": RequestOutputKind.DELTA, **params})
    return [output async for output in client_of(roles).generate(prompt, sampling, "request")]


def tokens_of(outputs: list[Any]) -> list[int]:
    return [token for output in outputs for token in output.outputs[0].token_ids]
