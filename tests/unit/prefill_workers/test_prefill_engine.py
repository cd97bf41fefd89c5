"""What the prefill engine makes of several ranks' answers, and how it hands images to the vision tower."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from kvstore_support import MLA
from vllm.multimodal.inputs import MultiModalFieldElem, MultiModalKwargsItem, MultiModalSharedField

from kvstore.operator.layout import Layout
from prefill_workers.engine import rank_calls
from prefill_workers.engine import worker_extension as runs
from prefill_workers.engine.attention_layers import UnsupportedEngine
from prefill_workers.engine.engine import check_hand_off
from prefill_workers.engine.image_batches import handfuls
from prefill_workers.engine.rank_calls import RankCalls
from prefill_workers.engine.transfer_notes import ReadNotes, parsed
from prefill_workers.engine.worker_extension import WorkerExtension

# Calls


class OddError(Exception):
    """Cannot be made again from what it was made of."""

    def __init__(self, one: str, two: str) -> None:
        super().__init__(f"{one} {two}")


class Rank(WorkerExtension):
    def __init__(self, number: int, errors: dict[int, Exception]) -> None:
        self.number, self.errors = number, errors

    def tell(self, what: str) -> str:
        if self.number in self.errors:
            raise self.errors[self.number]
        return f"{what} {self.number}"


class Executor:
    """Several ranks as vLLM's executor has them: one that raises ends the call, the others' answers stay in line."""

    def __init__(self, ranks: Sequence[Rank]) -> None:
        self.ranks = [(rank, deque[Any]()) for rank in ranks]

    def collective_rpc(self, method: str, timeout: float, args: tuple[Any, ...]) -> list[Any]:
        for rank, line in self.ranks:
            try:
                line.append((True, getattr(rank, method)(*args)))
            except Exception as error:
                line.append((False, error))
        answers = []
        for _, line in self.ranks:
            fine, answer = line.popleft()
            if not fine:
                raise RuntimeError(f"Worker failed with error '{answer}'")
            answers.append(answer)
        return answers


def calls(errors: dict[int, Exception], ranks: int) -> RankCalls:
    return RankCalls(Executor([Rank(number, errors) for number in range(ranks)]), ranks)


@pytest.fixture
def of_ranks(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """How many ranks the workers think that there are."""
    world = SimpleNamespace(size=2)
    monkeypatch.setattr(runs, "get_tensor_model_parallel_world_size", lambda: world.size)
    monkeypatch.setattr(runs, "get_tensor_model_parallel_rank", lambda: 0)
    return world


@pytest.mark.parametrize("failing", [{0}, {1}, {0, 1}])
def test_the_answers_to_the_next_call_are_its_own_after_ranks_have_failed(of_ranks: Any, failing: set[int]):
    errors: dict[int, Exception] = {number: UnsupportedEngine(f"on {number}") for number in failing}
    made = calls(errors, 2)
    with pytest.raises(UnsupportedEngine, match=f"on {min(failing)}"):
        made.all("tell", "first")
    errors.clear()
    assert made.all("tell", "second") == ["second 0", "second 1"]


def test_an_error_that_no_other_process_could_read_says_what_it_said(of_ranks: Any):
    with pytest.raises(RuntimeError, match="OddError: one two"):
        calls({1: OddError("one", "two")}, 2).one("tell", "first")


def test_an_engine_with_a_rank_that_does_not_answer_is_not_asked_again(of_ranks: Any):
    """As where one failed and the other waits for it in the middle of a layer; vLLM's executor raises TimeoutError."""

    asked = []

    def collective_rpc(method: str, timeout: float, args: tuple[Any, ...]) -> list[Any]:
        asked.append(args)
        raise TimeoutError("RPC call to answer timed out.")

    made = RankCalls(SimpleNamespace(collective_rpc=collective_rpc), 2)
    assert not made.silent
    for name in ("first", "second"):
        with pytest.raises(TimeoutError):
            made.all("tell", name)
    assert (made.silent, asked) == (True, [("tell", "first")])


def test_a_rank_has_for_a_forward_what_earlier_ones_took_many_times_over(monkeypatch: pytest.MonkeyPatch):
    allowed, now = list[float](), [0.0]

    def collective_rpc(method: str, timeout: float, args: tuple[Any, ...]) -> list[Any]:
        allowed.append(timeout)
        now[0] += args[1]  # seconds
        return [None, None]

    monkeypatch.setattr(rank_calls, "time", SimpleNamespace(monotonic=lambda: now[0]))
    made = RankCalls(SimpleNamespace(collective_rpc=collective_rpc), 2)
    made.all("forward_runs", 20.0, tokens=1000)
    made.all("read_kv", 1.0)
    made.all("forward_runs", 2.0, tokens=100)
    made.all("forward_runs", 20.0, tokens=1000)
    assert allowed == [600.0, 600.0, 60.0, 200.0]


