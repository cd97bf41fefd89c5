"""What the decode engine tells vLLM of a linked prompt, and what it holds for one that is left."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from itertools import count
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.engine import EngineCoreOutput
from vllm.v1.engine.exceptions import EngineGenerateError
from vllm.v1.engine.output_processor import RequestOutputCollector

from decode_workers import engine
from decode_workers.admission import Admission
from decode_workers.engine import DecodeEngine, NonFiniteLogits, fail_on_nan
from decode_workers.spec import DecodeSpec
from infra import kv_window, vllm_arguments
from infra.hand_back import asking, is_held
from infra.kv_window import window_parameter
from infra.pace import Pace
from infra.reference import DEFAULT_MODEL, weights
from infra.vllm_env import BLOCK_SIZE

TRANSFER = {
    "remote_engine_id": "prefill", "remote_request_id": "lease", "remote_block_ids": [[1, 2, 3]], BLOCK_SIZE: 16,
}  # fmt: skip


class Vllm:
    """vLLM's engine: `asked` are the sampling parameters that it was given; it answers when `pulled` is set."""

    def __init__(self) -> None:
        self.asked: list[SamplingParams] = []
        self.rejected: list[tuple[str, str]] = []
        self.pulled, self.ended = asyncio.Event(), asyncio.Event()
        self.ended.set()
        self.free, self.looked = False, 0
        self.offer: dict[str, Any] | None = None  # that an answer ends with

    async def generate(self, prompt: Any, params: SamplingParams, request_id: str) -> AsyncGenerator[Any, None]:
        self.asked.append(params)
        await self.pulled.wait()
        whole = params.output_kind is RequestOutputKind.FINAL_ONLY
        said = [(token, index) for token in range(3) for index in reversed(range(params.n or 1))]
        for token, index in said:
            last = (token, index) == said[-1]
            if last:
                await self.ended.wait()
            output = CompletionOutput(
                index, f"{token}", [token], None, None, finish_reason="stop" if token == 2 else None
            )
            if last or not whole:
                yield RequestOutput(
                    request_id, None, None, None, [output], last, kv_transfer_params=self.offer if last else None
                )

    async def notify_kv_transfer_request_rejected(self, name: str, transfer: Any) -> None:
        self.rejected.append((name, transfer["remote_request_id"]))

    async def reset_prefix_cache(self) -> bool:
        self.looked += 1
        return self.free


def decode(vllm: Vllm) -> DecodeEngine:
    made = object.__new__(DecodeEngine)
    made._engine, made.admission, made.max_model_len = vllm, Admission(10, 16), 160
    made.progressed, made._canaries, made._pulls, made._offers = 0.0, count(), Pace(1), {}
    return made


async def test_nan_among_logits_ends_that_request_before_its_token_is_given_out():
    queues = {name: RequestOutputCollector(RequestOutputKind.DELTA, name) for name in ("broken", "sound")}
    states = {name: SimpleNamespace(queue=queue) for name, queue in queues.items()}
    processed: list[str] = []
    processor = SimpleNamespace(
        request_states=states, process_outputs=lambda outputs, at: processed.extend(o.request_id for o in outputs)
    )
    fail_on_nan(processor)
    broken, left = (EngineCoreOutput(name, [7], num_nans_in_logits=3) for name in ("broken", "left already"))
    processor.process_outputs([broken, EngineCoreOutput("sound", [7]), left], 0.0)
    assert processed == ["sound"]
    with pytest.raises(NonFiniteLogits):
        await queues["broken"].get()
    assert queues["sound"].output is None


async def test_nan_is_named_to_the_caller():
    class Broken(Vllm):
        async def generate(self, *_: Any) -> AsyncGenerator[Any, None]:
            for output in ():
                yield output
            raise EngineGenerateError from NonFiniteLogits()

    with pytest.raises(NonFiniteLogits):
        await read(decode(Broken()))


