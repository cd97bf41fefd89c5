"""Hand-back of answers: vLLM's connector holds those that are asked for, and no others."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.v1.core.block_pool import BlockPool

from decode_workers.elimination import EliminatingConnector
from decode_workers.hand_back import HandBackConnector
from infra.hand_back import asking, is_asked, is_held, is_offer, offered


class Scheduler:
    """vLLM's half of the connector: offers everything while its bidirectional transfer is on."""

    def __init__(self) -> None:
        self.is_bidirectional_kv_xfer_enabled = False
        self._reqs_in_batch: set[str] = set()

    def request_finished(self, request: Any, blocks: Any) -> tuple[bool, dict[str, Any] | None]:
        if request.request_id == "broken":
            raise RuntimeError("injected")
        if request.request_id == "aborted":
            return False, None
        return (True, {"remote_block_ids": blocks}) if self.is_bidirectional_kv_xfer_enabled else (False, None)


@pytest.mark.parametrize("kind", [HandBackConnector, EliminatingConnector])
@pytest.mark.parametrize("method", ["request_finished", "request_finished_all_groups"])
def test_an_answer_is_offered_if_it_is_asked_for(kind: type[HandBackConnector], method: str):
    connector, scheduler = object.__new__(kind), Scheduler()
    connector.connector_scheduler = scheduler  # type: ignore[assignment]
    asked = SimpleNamespace(request_id="asked", kv_transfer_params=asking({"remote_host": "here"}))
    plain = SimpleNamespace(request_id="plain", kv_transfer_params={"remote_host": "here"})
    finished = getattr(connector, method)
    assert finished(asked, ([1, 2],))[0] is True
    assert finished(plain, ([1, 2],)) == (False, None)
    with pytest.raises(RuntimeError, match="injected"):
        finished(SimpleNamespace(request_id="broken", kv_transfer_params=asked.kv_transfer_params), ([1],))
    assert finished(plain, ([1, 2],)) == (False, None)
    finished(SimpleNamespace(request_id="aborted", kv_transfer_params=asked.kv_transfer_params), ([1],))
    assert scheduler._reqs_in_batch == {"asked"}, "of others the worker half would keep the name for ever"


def test_a_look_whether_all_blocks_are_free_is_no_warning(caplog: pytest.LogCaptureFixture):
    pool = BlockPool(4, enable_caching=False, hash_block_size=16)
    pool.get_new_blocks(2)
    assert not pool.reset_prefix_cache()
    logging.getLogger("vllm.v1.core.block_pool").warning("another")
    assert caplog.messages == ["another"]


def test_parameters_say_what_is_asked_and_what_is_offered():
    assert is_asked(asking({"remote_host": "here"}))
    assert not is_asked({"remote_host": "here"})
    assert not is_asked(None)
    assert is_offer({"remote_block_ids": ([3],)})
    assert not is_offer({"remote_block_ids": ([],)})
    assert not is_offer({"remote_block_ids": None})
    assert not is_offer(None)
    assert is_held(offered({"remote_block_ids": ([3],)}, 16))
