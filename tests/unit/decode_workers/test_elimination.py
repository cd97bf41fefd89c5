"""Fixed-point elimination: what attention leaves out is what the block manager frees, and what admission counts."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from vllm.v1.core.block_pool import BlockPool

from decode_workers import elimination
from decode_workers.elimination import EliminatingConnector, EliminatingManager, without_gaps
from infra.kv_window import dropped, gap, held_tokens, window_of, window_parameter

BLOCK = 16


def manager(monkeypatch: pytest.MonkeyPatch, windows: dict[str, int]) -> EliminatingManager:
    """vLLM's block manager without its constructor, which wants a whole engine's configuration."""
    made = object.__new__(EliminatingManager)
    made.block_size = BLOCK
    made.block_pool = BlockPool(num_gpu_blocks=64, enable_caching=False, hash_block_size=BLOCK)
    made._null_block = made.block_pool.null_block
    made.req_to_blocks = {}
    monkeypatch.setattr(elimination, "_windows", windows)
    return made


@pytest.mark.parametrize("prompt", [1, 15, 16, 17, 40])
@pytest.mark.parametrize("window", [1, 15, 16, 17, 33])
def test_attention_leaves_out_the_blocks_that_are_freed_and_holds_what_was_counted(
    monkeypatch: pytest.MonkeyPatch, prompt: int, window: int
):
    kept = manager(monkeypatch, {"request": window})
    blocks = kept.req_to_blocks["request"] = kept.block_pool.get_new_blocks(-(-prompt // BLOCK))
    most = 0
    for computed in range(prompt, prompt + 120):
        kept.remove_skipped_blocks("request", computed, prompt)
        if computed % BLOCK == 0:
            blocks += kept.block_pool.get_new_blocks(1)
        there = [block.block_id for block in blocks if block is not kept._null_block]
        most = max(most, len(there))
        table = torch.tensor([[block.block_id for block in blocks] + [0] * 3], dtype=torch.int32)
        lens, one = torch.tensor([computed + 1]), torch.tensor([1])
        tables, left = without_gaps(table, lens, one, torch.tensor([prompt]), torch.tensor([window]), BLOCK)
        assert tables[0, : -(-int(left) // BLOCK)].tolist() == there
        assert int(left) == computed + 1 - dropped(prompt, computed - prompt + 2, window, BLOCK)
        start, stop = gap(prompt, computed, window, BLOCK)
        assert stop * BLOCK <= max(start * BLOCK, computed - window), "the window itself stays"
    assert most * BLOCK <= held_tokens(prompt, 1000, window, BLOCK)


def test_rows_without_a_window_and_prompts_under_way_are_left_alone():
    tables = torch.arange(1, 11, dtype=torch.int32).expand(3, -1)
    lens, queries = torch.tensor([150, 150, 150]), torch.tensor([1, 1, 40])
    prompts, windows = torch.tensor([20, 20, 150]), torch.tensor([10, -1, 10])
    left, counts = without_gaps(tables, lens, queries, prompts, windows, BLOCK)
    assert counts.tolist() == [150 - 6 * BLOCK, 150, 150]
    assert left[0, :4].tolist() == [1, 2, 9, 10]
    assert torch.equal(left[1:], tables[1:])


def test_windows_of_requests_are_known_while_they_last(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(elimination, "_windows", windows := {})
    connector = object.__new__(EliminatingConnector)
    connector.connector_scheduler = SimpleNamespace(
        on_new_request=lambda request: None, request_finished=lambda request, blocks: (False, None)
    )
    some, none = (
        SimpleNamespace(request_id=name, kv_transfer_params=params)
        for name, params in (("some", window_parameter(7)), ("none", {"remote_host": "here"}))
    )
    for request in (some, none):
        connector.on_new_request(request)
    assert windows == {"some": 7}
    connector.request_finished_all_groups(some, ([1],))
    connector.request_finished(none, [1])
    assert windows == {}


def test_what_holds_no_window_holds_all():
    assert window_of(None) is None
    assert window_of({"remote_host": "here"}) is None
    assert held_tokens(20, 500, None, BLOCK) == 500
    assert held_tokens(20, 30, 10, BLOCK) == 30