@pytest.mark.parametrize("is_wanted_back", [False, True])
async def test_vllm_may_hold_an_answer_that_ends_in_nan(monkeypatch: pytest.MonkeyPatch, is_wanted_back: bool):
    class Broken(Vllm):
        async def generate(self, *_: Any) -> AsyncGenerator[Any, None]:
            for output in ():
                yield output
            raise EngineGenerateError from NonFiniteLogits()

    monkeypatch.setattr(engine, "HELD_SECONDS", 0.1)
    monkeypatch.setattr(engine, "_LOOK_SECONDS", 0.0)
    worker = decode(Broken())
    with pytest.raises(NonFiniteLogits):
        await read(worker, asking(TRANSFER) if is_wanted_back else TRANSFER)
    assert (worker.stats().blocks_reserved > 0) is is_wanted_back
    await freed(worker)


async def read(worker: DecodeEngine, transfer: Any = TRANSFER, **params: Any) -> int:
    asked = SamplingParams(max_tokens=4, **params)
    return len([output async for output in worker.generate(list(range(20)), transfer, asked, "request")])


async def test_a_linked_prompt_is_pulled_whatever_is_asked_of_it():
    """vLLM skips what it could pull where `prompt_logprobs` are asked for, and would compute the prompt from ids."""
    vllm = Vllm()
    vllm.pulled.set()
    assert await read(decode(vllm), prompt_logprobs=0) == 3
    (params,) = vllm.asked
    assert params.skip_reading_prefix_cache is False
    assert params.extra_args["kv_transfer_params"]["remote_block_ids"] == ([1, 2],)


async def freed(worker: DecodeEngine) -> float:
    """Wait until the worker holds no room; returns when that was."""
    async with asyncio.timeout(60):
        while worker.stats().blocks_reserved:
            await asyncio.sleep(0.005)
    return time.monotonic()


@pytest.mark.parametrize("left", [False, True])
async def test_room_is_held_while_what_nobody_waits_for_may_be_pulled(monkeypatch: pytest.MonkeyPatch, left: bool):
    monkeypatch.setattr(engine, "_LOOK_SECONDS", 0.01)
    vllm = Vllm()
    worker = decode(vllm)
    reading = asyncio.create_task(read(worker))
    await asyncio.sleep(0.02)
    assert worker.stats() == engine.DecodeStats(1, 0, 3, 0, 10)
    if left:
        reading.cancel()
        await asyncio.wait([reading])
        await asyncio.sleep(0.05)
        assert worker.stats() == engine.DecodeStats(0, 0, 3, 0, 10)
        vllm.free = True
        await freed(worker)
    else:
        vllm.pulled.set()
        assert await reading == 3
    assert worker.stats() == engine.DecodeStats(0, 0, 0, 0, 10)


@pytest.mark.parametrize("told", [True, False])
@pytest.mark.parametrize("kind", [RequestOutputKind.DELTA, RequestOutputKind.FINAL_ONLY])
async def test_room_is_held_until_an_answer_is_handed_back(
    monkeypatch: pytest.MonkeyPatch, told: bool, kind: RequestOutputKind
):
    monkeypatch.setattr(engine, "HELD_SECONDS", 60 if told else 0.1)
    monkeypatch.setattr(engine, "_LOOK_SECONDS", 0.0)
    vllm = Vllm()
    vllm.pulled.set()
    vllm.offer = {"remote_request_id": "vllm's name", "remote_block_ids": [[4, 5]]}
    worker = decode(vllm)
    params = SamplingParams(max_tokens=4, output_kind=kind)
    outputs = [output async for output in worker.generate(list(range(20)), asking(TRANSFER), params, "request")]
    assert outputs[-1].kv_transfer_params.items() >= {**vllm.offer, BLOCK_SIZE: 16}.items()
    assert is_held(outputs[-1].kv_transfer_params)
    assert worker.stats() == engine.DecodeStats(0, 0, 3, 0, 10)
    if told:
        worker.end_hand_back("another engine's")
        await asyncio.sleep(0.02)
        assert worker.stats().blocks_reserved == 3
        worker.end_hand_back("vllm's name")
    await freed(worker)
    assert vllm.looked == 2, "vLLM has had a step to free them in"
    assert worker._offers == {}


