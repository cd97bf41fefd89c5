"""Decode worker replicas: stock, text-only vLLM."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import AsyncGenerator
from itertools import count
from typing import TYPE_CHECKING, Any

from infra.ports import LOOPBACK
from infra.vllm_env import is_cpu_build
from prefill_workers.protocol import TINY_PROMPT, Refusal
from serving.config import OrbitServeConfig
from serving.engine_spec import decode_spec
from serving.replicas.canary import Canary
from serving.replicas.first_transfer import pull_from_prefill
from serving.replicas.process import address_for_peers, enter_vllm, replica_name
from serving.routing.reports import DecodeReporter
from serving.scaling.meters import DecodeMeter
from serving.scaling.roles import scales

if TYPE_CHECKING:
    from vllm.outputs import RequestOutput
    from vllm.sampling_params import SamplingParams


logger = logging.getLogger(__name__)


class DecodeWorker:
    """Decode role: stock vLLM; see `decode_workers.engine`."""

    async def __init__(self, config: OrbitServeConfig) -> None:  # type: ignore[misc]
        settings = config.decode
        self._meter = DecodeMeter()
        reachable = address_for_peers() if config.prefill.may_pull_answers else LOOPBACK  # else nobody asks: it pulls
        enter_vllm(settings, kv_cache_gib=settings.kv_cache_gib, handshakes_at=reachable, own_runner=False)
        from decode_workers.engine import DecodeEngine

        self._engine = DecodeEngine(decode_spec(config))
        self._canary = Canary(
            lambda: self._engine.progressed,
            self._engine.compute_one_token,
            settings.canary_timeout_s,
            self._engine.cpu_seconds if is_cpu_build() else None,
        )
        self._reporter = DecodeReporter(self._engine, settings.max_num_seqs)
        self._tiny = count()
        is_scaled = scales(config, config.prefill) or scales(config, settings)
        self._looking = await pull_from_prefill(self.pull_tiny, once_more=is_scaled)
        self._meter.ready()

    async def pull_tiny(self, transfer: dict[str, Any]) -> None:
        """Pull a tiny prompt's KV from a prefill worker."""
        from vllm.sampling_params import SamplingParams

        params = SamplingParams(max_tokens=2, temperature=0, detokenize=False, ignore_eos=True)
        async for _ in self._engine.generate(TINY_PROMPT, transfer, params, f"tiny-{next(self._tiny)}"):
            pass

    async def generate(
        self,
        token_ids: list[int],
        transfer: dict[str, Any],
        params: SamplingParams,
        request_id: str,
        options: dict[str, Any],
    ) -> AsyncGenerator[RequestOutput | Refusal, None]:
        """Stream outputs; the prompt's token ids stay here, the caller has them.

        A Refusal ends the stream where the request is wrong: larger than the pool, or with parameters that vLLM does
        not take.

        With the engine core this process ends: Serve then asks it no more, and callers hear of a lost worker.
        """
        from vllm.exceptions import VLLMClientError, VLLMValidationError
        from vllm.v1.engine.exceptions import EngineDeadError

        first, tokens = 0.0, 0
        try:
            async for output in self._engine.generate(token_ids, transfer, params, request_id, **options):
                output.prompt_token_ids = None
                first = first or time.monotonic()
                tokens += sum(len(one.token_ids) for one in output.outputs)
                yield output
            self._meter.answered(tokens, first, max(params.n or 1, 1))
        except VLLMClientError as error:
            yield Refusal(error)
        except ValueError as error:
            yield Refusal(VLLMValidationError(str(error)))
        except EngineDeadError:
            logger.exception("the decode engine died, and this worker ends")
            os._exit(1)

    async def end_hand_back(self, request: str) -> None:
        """Note that the KV of an answer was read, or never will be, if this replica offered it."""
        self._engine.end_hand_back(request)

    async def record_routing_stats(self) -> dict[str, Any]:
        """Called by Serve, every `routing.report_period_s`."""
        return self._reporter.stats()

    async def alive(self) -> str:
        """This replica's name."""
        return replica_name()

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """Called by Serve where the role is scaled; see `autoscale.signals`."""
        report = self._reporter.report()
        return {
            **self._meter.common(),
            "blocks": report.blocks,
            "blocks_total": report.blocks_total,
            "sequences": report.sequences,
            "max_sequences": report.max_sequences,
            "waiting": self._engine.stats().waiting,
            "itl_s": self._meter.itl_s,
        }

    async def signals(self) -> tuple[str, dict[str, float]]:
        """This replica's name, and its signals for the planner."""
        return replica_name(), await self.record_autoscaling_stats()

    async def longest(self) -> int:
        """Most tokens of a prompt with its answer."""
        return self._engine.max_model_len

    async def abandon(self, transfer: dict[str, Any], readers: int) -> None:
        """Tell the prefill worker that this lease will not be read."""
        await self._engine.abandon(transfer, readers)

    async def stats(self) -> Any:
        """Queue lengths and reserved blocks."""
        return self._engine.stats()

    async def all_blocks_free(self) -> bool:
        """True if vLLM's own pool holds no KV block."""
        return await self._engine.all_blocks_free()

    async def check_health(self) -> None:
        """Raise when the engine core died, or computes nothing any more."""
        await self._engine.check_health()
        await self._canary.check()

    def __del__(self) -> None:
        if hasattr(self, "_engine"):
            self._engine.shutdown()
