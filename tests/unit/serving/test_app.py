"""The roles' replicas without Serve around them: what they answer when what they hold has failed."""

from __future__ import annotations

import asyncio
import logging
import os
import pickle
import threading
from collections.abc import AsyncGenerator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import MagicMock

import pytest
import torch
from ray.exceptions import ActorUnavailableError, RayActorError
from ray.serve import context
from ray.serve._private.common import DeploymentID
from ray.serve.exceptions import DeploymentUnavailableError
from vllm.exceptions import VLLMValidationError
from vllm.multimodal.cache import MultiModalProcessorOnlyCache
from vllm.multimodal.inputs import MultiModalKwargsItem
from vllm.v1.engine.exceptions import EngineDeadError

from kvstore.errors import TierUnavailable
from kvstore.forget import ForgetRegistry
from prefill_workers.background.patch_precompiler import CompileStats
from prefill_workers.protocol import (
    ChunkSpan,
    LeaseState,
    LinkRequest,
    Overloaded,
    PixelsNeeded,
    PromptTooLarge,
    lease_owner,
)
from prefill_workers.scheduler.load_budget import KVLoadBudget
from prefill_workers.scheduler.loop_stats import LoopStats
from serving.api.app import ProcessedImages
from serving.errors import RoleUnavailable
from serving.frontend import ray_roles
from serving.frontend.documents import Documents
from serving.frontend.ray_calls import accepted, answered, lost
from serving.frontend.ray_roles import RayRoles
from serving.replicas import library_keeper
from serving.replicas.canary import EngineStalled
from serving.replicas.decode import DecodeWorker
from serving.replicas.ingress import Ingress
from serving.replicas.library_keeper import LibraryKeeper
from serving.replicas.prefill import PrefillWorker
from serving.replicas.vision import VisionEncoder
from serving.scaling.meters import WorkMeter

NOBODY: Any = None  # in place of the ingress' own handle


async def test_a_decode_worker_ends_with_its_engine(monkeypatch: pytest.MonkeyPatch):
    ends: list[int] = []
    monkeypatch.setattr(os, "_exit", ends.append)

    async def generate(*_: Any, **__: Any) -> AsyncGenerator[Any, None]:
        raise EngineDeadError
        yield

    worker = object.__new__(DecodeWorker)
    worker._engine = SimpleNamespace(generate=generate, shutdown=lambda: None)
    assert [output async for output in worker.generate([1], {}, None, "request", {})] == []
    assert ends == [1]


def prefill_worker(*, alive: bool = True, failing: int = 0, silent: bool = False) -> PrefillWorker:
    worker = object.__new__(PrefillWorker)
    worker._meter = SimpleNamespace(linked=lambda result: None)
    worker._engine = SimpleNamespace(is_silent=silent, check_handshake=nothing)
    loop = {"alive": lambda: alive, "failing": failing, "stop": lambda: None, "bring_back": lambda request: None}
    worker._loop = SimpleNamespace(**loop)
    worker._library = SimpleNamespace(close=lambda: None)
    worker._load_budget = KVLoadBudget(100, bytes_per_token=10)
    worker._planners = ThreadPoolExecutor(1, thread_name_prefix="plan")
    worker._canary, worker._handshake_timeout = SimpleNamespace(check=nothing), 1.0
    return worker


async def nothing(*_: Any) -> None:
    pass


async def test_a_prefill_loop_that_has_ended_is_a_role_that_is_not_available():
    with pytest.raises(RoleUnavailable, match="loop has ended"):
        await prefill_worker(alive=False).link(None)


async def test_a_prefill_worker_whose_every_forward_fails_is_not_healthy():
    await prefill_worker(failing=2).check_health()
    with pytest.raises(RuntimeError, match="failed 3 times in a row"):
        await prefill_worker(failing=3).check_health()
    with pytest.raises(RuntimeError, match="does not answer any more"):
        await prefill_worker(silent=True).check_health()


