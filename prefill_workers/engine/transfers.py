"""Transfers of blocks' KV to and from decode engines, by vLLM's own NIXL connector.

Checked on vLLM 0.32.0.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata import NixlConnectorMetadata

from prefill_workers.engine.transfer_notes import parsed


class HandOffs:
    """One rank's part in hand-offs of KV: a base of the worker extension."""

    def poll_handoffs(self) -> tuple[list[tuple[str, int]], list[str]]:
        """Notes of decode engines to this rank since the last call.

        Returns:
            (lease, n) per notification, where n ranks of that decode engine read from this rank; and the leases that
            are still wanted.
        """
        if not has_kv_transfer_group():
            return [], []
        notes = get_kv_transfer_group().connector_worker.nixl_wrapper.get_new_notifs()
        return parsed(note for arrived in notes.values() for note in arrived)

    def pull_kv(self, name: str, blocks: Sequence[int], offer: dict[str, Any]) -> bool:
        """Begin to read KV that a decode engine offers; without blocks, have it free that.

        False if a handshake with the engine comes first.
        """
        asked = NixlConnectorMetadata()
        asked.add_new_req_to_recv(name, (list(blocks),) if blocks else (), offer, awaiting_kvs=bool(blocks))
        self._puller.start_load_kv(asked)
        return offer["remote_engine_id"] in self._puller._remote_agents

    def poll_pulls(self) -> tuple[list[str], list[str]]:
        """Names of pulls that have ended here since the last call: well, and not."""
        self._puller.start_load_kv(NixlConnectorMetadata())  # those whose handshake has ended meanwhile
        results = self._puller.get_transfer_results()
        if results.failed_recving:
            self._puller.get_block_ids_with_load_errors()
        return sorted(results.finished_recving - results.failed_recving), sorted(results.failed_recving)

    @cached_property
    def _puller(self) -> Any:
        """Worker half of vLLM's connector, to read with; what decode engines notify is `poll_handoffs`' alone."""
        worker = get_kv_transfer_group().connector_worker
        worker._get_new_notifs = set
        return worker