def test_one_rank_raises_the_very_error(of_ranks: Any):
    of_ranks.size = 1
    error = OddError("one", "two")
    with pytest.raises(OddError) as raised:
        calls({0: error}, 1).one("tell", "first")
    assert raised.value is error


# Leases that were read


def test_a_lease_is_read_when_every_rank_has_heard_of_all_its_readers():
    notes, held = ReadNotes(2), {"a", "b"}
    assert notes.take([([("a", 1)], ["b"]), ([], [])], held) == ([], ["b"])
    assert notes.take([([("b", 2)], []), ([("a", 1), ("b", 2)], [])], held) == (["a"], [])
    assert notes.take([([("b", 2)], []), ([("b", 2)], [])], held) == (["b"], [])


def test_notes_of_anybody_else_are_dropped():
    notes = [
        b"a-1:2",
        b"HB:a-1,b-2",
        b"",
        b":",
        b"a",
        b"a:",
        b":1",
        b"a:x",
        b"a:-1",
        b"a:0",
        b"\xff:1",
        b"HB:\xff",
        b"a:b:1",
    ]
    assert parsed(notes) == ([("a-1", 2), ("a:b", 1)], ["a-1", "b-2"])


def test_what_was_heard_of_leases_that_have_ended_is_forgotten():
    notes = ReadNotes(2)
    notes.take([([("a", 1)], []), ([], [])], {"a"})
    assert notes.take([([("late", 1)], []), ([("a", 1)], [])], set()) == ([], [])
    assert not any(notes._heard)
    assert notes.take([([("b", 1)], []), ([("b", 1)], [])], {"b"}) == (["b"], [])


@pytest.mark.parametrize(
    ("heads", "prefill", "decode", "fine"),
    [(2, 1, 1, True), (2, 2, 1, True), (2, 4, 4, True), (2, 4, 8, True), (2, 4, 2, False), (2, 4, 1, False)],
)
def test_copies_of_heads_are_refused_that_a_decode_engine_would_not_read(
    heads: int, prefill: int, decode: int, fine: bool
):
    check_hand_off(MLA, prefill, decode)
    layout = Layout.gqa(2, heads, 8, MLA.rotary)
    if fine:
        check_hand_off(layout, prefill, decode)
    else:
        with pytest.raises(UnsupportedEngine, match=r"prefill\.tensor_parallel_size: 4 ranks hold copies of 2 KV"):
            check_hand_off(layout, prefill, decode)


# Images


def pixels(*numbers: int) -> tuple[str, MultiModalKwargsItem]:
    """An image of tensors with so many numbers."""
    data = [torch.zeros(count) for count in numbers]
    elem = MultiModalFieldElem(data=data if len(data) > 1 else data[0], field=MultiModalSharedField(batch_size=1))
    return "image", MultiModalKwargsItem({"pixel_values": elem})


def test_images_go_to_the_tower_in_order_a_handful_at_a_time():
    items = [pixels(40), pixels(30, 30), pixels(10), pixels(500), pixels(1)]
    groups = list(handfuls(items, 100))
    assert [len(group) for group in groups] == [2, 1, 1, 1]
    assert [item for group in groups for item in group] == items
    assert list(handfuls([], 100)) == []


# What is refused


def worker(**model: bool) -> WorkerExtension:
    """A worker whose layers keep KV in one way; `model`: of vLLM's configuration."""
    made = object.__new__(WorkerExtension)
    facts = {"is_mm_prefix_lm": False, **model}
    made.model_runner = SimpleNamespace(vllm_config=SimpleNamespace(model_config=SimpleNamespace(**facts)))
    backend = SimpleNamespace(get_name=lambda: "FLASHMLA")
    spec = SimpleNamespace(block_size=128)
    vars(made._attention)["group"] = SimpleNamespace(kv_cache_spec=spec, backend=backend, kernel_block_size=64)
    return made


def test_images_whose_tokens_attend_to_later_ones_are_refused():
    with pytest.raises(UnsupportedEngine, match="attend to the later ones"):
        worker(is_mm_prefix_lm=True).describe()


def test_blocks_that_the_backend_cuts_up_are_refused():
    with pytest.raises(UnsupportedEngine, match=r"prefill\.block_size: 128: FLASHMLA keeps blocks of 64 tokens"):
        worker().describe()
