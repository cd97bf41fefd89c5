"""What engines on a CPU host share: threads that look for news."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest
import torch
from torch.distributed import HashStore, ProcessGroupGloo, distributed_c10d

from infra import vllm_plugin


@pytest.fixture(autouse=True)
def as_torch_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine of an earlier test in this process may have changed it."""
    monkeypatch.setattr(distributed_c10d, "ProcessGroupGloo", ProcessGroupGloo)


def polling_threads() -> int:
    """Threads of this process in which gloo looks for packets; each names itself soon after it began."""
    time.sleep(0.5)
    names = [path.read_text().strip() for path in Path("/proc/self/task").glob("*/comm")]
    return names.count("gloo_tcp_loop")


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="the system does not list threads")
def test_process_groups_share_one_thread_that_polls():
    before, alone = polling_threads(), [ProcessGroupGloo(HashStore(), 0, 1) for _ in range(2)]
    assert polling_threads() == before + len(alone), "what is undone here"

    for _ in range(2):  # vLLM loads its plugins more than once
        vllm_plugin._let_groups_share_a_thread()
    sharing = distributed_c10d.ProcessGroupGloo
    assert issubclass(sharing, ProcessGroupGloo)
    sharing(HashStore(), 0, 1)
    before = polling_threads()
    groups = [sharing(HashStore(), 0, 1) for _ in range(5)]
    assert polling_threads() == before
    for group in groups:
        tensor = torch.ones(3)
        group.allreduce([tensor]).wait()
        assert tensor.tolist() == [1, 1, 1]


def test_ranks_that_share_threads_still_reach_one_another():
    vllm_plugin._let_groups_share_a_thread()
    store, sums = HashStore(), [torch.full((2,), float(rank + 1)) for rank in range(2)]

    def reduce(rank: int) -> None:
        distributed_c10d.ProcessGroupGloo(store, rank, 2).allreduce([sums[rank]]).wait()

    ranks = [threading.Thread(target=reduce, args=(rank,)) for rank in range(2)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(timeout=60)
    assert [tensor.tolist() for tensor in sums] == [[3, 3], [3, 3]]


def test_an_interface_that_is_named_is_the_one_that_is_used(monkeypatch: pytest.MonkeyPatch):
    devices = vllm_plugin._gloo_devices.__wrapped__
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo,lo")
    assert len(devices()) == 2
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "no-such-interface")
    with pytest.raises(RuntimeError, match="no-such-interface"):
        devices()