async def test_a_prefill_worker_that_computes_or_hands_over_nothing_is_not_healthy():
    async def stalled(*_: Any) -> None:
        raise EngineStalled("nothing for 5 s")

    worker = prefill_worker()
    await worker.check_health()
    worker._canary.check = stalled
    with pytest.raises(EngineStalled):
        await worker.check_health()
    worker = prefill_worker()
    worker._engine.check_handshake = stalled
    with pytest.raises(EngineStalled):
        await worker.check_health()


async def test_the_keys_of_a_prefetch_are_made_beside_the_event_loop():
    worker, threads = prefill_worker(), list[str]()
    worker._loop.expect = lambda: None

    def prefetch(request: Any, load: bool) -> dict[str, Future[bool]]:
        assert load
        threads.append(threading.current_thread().name)
        answers = {"known": Future[bool](), "new": Future[bool]()}
        for content, answer in answers.items():
            answer.set_result(content == "new")
        return answers

    worker._linker = SimpleNamespace(prefetch=prefetch)
    assert await worker.prefetch(None) == ["new"]
    assert threads == ["plan_0"]


async def test_a_link_is_planned_when_there_is_room_for_what_it_loads():
    """Until then nothing is loaded for it, ahead neither."""
    worker, planned, links, ahead = prefill_worker(), list[str](), list[Future[str]](), list[bool]()
    worker._loop.expect = worker._loop.refuse_if_full = lambda: None

    def plan(request: LinkRequest, given: Any) -> Any:
        planned.append(request.request_id)
        return SimpleNamespace(took=lambda stage, seconds: None, unpin=lambda: None)

    def submit(plan: Any) -> Future[str]:
        links.append(Future())
        return links[-1]

    async def until(count: int) -> None:
        while len(links) < count:
            await asyncio.sleep(0.001)

    def prefetch(request: Any, load: bool) -> dict[str, Future[bool]]:
        ahead.append(load)
        return {}

    worker._loop.submit, worker._linker = submit, SimpleNamespace(plan=plan, prefetch=prefetch)
    chunk = ChunkSpan("page", "image", 0, 6, 0, 6)  # of 60 bytes
    first, second, third = (
        asyncio.create_task(worker.link(LinkRequest(name, [0] * 8, (chunk,)))) for name in ("first", "second", "third")
    )
    await until(1)
    await worker.prefetch(None)
    links[0].set_exception(PixelsNeeded([0]))
    assert isinstance((await first).error, PixelsNeeded)
    await until(2)
    assert planned == ["first", "second"]
    second.cancel()
    await until(3)
    await worker.prefetch(None)
    links[2].set_result("linked")
    assert await third == "linked"
    assert planned == ["first", "second", "third"]
    assert links[1].cancelled()
    assert worker._load_budget.held == 0
    assert ahead == [False, True]


@pytest.mark.parametrize("refused", [Overloaded("full"), PixelsNeeded([1]), PromptTooLarge("needs 9 KV blocks")])
async def test_an_expected_refusal_of_a_link_is_an_answer_and_no_error_of_the_replica(refused: Exception):
    """Ray Serve logs what a replica raises as an error, with a traceback."""
    worker = prefill_worker()

    def submit(plan: Any) -> Future[Any]:
        raise refused

    worker._loop.refuse_if_full = lambda: None
    worker._loop.submit = submit
    worker._linker = SimpleNamespace(
        plan=lambda *_: SimpleNamespace(took=lambda stage, seconds: None, unpin=lambda: None)
    )
    answer = pickle.loads(pickle.dumps(await worker.link(LinkRequest("request", [0] * 8))))
    with pytest.raises(type(refused)) as raised:
        accepted(answer)
    assert str(raised.value) == str(refused)

    refused = TimeoutError("a rank of the engine does not answer any more")  # a fault
    with pytest.raises(TimeoutError):
        await worker.link(LinkRequest("request", [0] * 8))


