"""Hand-back of answers' KV in a stock decode engine, per request.

vLLM's NIXL connector can hold an answer's blocks for others to read (its bidirectional transfer), of all requests or of
none. This connector has it do so for those that are asked to (`infra.hand_back`); all others end as they would without.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.nixl import NixlConnector

from infra.hand_back import is_asked

# Looks whether all blocks are free (`DecodeEngine.all_blocks_free`) fail after each answer, while others run.
logging.getLogger("vllm.v1.core.block_pool").addFilter(lambda record: "Failed to reset" not in str(record.msg))


class HandBackConnector(NixlConnector):
    """Stock NIXL connector that holds the KV of answers that are wanted back."""

    def request_finished(self, request: Any, block_ids: Any) -> Any:
        """See vLLM's connector; called for aborted requests, too, whose KV nobody gets."""
        with self._offering(request):
            return self._held(request, super().request_finished(request, block_ids))

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> Any:
        """See `request_finished`."""
        with self._offering(request):
            return self._held(request, super().request_finished_all_groups(request, block_ids))

    @contextmanager
    def _offering(self, request: Any) -> Iterator[None]:
        scheduler: Any = self.connector_scheduler
        if not is_asked(request.kv_transfer_params):
            yield
            return
        scheduler.is_bidirectional_kv_xfer_enabled = True
        try:
            yield
        finally:
            scheduler.is_bidirectional_kv_xfer_enabled = False

    def _held(self, request: Any, ended: Any) -> Any:
        """Have the worker half heed who reads an answer that is held: it does for requests of a batch alone."""
        is_held, _ = ended
        if is_held:
            scheduler: Any = self.connector_scheduler
            scheduler._reqs_in_batch.add(request.request_id)
        return ended