async def test_without_an_offer_room_ends_with_the_answer():
    vllm = Vllm()
    vllm.pulled.set()
    vllm.offer = {"remote_request_id": "vllm's name", "remote_block_ids": [[]]}
    worker = decode(vllm)
    await read(worker, asking(TRANSFER))
    assert worker.stats().blocks_reserved == 0


async def test_room_is_held_for_as_long_as_large_pulls_may_take(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(engine, "_LOOK_SECONDS", 0.01)
    monkeypatch.setattr(engine, "_PULL_SECONDS", 0.0)
    monkeypatch.setattr(engine, "_PULLED_A_SECOND", 200)  # two choices of 20 tokens: a fifth of a second
    worker = decode(Vllm())
    reading = asyncio.create_task(read(worker, n=2))
    await asyncio.sleep(0.02)
    left = time.monotonic()
    reading.cancel()
    assert await freed(worker) - left >= 0.2


async def test_room_is_held_by_the_pace_of_earlier_pulls_from_the_same_worker(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(engine, "_LOOK_SECONDS", 0.01)
    monkeypatch.setattr(engine, "_PULL_SECONDS", 0.0)
    monkeypatch.setattr(engine, "_PULL_MARGIN", 2.0)
    vllm = Vllm()
    worker = decode(vllm)
    reading = asyncio.create_task(read(worker))
    await asyncio.sleep(0.2)
    vllm.pulled.set()
    await reading
    assert worker._pulls.seconds("another", 20) is None
    vllm.pulled.clear()
    reading = asyncio.create_task(read(worker))
    await asyncio.sleep(0.02)
    left = time.monotonic()
    reading.cancel()
    assert await freed(worker) - left >= 0.3, "20 ms, at a thousand tokens a second, were nothing known"


async def test_a_whole_answer_is_put_together_here_so_that_it_is_known_when_its_kv_has_come():
    vllm = Vllm()
    vllm.pulled.set()
    worker = decode(vllm)
    asked = SamplingParams(max_tokens=4, n=2, output_kind=RequestOutputKind.FINAL_ONLY)
    (answer,) = [one async for one in worker.generate(list(range(20)), TRANSFER, asked, "request")]
    assert answer.finished
    assert [(choice.index, choice.text, choice.finish_reason) for choice in answer.outputs] == [
        (0, "012", "stop"), (1, "012", "stop"),
    ]  # fmt: skip
    assert [list(choice.token_ids) for choice in answer.outputs] == [[0, 1, 2]] * 2
    assert asked.output_kind is RequestOutputKind.FINAL_ONLY, "the caller's own stay as they were"


async def test_whoever_leaves_a_whole_answer_that_is_being_written_gives_its_room_back_at_once():
    vllm = Vllm()
    vllm.pulled.set()
    vllm.ended.clear()
    worker = decode(vllm)
    reading = asyncio.create_task(read(worker, output_kind=RequestOutputKind.FINAL_ONLY))
    await asyncio.sleep(0.02)
    assert worker.stats().blocks_reserved == 3
    reading.cancel()
    await asyncio.wait([reading])
    assert worker.stats().blocks_reserved == 0


async def test_a_request_that_vllm_refuses_gives_its_room_back_at_once():
    class Refusing(Vllm):
        async def generate(self, *_: Any) -> AsyncGenerator[Any, None]:
            raise ValueError("a broken schema")
            yield

    worker = decode(Refusing())
    with pytest.raises(ValueError, match="broken schema"):
        await read(worker)
    assert worker.stats().blocks_reserved == 0


async def test_a_canary_is_a_token_of_its_own_or_where_the_pool_is_full_an_answer_of_the_core():
    vllm = Vllm()
    vllm.pulled.set()
    worker = decode(vllm)
    before = worker.progressed
    await worker.compute_one_token()
    assert [params.max_tokens for params in vllm.asked] == [1]
    assert worker.progressed > before
    assert worker.stats().blocks_reserved == 0
    async with worker.admission.admit(9 * 16, 1):  # all ten blocks: the canary must not take one that it needs
        await worker.compute_one_token()
    assert len(vllm.asked) == 1
    assert vllm.looked == 1


async def test_text_that_is_computed_here_leaves_nothing_behind():
    vllm = Vllm()
    worker = decode(vllm)
    reading = asyncio.create_task(read(worker, transfer=None))
    await asyncio.sleep(0.02)
    reading.cancel()
    await asyncio.wait([reading])
    assert worker.stats().blocks_reserved == 0


def test_grammars_wait_for_the_end_of_the_reasoning(monkeypatch: pytest.MonkeyPatch):
    """vLLM's engine holds a grammar back until its own parser says that the model has thought."""

    class Started(Exception):
        pass

    def start(arguments: Any) -> None:
        raise Started(arguments.reasoning_parser)

    monkeypatch.setattr(engine.AsyncLLM, "from_engine_args", start)
    for parser in ("", "deepseek_r1"):
        with pytest.raises(Started, match=f"^{parser}$"):
            DecodeEngine(DecodeSpec(str(weights(DEFAULT_MODEL)), max_model_len=256, reasoning_parser=parser))


@pytest.mark.parametrize(("size", "blocks"), [(16, [1, 2]), (8, [1, 2, 3]), (32, [1])])
async def test_a_prompts_blocks_are_counted_in_the_prefill_workers_size(size: int, blocks: list[int]):
    vllm = Vllm()
    vllm.pulled.set()
    assert await read(decode(vllm), {**TRANSFER, BLOCK_SIZE: size}) == 3  # of 20 tokens
    (params,) = vllm.asked
    assert params.extra_args["kv_transfer_params"]["remote_block_ids"] == (blocks,)


async def test_fewer_blocks_than_the_prompt_has_are_refused_before_they_end_the_engine():
    worker = decode(vllm := Vllm())
    with pytest.raises(ValueError, match="20 tokens need 2 KV blocks"):
        await read(worker, {**TRANSFER, "remote_block_ids": [[1]]})
    assert vllm.asked == []
    assert vllm.rejected == [("abandon-lease-0", "lease")], "the prefill worker gets its blocks back"


@pytest.mark.parametrize("gpu", [False, True])
def test_windows_belong_to_cpus_and_gpus_have_vllms_own_connector_and_worker(
    monkeypatch: pytest.MonkeyPatch, gpu: bool
):
    for module in (engine, vllm_arguments):
        monkeypatch.setattr(module, "uses_gpu", lambda: gpu)
    arguments = engine.engine_arguments(DecodeSpec("model"))
    connector = arguments["kv_transfer_config"]
    assert connector.kv_connector == ("NixlConnector" if gpu else "EliminatingConnector")
    assert connector.kv_connector_module_path == (None if gpu else "decode_workers.elimination")
    assert ("worker_cls" in arguments, arguments["enforce_eager"]) == (not gpu, not gpu)


async def test_a_window_is_refused_by_name_where_attention_knows_none(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(kv_window, "is_cpu_build", lambda: False)
    worker = decode(vllm := Vllm())
    with pytest.raises(ValueError, match=r"elastic\.window: decode workers on GPUs"):
        await read(worker, TRANSFER | window_parameter(10))
    assert vllm.asked == []
    assert vllm.rejected == [("abandon-lease-0", "lease")]


async def test_room_for_an_answer_with_a_window_is_what_it_holds_at_once():
    worker = decode(Vllm())
    asked = SamplingParams(max_tokens=100)
    held = []
    for transfer in (TRANSFER, TRANSFER | window_parameter(10)):
        reading = asyncio.create_task(anext(worker.generate(list(range(20)), transfer, asked, "request")))
        await asyncio.sleep(0.02)
        held.append(worker.stats().blocks_reserved)
        reading.cancel()
        await asyncio.wait([reading])
        worker.admission = Admission(10, 16)
    assert held == [8 + 1, 2 + 1 + 1 + 1], (
        "two of the prompt, one of the window, one that is being left, one for a copy"
    )