@pytest.mark.parametrize("refused", [ValueError("lower max_tokens or n"), VLLMValidationError("no", parameter="n")])
async def test_a_generation_that_is_refused_ends_its_stream_with_the_reason(refused: Exception):
    async def generate(*_: Any, **__: Any) -> AsyncGenerator[Any, None]:
        raise refused
        yield

    worker = object.__new__(DecodeWorker)
    worker._engine = SimpleNamespace(generate=generate, shutdown=lambda: None)
    (answer,) = [output async for output in worker.generate([1], {}, None, "request", {})]
    with pytest.raises(VLLMValidationError) as raised:
        accepted(pickle.loads(pickle.dumps(answer)))
    assert str(raised.value) == str(refused)

    refused = RuntimeError("out of memory")
    with pytest.raises(RuntimeError, match="memory"):
        assert [output async for output in worker.generate([1], {}, None, "request", {})]


async def test_a_prefill_worker_counts_the_patches_that_were_dropped(monkeypatch: pytest.MonkeyPatch):
    worker, dropped = prefill_worker(), MagicMock(dropped=3)
    loop = LoopStats(*[0] * 16, compiled=CompileStats(1, {}, 0.0, {}))
    monkeypatch.setattr(PrefillWorker, "_name", "r1")
    worker._loop.stats = lambda: loop
    worker._library.stats = lambda: None
    worker._patch_queue, worker._sessions = dropped, MagicMock()
    assert (await worker.stats())["loop"].compiled == CompileStats(1, {}, 0.0, {}, dropped=3)


class Workers:
    """A handle whose replicas answer as told, one list an attempt. As Serve's: nothing is called until answers are.

    An attempt that is an error finds no replica.
    """

    app_name = deployment_name = "any"

    def __init__(self, *attempts: list[Any] | Exception) -> None:
        self._attempts = list(attempts)
        self.called: list[tuple[Any, ...]] = []

    def broadcast(self, method: str, *arguments: Any) -> Any:
        async def results_async(return_exceptions: bool) -> list[Any]:
            assert return_exceptions
            self.called.append((method, *arguments))
            answers = self._attempts.pop(0) if self._attempts else []
            if isinstance(answers, Exception):
                raise answers
            return answers

        async def one_by_one() -> list[Any]:
            return [SimpleNamespace(get_async=partial(given, answer)) for answer in await results_async(True)]

        return SimpleNamespace(results_async=results_async, _fetch_replica_results_async=one_by_one)


HANGS = object()


async def given(answer: Any) -> Any:
    """A replica's answer; HANGS: never any."""
    if answer is HANGS:
        await asyncio.Event().wait()
    if isinstance(answer, Exception):
        raise answer
    return answer


