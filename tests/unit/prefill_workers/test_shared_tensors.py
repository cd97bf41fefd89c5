"""How a link's KV reaches tensor-parallel ranks: by vLLM's shared memory, not in the message."""

from __future__ import annotations

import io
import pickle
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from vllm.distributed.device_communicators import shm_tensor_arena
from vllm.distributed.device_communicators.shm_tensor_arena import ShmTensorArena, _ArenaPickler

from infra import vllm_arguments
from kvstore.operator.device_kernel import Placement
from prefill_workers.engine.engine import PrefillEngine, engine_arguments
from prefill_workers.engine.spec import EngineSpec


def test_the_kv_of_a_call_is_read_where_it_was_put_once():
    writer = ShmTensorArena(1, slot_bytes=16 << 20, n_slots=1)
    reader = ShmTensorArena(1, 16 << 20, 1, writer.shared_memory.name, reader_rank=0)
    shm_tensor_arena._TENSOR_ARENAS[writer.shared_memory.name] = reader
    kv = torch.randn(4, 1024, 512)
    message = io.BytesIO()
    _ArenaPickler(message, writer).dump(("answer", ("place", [Placement(kv, None, 5, torch.arange(1024))])))
    assert len(message.getvalue()) < kv.nbytes / 100
    _, (_, (placed,)) = pickle.loads(message.getvalue())
    assert torch.equal(placed.kv, kv)
    start = writer._slot(0, kv.nbytes)
    start[:4] = b"\0\0\0\0"
    assert placed.kv[0, 0, 0] == 0, "it is that memory"
    start.release()


@pytest.mark.parametrize(("ranks", "in_one_piece"), [(1, False), (2, True)])
def test_several_ranks_are_given_kv_in_one_piece_as_records_do_not_have_it(ranks: int, in_one_piece: bool):
    """Arrow leaves a gap between two layers; vLLM shares contiguous tensors alone."""
    kv, given = torch.randn(4, 1025, 512)[:, 1:], list[Placement]()
    engine = object.__new__(PrefillEngine)
    engine.spec = cast(Any, SimpleNamespace(tensor_parallel_size=ranks))
    engine._calls = cast(Any, SimpleNamespace(timed=lambda name, chunks: (given.extend(chunks), None)))
    engine.place([Placement(kv, None, 5, torch.arange(1024))])
    assert given[0].kv.is_contiguous() is in_one_piece
    assert torch.equal(given[0].kv, kv)


@pytest.mark.parametrize(("ranks", "free", "shared"), [(1, 64 << 30, False), (2, 64 << 30, True), (2, 64 << 20, False)])
def test_ranks_share_memory_where_there_is_room(
    ranks: int, free: int, shared: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setattr(vllm_arguments.shutil, "disk_usage", lambda _: SimpleNamespace(free=free))
    arguments = engine_arguments(EngineSpec("", tensor_parallel_size=ranks))
    assert arguments.get("enable_shm_tensor_arena", False) is shared
    assert ("--shm-size" in caplog.text) is (ranks > 1 and not shared)