@pytest.fixture(autouse=True)
def states(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """Replicas of every role by their state in Serve."""
    found: dict[str, int] = {}
    monkeypatch.setattr(library_keeper, "replica_states", lambda *_: found)
    return found


def keeper(deleted: list[str], prefill: Workers, replicas: int = 1, *others: Workers) -> LibraryKeeper:
    """Of so many prefill workers; of the other roles nobody has to answer."""

    def delete_content(content: str, tenant: str) -> int:
        deleted.append(content)
        return 2

    made = object.__new__(LibraryKeeper)
    made._holders, made._undeleted = ((prefill, replicas), *((other, 0) for other in others)), set()
    made._library = SimpleNamespace(delete_content=delete_content)
    made._files = SimpleNamespace(
        parts=SimpleNamespace(of=lambda content, owner: (), settle=lambda content, owner: None),
        pending_deletions=SimpleNamespace(settle=lambda content, owner: deleted.append(f"{content} settled")),
    )
    return made


async def test_what_one_worker_cannot_delete_goes_everywhere_else_and_is_tried_again():
    deleted: list[str] = []
    made = keeper(deleted, Workers([None, TierUnavailable("s3 hiccups")], [None, None]))
    with pytest.raises(TierUnavailable, match="hiccups"):
        await made.delete_content("page", "acme")
    assert deleted == ["page"]
    assert made._undeleted == {("page", "acme")}
    assert await made.delete_content("page", "acme") == 2
    assert deleted == ["page", "page", "page settled"]
    assert not made._undeleted


@pytest.mark.parametrize(
    "answers", [[RayActorError(), None], [None], DeploymentUnavailableError(DeploymentID("p", "a"))]
)
async def test_what_a_worker_that_is_missing_keeps_on_its_disk_goes_when_there_is_another(answers: Any):
    deleted: list[str] = []
    workers, others = Workers(answers, [None, None]), (Workers([1], []), Workers([None], []))
    made = keeper(deleted, workers, 2, *others)
    assert await made.delete_content("page", "acme") == 2, "no error: its memory is gone with it"
    assert deleted == ["page"]
    assert made._undeleted == {("page", "acme")}
    assert await made.delete_content("page", "acme") == 2
    assert all(one.called == [("forget", "page", "acme")] * 2 for one in (workers, *others))
    assert deleted == ["page", "page", "page settled"]
    assert not made._undeleted


async def test_what_a_worker_that_leaves_may_write_last_goes_too(states: dict[str, int]):
    deleted: list[str] = []
    made = keeper(deleted, Workers([None], [None]))
    states.update(RUNNING=1, STOPPING=1)
    await made.delete_content("page", "acme")
    assert made._undeleted == {("page", "acme")}
    states.pop("STOPPING")
    await made.delete_content("page", "acme")
    assert deleted == ["page", "page", "page settled"]
    assert not made._undeleted


async def test_a_worker_that_cannot_be_reached_for_a_while_is_asked_again():
    made = keeper([], Workers([ActorUnavailableError("no answer", bytes(16))]))
    with pytest.raises(ActorUnavailableError):
        await made.delete_content("page", "acme")
    assert made._undeleted == {("page", "acme")}


async def test_what_is_deleted_leaves_the_front_ends_memory():
    sized = SimpleNamespace(mm_processor_cache_gb=1)
    cache = MultiModalProcessorOnlyCache(SimpleNamespace(get_multimodal_config=lambda: sized))
    for name in ("page", "other"):
        cache.get_and_update_item((MultiModalKwargsItem.dummy(), []), name)
    documents = Documents(SimpleNamespace(encode=lambda text, **_: [1, 2]))
    documents.mark("page", "words")
    with ThreadPoolExecutor(1) as executor:
        forgets = ForgetRegistry()
        forgets.group().register(documents)
        forgets.group(executor.submit).register(ProcessedImages(cache))
        await forgets.forget("page", "acme")
        await forgets.forget("unknown", "acme")
    assert [cache.is_cached([name])[0] for name in ("page", "other")] == [False, True]
    assert not documents._kept


async def test_what_ray_knows_of_a_lost_worker_is_for_the_log(caplog: pytest.LogCaptureFixture):
    async def response() -> None:
        raise RayActorError

    with caplog.at_level(logging.WARNING), pytest.raises(RoleUnavailable) as caught:
        await answered(response())
    assert "\n" not in str(caught.value)
    details = "The actor died.\n\tpid: 17\n\tip: 10.0.0.1"
    assert str(lost(ValueError(details))) == "The actor died."
    assert "10.0.0.1" in caplog.text


async def test_a_deletion_that_cannot_be_finished_now_is_owed_and_no_error(caplog: pytest.LogCaptureFixture):
    async def gone() -> None:
        raise TierUnavailable("disk: /srv/x")

    class Cache:
        def forget(self, content: str, tenant: str) -> None:
            forgotten.append(content)

    class Broken:
        def forget(self, content: str, tenant: str) -> None:
            raise ValueError("a defect")

    forgotten: list[str] = []
    ingress = object.__new__(Ingress)
    ingress._forgets = ForgetRegistry()
    for cache in (Broken(), Cache()):
        ingress._forgets.group().register(cache)
    remote = SimpleNamespace(remote=lambda *_: gone())
    ingress._roles = SimpleNamespace(library=SimpleNamespace(delete_content=remote))
    with caplog.at_level(logging.WARNING):
        await ingress._forget("content", "acme")
    assert caplog.text.count("is not deleted yet") == 2, "the defect, and what the keeper has still to do"
    assert forgotten == ["content"]
    with pytest.raises(ValueError, match="a defect"):
        await ingress.forget("content", "acme")  # by which the keeper knows that it has to ask again


async def test_a_cache_that_fails_leaves_nothing_in_a_prefill_workers_library_and_the_deletion_pending():
    def broken(content: str, tenant: str) -> None:
        raise ValueError("a defect")

    worker, deleted = prefill_worker(), list[str]()
    worker._linker = SimpleNamespace(forgets=ForgetRegistry())
    worker._linker.forgets.group().register(SimpleNamespace(forget=broken))
    worker._library.delete_content = lambda content, tenant: deleted.append(content)
    with pytest.raises(ValueError, match="a defect"):
        await worker.forget("page", "acme")
    assert deleted == ["page"]


async def test_a_lease_is_renewed_on_all_prefill_workers_and_none_is_missed(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(ray_roles, "_RENEWAL_SECONDS", 0.05)
    workers = Workers([LeaseState.UNKNOWN, LeaseState.READ, RayActorError(), HANGS])
    roles = RayRoles({"prefill": workers, "decode": SimpleNamespace(options=lambda **_: None), "library": None}, NOBODY)
    assert await roles.renew("lease-1") is LeaseState.READ
    assert workers.called == [("renew", "lease-1")]
    roles.prefill = Workers([LeaseState.UNKNOWN, RayActorError()])
    assert await roles.renew("lease-1") is LeaseState.UNKNOWN, "the one that is gone may have held it"


async def test_all_prefill_workers_are_told_an_answer_and_what_fails_costs_nothing(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(ray_roles, "_RENEWAL_SECONDS", 0.05)
    workers = Workers([False, RayActorError(), HANGS])
    roles = RayRoles({"prefill": workers, "decode": SimpleNamespace(options=lambda **_: None), "library": None}, NOBODY)
    await roles.keep_answer("lease-1", [7, 8])
    assert workers.called == [("keep_answer", "lease-1", (7, 8), None)]
    worker, told, read = prefill_worker(), list[Any](), Future[bool]()

    def keep_answer(*answer: Any) -> Future[bool]:
        told.append(answer)
        return read

    worker._loop.keep_answer = keep_answer
    monkeypatch.setattr("serving.replicas.prefill.replica_name", lambda: "own")
    assert not await worker.keep_answer(f"{lease_owner(1, 'another')}-1", (7, 8), {"remote_request_id": "answer"})
    own = f"{lease_owner(1, 'own')}-1"
    keeping = asyncio.create_task(worker.keep_answer(own, (7, 8), {"remote_request_id": "answer"}))
    await asyncio.sleep(0.02)
    assert told == [(own, (7, 8), {"remote_request_id": "answer"})]
    assert not keeping.done(), "the decode worker must hold it"
    read.set_result(True)
    assert await keeping


@pytest.mark.parametrize(
    ("prefill", "is_told"),
    [([False, True], True), ([False, False], False), ([RayActorError()], False)],
    ids=["read", "not read", "the worker is gone"],
)
async def test_all_decode_workers_are_told_that_an_answer_was_handed_back_once_vllm_was(
    monkeypatch: pytest.MonkeyPatch, prefill: list[Any], is_told: bool
):
    monkeypatch.setattr(ray_roles, "_RENEWAL_SECONDS", 0.05)
    decode = Workers([None, RayActorError()])
    decode.options = lambda **_: None  # type: ignore[attr-defined]
    roles = RayRoles({"prefill": Workers(prefill), "decode": decode, "library": None}, NOBODY)
    await roles.keep_answer("lease-1", [7, 8], {"remote_request_id": "answer"})
    assert decode.called == ([("end_hand_back", "answer")] if is_told else []), "vLLM holds it else for its time"


async def test_a_prompt_is_planned_once_host_memory_has_given_back_what_it_begins_with():
    worker, coming, planned = prefill_worker(), Future[None](), list[str]()
    worker._loop.bring_back = lambda request: coming
    worker._linker = SimpleNamespace(plan=lambda request, given: planned.append(request.request_id))
    planning = asyncio.get_running_loop().run_in_executor(None, worker._plan, LinkRequest("request", [0] * 8), {})
    await asyncio.sleep(0.05)
    assert not planned
    coming.set_result(None)
    await planning
    assert planned == ["request"]


async def test_a_pair_that_is_busy_or_gone_is_not_warmed_up_and_the_others_are():
    outcomes = [Overloaded("full"), RoleUnavailable("gone"), None, None]
    warmed: list[str] = []

    class Roles(RayRoles):
        def __init__(self) -> None:
            pass

        async def link(self, request: Any, *_: Any) -> Any:
            if (error := outcomes.pop(0)) is not None:
                raise error
            return SimpleNamespace(transfer={})

        async def generate(self, token_ids: Any, transfer: Any, params: Any, request_id: str, **_: Any) -> Any:
            warmed.append(request_id)
            yield

    two: Any = SimpleNamespace(least_replicas=2)
    await Roles().warm_up(cast(Any, SimpleNamespace(prefill=two, decode=two)))
    assert sorted(warmed) == ["warm-up-2", "warm-up-3"]
    outcomes[:] = [None, ValueError("a defect"), None, None]
    with pytest.raises(ValueError, match="a defect"):
        await Roles().warm_up(cast(Any, SimpleNamespace(prefill=two, decode=two)))


async def test_an_encoder_that_encodes_nothing_any_more_is_not_healthy():
    lost = True

    def encode(items: list[Any]) -> list[Any]:
        if lost:
            raise torch.AcceleratorError("CUDA error")
        return items

    with ThreadPoolExecutor(1) as thread:
        worker = object.__new__(VisionEncoder)
        worker._encoder, worker._thread, worker._failing = SimpleNamespace(encode=encode), thread, 0
        worker._meter, worker._waiting = WorkMeter(), 0
        for _ in range(2):
            with pytest.raises(RuntimeError, match="CUDA"):
                await worker.encode([])
        await worker.check_health()
        lost = False
        await worker.encode([])
        lost = True
        for _ in range(3):
            await worker.check_health()
            with pytest.raises(RuntimeError, match="CUDA"):
                await worker.encode([])
        with pytest.raises(RuntimeError, match="failed 3 times in a row"):
            await worker.check_health()


async def test_a_lease_is_abandoned_outside_of_the_request_which_serve_may_be_cancelling():
    """With a cancelled request go the calls in its name that have no replica yet; this one has to arrive."""
    sent: list[tuple[Any, ...]] = []

    def remote(*arguments: Any) -> None:
        sent.append((*arguments, context._get_serve_request_context()._internal_request_id))

    decode = SimpleNamespace(options=lambda **_: None, abandon=SimpleNamespace(remote=remote))
    roles = RayRoles({"prefill": None, "decode": decode, "library": None}, NOBODY)
    context._set_request_context(_internal_request_id="cancelled")
    await roles.abandon({"remote_request_id": "lease-1"}, 2)
    assert sent == [({"remote_request_id": "lease-1"}, 2, "")]


async def test_a_role_that_does_not_answer_is_not_available_and_named(monkeypatch: pytest.MonkeyPatch):
    def silent() -> Any:
        return asyncio.get_running_loop().create_future()

    def well() -> Any:
        answer = silent()
        answer.set_result(None)
        return answer

    def roles(prefill: Any, decode: Any) -> RayRoles:
        prefill, decode = (SimpleNamespace(check_health=SimpleNamespace(remote=remote)) for remote in (prefill, decode))
        decode.options = lambda **_: decode
        return RayRoles({"prefill": prefill, "decode": decode, "library": None}, NOBODY, canary_timeout_s=0.04)

    monkeypatch.setattr("serving.frontend.ray_roles.HEALTH_SECONDS", 0.01)
    await roles(well, well).check_health()
    with pytest.raises(RoleUnavailable, match=r"decode: no answer within 0\.05 s"):
        await roles(well, silent).check_health()

    def stalled() -> Any:
        answer = silent()
        answer.set_exception(EngineStalled("the engine has computed nothing for 5 s"))
        return answer

    with pytest.raises(RoleUnavailable, match="prefill: the engine has computed nothing for 5 s"):
        await roles(stalled, well).check_health()
