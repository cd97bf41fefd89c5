"""The way through the roles when roles fail: a lost worker is tried once more, and no lease is left behind."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncGenerator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from engine_client_support import EOS, OUTPUTS, Roles, ask, client_of, tokens_of
from pydantic import ValidationError
from vllm.exceptions import GenerationError, RetryableRequestError, VLLMValidationError
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.sampling_params import RequestOutputKind, SamplingParams, StructuredOutputsParams

from infra import kv_window
from infra.hand_back import is_asked
from infra.kv_window import dropped, window_parameter
from infra.vllm_env import BLOCK_SIZE
from kvstore.catalog.index import Entry, scopes_of
from prefill_workers.modes import Mode
from prefill_workers.protocol import (
    ChunkSpan,
    Compaction,
    CompactionPolicy,
    CompactionRefused,
    LeaseState,
    LinkResult,
    Overloaded,
    PromptTooLarge,
    SessionOutcome,
)
from serving.errors import NoReplica, RoleUnavailable
from serving.frontend.errors import DeadlineExceeded, InvalidRequest, OverloadedError
from serving.frontend.fair_queue import FairQueue
from serving.frontend.prompt_segments import Segments
from serving.frontend.report import (
    PROMPTS_AT_ONCE,
    SURVIVORS_KNOW,
    ElasticOptions,
    KVReport,
    OrbitOptions,
    RequestTrace,
    SessionOptions,
    parse_options,
    set_trace,
)
from serving.settings import ElasticSettings


async def test_a_link_tells_which_chunks_have_a_known_patch_in_modes_that_use_any(monkeypatch: pytest.MonkeyPatch):
    spans = tuple(ChunkSpan(content, "text", 5 * i, 5 * i + 5, 5 * i, 5) for i, content in enumerate("ab"))
    monkeypatch.setattr(
        "serving.frontend.engine_client.segment",
        lambda prompt, *_: Segments(prompt["prompt_token_ids"], spans, (None, None)),
    )
    roles = Roles()
    for mode in ("auto", "full-reuse"):
        set_trace(RequestTrace(OrbitOptions(mode=mode)))
        client = client_of(roles)
        client.orderer.formed([Entry(scopes_of("local", (), "a")[0], "a", (), ordered=True)])
        prompt = {"type": "token", "prompt_token_ids": list(range(12))}
        assert [output async for output in client.generate(prompt, SamplingParams(), "request")]
    assert [request.patched for request in roles.linked] == [(True, False), ()]


async def test_outputs_carry_the_callers_id_the_prompt_and_what_was_reused():
    trace = RequestTrace(OrbitOptions(mode="exact"), tenant="acme", prefix_tokens=(1, 2))
    roles = Roles()
    outputs = await ask(roles, n=2, trace=trace)
    assert len(outputs) == OUTPUTS
    assert (outputs[0].request_id, outputs[0].prompt_token_ids, outputs[0].num_cached_tokens) == (
        "request",
        list(range(12)),
        5,
    )
    (request,) = roles.linked
    assert (request.mode, request.tenant, request.prefix, request.readers) == (Mode.EXACT, "acme", (1, 2), 2)
    assert trace.report.tokens_reused == 5
    assert trace.report.ttft_ms is not None
    assert roles.abandoned == []


async def test_a_served_request_is_logged_once_with_the_chunks_that_could_trade_places():
    offered: list[Any] = []
    client = client_of(Roles(generate=[RoleUnavailable("gone")]))
    client.access_log = SimpleNamespace(offer=lambda *arguments: offered.append(arguments))
    trace = RequestTrace(tenant="acme")
    trace.groups = [0, 0]
    set_trace(trace)
    prompt = {"type": "token", "prompt_token_ids": list(range(12))}
    assert len([output async for output in client.generate(prompt, SamplingParams(), "request")]) == OUTPUTS
    ((request, groups, result, _),) = offered
    assert (request.tenant, groups, result.lease) == ("acme", [0, 0], "lease-2")


async def test_a_prompt_counts_once_however_it_ends():
    prompt, observed = {"type": "token", "prompt_token_ids": list(range(12))}, list[Any]()

    def asked(roles: Roles) -> AsyncGenerator[Any, None]:
        client = client_of(roles)
        client.observe = observed.append
        set_trace(RequestTrace())
        return client.generate(prompt, SamplingParams(output_kind=RequestOutputKind.DELTA), "request")

    assert len([output async for output in asked(Roles())]) == OUTPUTS
    assert [report.tokens_reused for report in observed] == [5]
    with pytest.raises(ValueError, match="too large"):
        await anext(asked(Roles(link=[ValueError("too large")])))
    assert len(observed) == 2
    left = asked(Roles())
    await anext(left)
    await left.aclose()
    assert len(observed) == 3


async def test_every_prompt_of_a_completion_counts_and_has_a_place_for_itself():
    """A worker's queue is not filled by one request, which could then never be answered."""
    prompt, observed = {"type": "token", "prompt_token_ids": list(range(12))}, list[Any]()
    roles = Roles()
    roles.admits = asyncio.Event()
    client = client_of(roles)
    client.observe, client._lease_seconds = observed.append, 180
    set_trace(RequestTrace(tenant="acme"))
    streams = [client.generate(prompt, SamplingParams(), str(number)) for number in range(PROMPTS_AT_ONCE + 8)]

    async def read(stream: AsyncGenerator[Any, None]) -> int:
        return len([output async for output in stream])

    reading = [asyncio.create_task(read(stream)) for stream in streams]
    await asyncio.sleep(0.05)
    assert len(roles.linked) == PROMPTS_AT_ONCE
    roles.admits.set()
    assert await asyncio.gather(*reading) == [OUTPUTS] * len(streams)
    assert {request.tenant for request in roles.linked} == {"acme"}
    assert [report.tokens_reused for report in observed] == [5] * len(streams)


async def test_every_choice_of_an_answer_has_a_place():
    roles = Roles()
    roles.admits = asyncio.Event()
    client = client_of(roles)
    client.queue, client._lease_seconds = FairQueue(places=8, most_of_one=8, most_waiting=8), 180
    set_trace(RequestTrace())
    prompt = {"type": "token", "prompt_token_ids": list(range(12))}
    answer = client.generate(prompt, SamplingParams(n=3), "request")
    reading = asyncio.create_task(anext(answer))
    await asyncio.sleep(0.02)
    assert client.queue.held == 3
    roles.admits.set()
    await reading
    await answer.aclose()
    assert client.queue.held == 0


@pytest.mark.parametrize(
    ("kind", "first_tokens", "known"),
    [
        (RequestOutputKind.FINAL_ONLY, [], False),
        (RequestOutputKind.DELTA, [], True),
        (RequestOutputKind.FINAL_ONLY, [7], True),
    ],
)
async def test_a_whole_answers_time_is_not_taken_for_its_first_tokens(
    kind: RequestOutputKind, first_tokens: list[int], known: bool
):
    trace = RequestTrace()
    set_trace(trace)
    prompt = {"type": "token", "prompt_token_ids": list(range(12))}
    outputs = client_of(Roles(first_tokens)).generate(prompt, SamplingParams(output_kind=kind), "request")
    assert [output async for output in outputs]
    assert trace.report.first_token == ("prefill" if first_tokens else "decode")
    assert (trace.report.ttft_ms is not None) == known


async def test_a_prompt_that_no_pool_has_room_for_is_the_clients_to_shorten():
    with pytest.raises(InvalidRequest, match="needs 9 KV blocks"):
        await ask(Roles(link=[PromptTooLarge("the prompt needs 9 KV blocks")]))


@pytest.mark.parametrize("first_tokens", [[], [7]])
async def test_an_answer_that_does_not_end_in_time_is_cancelled(first_tokens: list[int]):
    roles = Roles(first_tokens)
    roles.admits, roles.admits_after = asyncio.Event(), math.inf
    client, got = client_of(roles), list[Any]()
    client.request_timeout_s = 0.05
    set_trace(RequestTrace())
    prompt = {"type": "token", "prompt_token_ids": list(range(12))}
    params = SamplingParams(output_kind=RequestOutputKind.DELTA)

    async def read() -> None:
        async for output in client.generate(prompt, params, "request"):
            got.append(output)

    with pytest.raises(DeadlineExceeded, match=r"within 0\.05 s") as late:
        await read()
    assert late.value.http_status == 504
    assert tokens_of(got) == first_tokens
    assert roles.abandoned == [("lease-1", 1)], "what it held goes back"


async def test_a_workers_own_time_out_is_not_taken_for_the_deadline():
    client = client_of(Roles(link=[TimeoutError("a rank does not answer")]))
    client.request_timeout_s = 60
    set_trace(RequestTrace())
    prompt = {"type": "token", "prompt_token_ids": list(range(12))}
    with pytest.raises(TimeoutError, match="a rank"):
        await anext(client.generate(prompt, SamplingParams(), "request"))


@pytest.mark.parametrize("lost", ["link", "generate"])
async def test_a_worker_lost_before_the_first_token_costs_a_second_attempt(lost: str):
    roles = Roles(**{lost: [RoleUnavailable("gone")]})
    assert len(await ask(roles)) == OUTPUTS
    assert roles.calls.count(lost) == 2
    assert roles.abandoned == ([("lease-1", 1)] if lost == "generate" else [])


@pytest.mark.parametrize("first_tokens", [[], [7, 8]])
async def test_kv_that_cannot_be_pulled_costs_a_second_attempt(first_tokens: list[int]):
    roles = Roles(first_tokens)
    roles.lost_pulls = 1
    outputs = await ask(roles)
    assert tokens_of(outputs) == [*first_tokens[:1], 100, 101, 102]
    assert all(output.outputs[0].finish_reason is None for output in outputs)
    assert roles.calls.count("link") == 2
    assert roles.abandoned == [("lease-1", 1)]
    roles.lost_pulls = 2
    with pytest.raises(RetryableRequestError, match="could not be pulled"):
        await ask(roles)


async def test_a_second_loss_is_the_callers_to_know():
    roles = Roles(generate=[RoleUnavailable("gone"), RoleUnavailable("gone again")])
    with pytest.raises(RetryableRequestError, match="gone again"):
        await ask(roles, n=3)
    assert roles.abandoned == [("lease-1", 3), ("lease-2", 3)]


async def test_an_answer_goes_on_with_another_worker_behind_what_was_said():
    roles = Roles(first_tokens=[7], between=[None, RoleUnavailable("gone")])
    assert tokens_of(await ask(roles, max_tokens=20, seed=3)) == [7, 100, 101, 100, 101, 102]
    first, second = roles.linked
    assert second.token_ids == [*first.token_ids, 7, 100, 101]
    assert (second.chunks, second.mode, second.sampling) == (first.chunks, first.mode, None)
    (_, before), (given, after) = roles.generated
    assert given == second.token_ids
    assert (before.max_tokens, after.max_tokens) == (19, 17)
    assert (before.seed, after.seed) == (3, 5)
    assert roles.abandoned == []


async def test_a_second_loss_in_the_middle_of_an_answer_ends_it():
    roles = Roles(first_tokens=[7], between=[RoleUnavailable("gone"), RoleUnavailable("gone again")])
    with pytest.raises(GenerationError, match="gone again"):
        await ask(roles)
    assert roles.abandoned == []


async def test_the_report_is_of_the_link_that_an_answer_began_with():
    roles, trace = Roles(first_tokens=[7], between=[RoleUnavailable("gone")]), RequestTrace()
    roles.tokens_computed = [7, 70]
    await ask(roles, trace)
    assert len(roles.linked) == 2
    assert trace.report.tokens_computed == 7


async def test_a_worker_lost_behind_the_end_of_an_answer_costs_nothing():
    roles = Roles(first_tokens=[7], between=[None, None, RoleUnavailable("gone")])
    assert tokens_of(await ask(roles)) == [7, 100, 101, 102]
    assert roles.calls.count("link") == 1


async def test_of_an_answer_that_comes_as_a_whole_nothing_was_said_before_it_is_there():
    roles = Roles(first_tokens=[7], generate=[RoleUnavailable("gone"), RoleUnavailable("gone again")])
    with pytest.raises(RetryableRequestError, match="gone again"):
        await ask(roles, output_kind=RequestOutputKind.FINAL_ONLY)


async def test_a_worker_lost_between_two_in_the_middle_of_an_answer_keeps_no_lease():
    roles = Roles(
        first_tokens=[7], between=[RoleUnavailable("gone")], generate=[None, RoleUnavailable("gone before it took KV")]
    )
    with pytest.raises(GenerationError, match="before it took KV"):
        await ask(roles)
    assert roles.abandoned == [("lease-2", 1)]


async def test_an_answer_that_a_decode_engine_gave_from_the_start_ends_with_it():
    """What else is asked for, constraints, penalties, several answers, another one would not know."""
    roles = Roles(between=[RoleUnavailable("gone")])
    with pytest.raises(GenerationError, match="gone") as caught:
        await ask(roles)
    assert not isinstance(caught.value, RetryableRequestError)
    assert roles.calls.count("link") == 1
    assert roles.abandoned == []


# -- answers that begin on the prefill worker -------------------------------------------------------------------------


async def test_the_first_token_comes_with_the_link_and_the_decode_engine_goes_on_behind_it():
    roles, trace = Roles(first_tokens=[7]), RequestTrace()
    outputs = await ask(roles, trace=trace, max_tokens=20)
    assert tokens_of(outputs) == [7, 100, 101, 102]
    assert {(o.request_id, tuple(o.prompt_token_ids), o.num_cached_tokens) for o in outputs} == {
        ("request", tuple(range(12)), 5)
    }
    ((prompt, params),) = roles.generated
    assert (prompt, params.max_tokens) == ([*range(12), 7], 19)
    assert trace.report.first_token == "prefill"
    assert "decode" in trace.report.stages_ms
    assert roles.abandoned == []


@pytest.mark.parametrize("first_tokens", [[41], [], [EOS]], ids=["from prefill on", "by decode", "one token"])
async def test_the_worker_that_linked_a_prompt_is_told_its_answer(first_tokens: list[int]):
    roles = Roles(first_tokens=first_tokens)
    outputs = await ask(roles, temperature=0)
    await asyncio.sleep(0)
    assert roles.kept_answers == [("lease-1", tokens_of(outputs))]


@pytest.mark.parametrize("pulls", [True, False])
async def test_the_kv_of_an_answer_is_wanted_back_and_the_offer_goes_to_the_worker_alone(pulls: bool):
    offer = {"remote_request_id": "vllm's", "remote_block_ids": [[3]]}

    class Offering(Roles):
        async def generate(self, token_ids: Any, transfer: Any, *arguments: Any, **options: Any) -> Any:
            asked.append(is_asked(transfer))
            async for output in super().generate(token_ids, transfer, *arguments, **options):
                output.kv_transfer_params = offer if output.finished else None
                yield output

    asked: list[bool] = []
    roles = Offering()
    roles.reads_answers = pulls
    outputs = await ask(roles)
    await asyncio.sleep(0)
    assert asked == [pulls]
    assert roles.offers == [offer]
    assert {output.kv_transfer_params for output in outputs} == {None}


@pytest.mark.parametrize("kept", [12, 5])
async def test_a_reduced_prompts_answer_is_not_wanted_back(kept: int):
    """Its KV knows the entries that are left."""

    class Asked(Roles):
        async def generate(self, token_ids: Any, transfer: Any, *arguments: Any, **options: Any) -> Any:
            asked.append(is_asked(transfer))
            async for output in super().generate(token_ids, transfer, *arguments, **options):
                yield output

    asked: list[bool] = []
    await ask(Asked(kept=kept))
    assert asked == [kept == 12]


async def test_of_an_answer_that_moved_the_second_worker_is_told_what_is_behind_its_link():
    roles = Roles(first_tokens=[7], between=[None, RoleUnavailable("gone")])
    await ask(roles)
    await asyncio.sleep(0)
    assert roles.kept_answers == [("lease-2", [100, 101, 102])]


@pytest.mark.parametrize(
    ("trace", "params"), [(RequestTrace(OrbitOptions(mode="off")), {}), (None, {"n": 2})], ids=["off", "two answers"]
)
async def test_an_answer_that_no_next_turn_could_find_is_not_kept(trace: RequestTrace | None, params: dict[str, Any]):
    roles = Roles()
    await ask(roles, trace, **params)
    await asyncio.sleep(0)
    assert roles.generated
    assert not roles.kept_answers


@pytest.mark.parametrize("survived", [0, 2])
async def test_the_report_says_that_survivors_know_what_left(survived: int):
    class Sessions(Roles):
        async def link(self, *arguments: Any) -> LinkResult:
            return replace(await super().link(*arguments), session=SessionOutcome(prefix=1, survived=survived))

    trace = RequestTrace(OrbitOptions(session=SessionOptions(id="s")))
    await ask(Sessions(), trace)
    report = trace.document()["session"]
    assert (report["survived"], report.get("note")) == (survived, SURVIVORS_KNOW if survived else None)


async def test_the_first_token_is_there_before_a_decode_engine_is_asked():
    roles = Roles(first_tokens=[7], generate=[ValueError("the pool is too small")])
    client = client_of(roles)
    set_trace(RequestTrace())
    outputs = client.generate(
        {"type": "token", "prompt_token_ids": [1, 2]}, SamplingParams(output_kind=RequestOutputKind.DELTA), "request"
    )
    assert tokens_of([await anext(outputs)]) == [7]
    assert roles.calls == ["link"]
    with pytest.raises(ValueError, match="too small"):
        await anext(outputs)
    assert roles.abandoned == [("lease-1", 1)]


@pytest.mark.parametrize(("token", "asked"), [(7, {"max_tokens": 1}), (EOS, {})])
async def test_an_answer_of_one_token_gives_its_lease_back(token: int, asked: dict[str, Any]):
    roles = Roles(first_tokens=[token])
    outputs = await ask(roles, **asked)
    assert tokens_of(outputs) == [token]
    assert outputs[-1].finished
    assert (roles.generated, roles.abandoned) == ([], [("lease-1", 1)])


async def test_a_client_that_leaves_at_the_first_token_leaves_no_lease():
    roles = Roles(first_tokens=[7])
    set_trace(RequestTrace())
    prompt = {"type": "token", "prompt_token_ids": [1, 2]}
    outputs = client_of(roles).generate(prompt, SamplingParams(output_kind=RequestOutputKind.DELTA), "request")
    await anext(outputs)
    await outputs.aclose()
    assert (roles.calls, roles.abandoned) == (["link"], [("lease-1", 1)])


async def test_a_decode_worker_lost_behind_the_first_token_costs_a_second_link_and_no_token():
    """What was said stands, whatever the second link would have said."""
    offered: list[Any] = []
    roles, trace = Roles(first_tokens=[7, 8], generate=[RoleUnavailable("gone")]), RequestTrace()
    client = client_of(roles)
    client.access_log = SimpleNamespace(offer=lambda *arguments: offered.append(arguments))
    set_trace(trace)
    prompt = {"type": "token", "prompt_token_ids": [1, 2]}
    sampling = SamplingParams(output_kind=RequestOutputKind.DELTA)
    assert tokens_of([output async for output in client.generate(prompt, sampling, "request")]) == [7, 100, 101, 102]
    assert [prompt for prompt, _ in roles.generated] == [[1, 2, 7]] * 2
    assert roles.abandoned == [("lease-1", 1)]
    assert len(offered) == 1


@pytest.mark.parametrize(("asked", "wanted"), [({}, True), ({"logprobs": 1}, False), ({"stop": ["x"]}, False)])
async def test_only_what_the_prefill_worker_can_draw_is_asked_of_it(asked: dict[str, Any], wanted: bool):
    roles, trace = Roles(first_tokens=[7]), RequestTrace()
    outputs = await ask(roles, trace=trace, **asked)
    (request,) = roles.linked
    assert (request.sampling is not None) == wanted
    assert tokens_of(outputs)[0] == (7 if wanted else 100)
    assert trace.report.first_token == ("prefill" if wanted else "decode")


async def test_first_tokens_may_be_switched_off():
    roles = Roles(first_tokens=[7])
    client = client_of(roles)
    client._first_tokens = False
    set_trace(RequestTrace())
    prompt = {"type": "token", "prompt_token_ids": [1, 2]}
    sampling = SamplingParams(output_kind=RequestOutputKind.DELTA)
    assert tokens_of([output async for output in client.generate(prompt, sampling, "request")]) == [100, 101, 102]


async def test_a_queue_that_is_full_behind_the_first_token_is_no_429():
    """Which says that nothing was started."""
    roles = Roles(first_tokens=[7], generate=[RoleUnavailable("gone")], link=[None, Overloaded("9 links wait already")])
    with pytest.raises(GenerationError, match="9 links wait"):
        await ask(roles)


async def test_a_first_token_that_cannot_be_told_costs_no_lease():
    roles = Roles(first_tokens=[7])
    client = client_of(roles)
    client.input_processor.renderer = None
    set_trace(RequestTrace())
    with pytest.raises(AttributeError):
        await anext(client.generate({"type": "token", "prompt_token_ids": [1, 2]}, SamplingParams(), "request"))
    assert roles.abandoned == [("lease-1", 1)]


# -- refusals ---------------------------------------------------------------------------------------------------------


async def test_a_refused_request_gives_its_lease_back():
    roles = Roles(generate=[ValueError("needs 900 KV blocks")])
    with pytest.raises(ValueError, match="900 KV blocks"):
        await ask(roles)
    assert roles.abandoned == [("lease-1", 1)]


async def test_a_full_queue_is_a_429():
    with pytest.raises(OverloadedError, match="9 links wait"):
        await ask(Roles(link=[Overloaded("9 links wait already")]))


async def test_an_answer_that_nobody_reads_to_its_end_is_closed():
    roles = Roles()
    set_trace(RequestTrace())
    prompt = {"type": "token", "prompt_token_ids": [1, 2, 3]}
    outputs = client_of(roles).generate(prompt, SamplingParams(), "request")
    await anext(outputs)
    await outputs.aclose()
    assert roles.calls == ["link", "generate"]
    assert roles.abandoned == [], "the decode engine had the lease already"


async def test_while_a_decode_engine_lets_nobody_in_the_lease_is_renewed_and_no_longer():
    roles = Roles()
    roles.admits = asyncio.Event()
    outputs = await ask(roles)
    assert len(tokens_of(outputs)) == OUTPUTS
    await asyncio.sleep(0.1)
    assert roles.renewed == ["lease-1"] * 2


@pytest.mark.parametrize(("lease", "links"), [(LeaseState.HELD, 1), (LeaseState.READ, 1), (LeaseState.UNKNOWN, 2)])
async def test_what_is_pulled_after_a_lease_may_have_ended_is_not_believed(lease: LeaseState, links: int):
    roles = Roles()
    roles.admits, roles.lease = asyncio.Event(), lease
    asyncio.get_running_loop().call_later(0.15, roles.admits.set)
    roles.admits_after = math.inf
    outputs = await ask(roles)
    assert len(tokens_of(outputs)) == OUTPUTS
    assert len(roles.linked) == links, "what is in the blocks may be another prompt's"
    assert len(roles.renewed) == 1 or lease is not LeaseState.READ
    assert roles.abandoned == [], "it was pulled"


async def test_a_lease_is_renewed_until_every_choice_has_its_kv():
    class OneByOne(Roles):
        async def generate(self, token_ids: Any, transfer: Any, params: Any, request_id: str, **options: Any):
            for index in range(2):
                yield RequestOutput(request_id, None, None, None, [CompletionOutput(index, "", [1], None, None)], False)
                seen = len(self.renewed)
                await asyncio.sleep(0.1)
                renewed.append(len(self.renewed) - seen)

    roles, renewed = OneByOne(), list[int]()
    assert len(await ask(roles, n=2, temperature=1.0)) == 2
    assert renewed[0] > 0, "the second choice waits to be let in still"
    assert renewed[1] == 0


@pytest.mark.parametrize("tokens", [[5, 1000], [1000]])
async def test_a_token_that_the_model_does_not_have_is_refused_before_anything_is_sent(tokens: list[int]):
    roles = Roles()
    prompt = {"type": "token", "prompt_token_ids": tokens}
    with pytest.raises(VLLMValidationError, match="1000 is out of vocabulary"):
        client_of(roles).generate(prompt, SamplingParams(), "request")
    assert not roles.calls


async def test_more_choices_than_are_answered_are_refused_before_anything_is_sent():
    roles = Roles()
    with pytest.raises(VLLMValidationError, match="at most 128, not 129"):
        await ask(roles, n=129, temperature=1.0)
    assert not roles.calls


async def test_a_role_without_any_replica_is_not_asked_twice():
    """The first wait was long enough: a client is told within seconds, and a stream that has begun ends with it."""
    roles = Roles(link=[NoReplica("no replica of the prefill role answers"), None])
    with pytest.raises(RetryableRequestError, match="no replica of the prefill role"):
        await ask(roles)
    assert roles.calls == ["link"]
    roles = Roles(first_tokens=[7], between=[NoReplica("no replica of the decode role answers")])
    with pytest.raises(GenerationError) as told:
        await ask(roles)
    assert not isinstance(told.value, RetryableRequestError), "something was said already"
    assert roles.calls.count("link") == 1


async def test_a_compacted_prompt_is_named_by_as_many_ids_as_there_are_entries():
    """Whoever draws the first token; its ids are the client's own again in what it is told."""
    for first_tokens in ([], [7]):
        trace = RequestTrace(OrbitOptions(kv_budget=0.5, elastic=ElasticOptions(window=4)))
        roles = Roles(first_tokens, kept=6)
        outputs = await ask(roles, trace=trace, max_tokens=9)
        ((given, _),) = roles.generated
        assert given == [6, 7, 8, 9, 10, 11, *first_tokens]
        assert outputs[0].prompt_token_ids == list(range(12))
        assert roles.linked[0].compaction == Compaction(0.5, CompactionPolicy.EVICT, 4)
        kv = trace.report.kv
        assert kv is not None
        assert (kv.tokens, kv.kept, kv.bytes_handed_off, kv.window, kv.policy) == (12, 6, 600, 4, "evict")
        assert kv.first_token_saw == ("all" if first_tokens else "kept")


async def test_repetition_penalties_and_grammars_read_the_ids_of_the_prompt_so_that_all_of_them_stay():
    prompt = {"type": "token", "prompt_token_ids": [1, 2, 3, 1, 2, 3, 1, 2, 3]}
    for params, least in [
        (SamplingParams(), 0),
        (SamplingParams(repetition_penalty=1.2), 3),
        (SamplingParams(structured_outputs=StructuredOutputsParams(regex="a")), 3),
        (SamplingParams(thinking_token_budget=5), 9),
        (SamplingParams(thinking_token_budget=5, repetition_penalty=1.2), 9),
        (SamplingParams(presence_penalty=1.2, frequency_penalty=0.5, bad_words=["a"]), 0),  # of the answer alone
    ]:
        set_trace(RequestTrace(OrbitOptions(kv_budget=0.05)))
        roles = Roles()
        assert [output async for output in client_of(roles).generate(prompt, params, "request")]
        assert roles.linked[0].compaction.least == least


@pytest.mark.parametrize("asked", [{"n": 2, "temperature": 1.0}, {"logprobs": 0}], ids=str)
async def test_several_answers_and_log_probabilities_are_all_of_what_was_kept(asked: dict[str, Any]):
    """No first token is drawn from all KV, whose log-probability, or whose other choices, nobody could tell."""
    trace = RequestTrace(OrbitOptions(kv_budget=0.5, elastic=ElasticOptions(window=4)))
    roles = Roles([7], kept=6)
    await ask(roles, trace=trace, max_tokens=9, **asked)
    (request,), ((given, params),) = roles.linked, roles.generated
    assert (request.sampling, request.readers) == (None, asked.get("n", 1))
    assert (given, params.n, params.logprobs) == ([6, 7, 8, 9, 10, 11], asked.get("n", 1), asked.get("logprobs"))
    assert trace.report.kv is not None
    assert trace.report.kv.first_token_saw == "kept"


def test_entries_dropped_are_those_of_all_choices():
    trace = RequestTrace()
    trace.report.kv = KVReport(tokens=20, kept=20, bytes_handed_off=0, window=8)
    transfer = {BLOCK_SIZE: 16, **window_parameter(8)}
    trace.dropped(transfer, 20, [100, 60, 3])
    assert trace.report.kv.dropped == dropped(20, 100, 8, 16) + dropped(20, 60, 8, 16) > dropped(20, 100, 8, 16) > 0


async def test_an_answer_that_moves_is_linked_again_with_what_it_has_said():
    trace = RequestTrace(OrbitOptions(kv_budget=0.5))
    roles = Roles([7], kept=6, between=[RoleUnavailable("gone")])
    outputs = await ask(roles, trace=trace, max_tokens=9)
    assert tokens_of(outputs) == [7, 100, 100, 101, 102]
    first, second = roles.linked
    assert list(second.token_ids) == [*range(12), 7, 100]
    assert second.compaction == first.compaction
    assert [given for given, _ in roles.generated] == [[6, 7, 8, 9, 10, 11, 7], [8, 9, 10, 11, 7, 100]]


async def test_a_model_whose_kv_cannot_be_reduced_says_so_by_name():
    refused = CompactionRefused("kv_budget: its attention has sliding window")
    with pytest.raises(InvalidRequest, match=r"orbit\.kv_budget: its attention has sliding window"):
        await ask(Roles(link=[refused]), trace=RequestTrace(OrbitOptions(kv_budget=0.5)))


async def test_a_window_is_refused_before_anything_is_linked_where_decode_workers_take_none(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(kv_window, "is_cpu_build", lambda: False)
    roles = Roles([7])
    with pytest.raises(InvalidRequest, match=r"orbit\.elastic\.window: decode workers on GPUs"):
        await ask(roles, trace=RequestTrace(parse_options({"elastic": {"window": 8}})))
    assert roles.calls == []
    with pytest.raises(ValidationError, match=r"elastic\.window: decode workers on GPUs"):
        ElasticSettings(window=8)
    assert ElasticSettings().compaction == Compaction()


async def test_penalties_of_an_answer_that_moves_read_what_was_said_too():
    trace = RequestTrace(OrbitOptions(kv_budget=0.05, elastic=ElasticOptions(window=4)))
    roles = Roles([7], kept=13, between=[RoleUnavailable("gone")])
    await ask(roles, trace=trace, max_tokens=9, repetition_penalty=1.2)
    assert [request.compaction.least for request in roles.linked] == [12, 13]
    assert [request.compaction.window for request in roles.linked] == [4, 4]
    given, _ = roles.generated[1]
    assert given == [0, 1, 2, 3, 4, 5, 6, 8, 9, 10, 11, 7, 100]


async def test_a_service_may_set_what_requests_do_not_ask_for():
    roles = Roles()
    client = client_of(roles)
    client.compaction = Compaction(0.4, CompactionPolicy.MERGE, 64)
    prompt = {"type": "token", "prompt_token_ids": list(range(12))}
    for options in ({}, {"elastic": {"window": None}}, {"kv_budget": 1, "elastic": {"policy": "paper"}}):
        set_trace(RequestTrace(parse_options(options)))
        assert [output async for output in client.generate(prompt, SamplingParams(), "request")]
    assert [request.compaction for request in roles.linked] == [
        Compaction(0.4, CompactionPolicy.MERGE, 64),
        Compaction(0.4, CompactionPolicy.MERGE, None),
        Compaction(1.0, CompactionPolicy.PAPER, 64),
    ]


@pytest.mark.parametrize(
    ("options", "where"),
    [
        ({"kv_budget": 0.01}, "orbit.kv_budget"),
        ({"kv_budget": 2}, "orbit.kv_budget"),
        ({"elastic": {"policy": "best"}}, "orbit.elastic.policy"),
        ({"elastic": {"window": 0}}, "orbit.elastic.window"),
        ({"elastic": {"budget": 0.5}}, "orbit.elastic.budget"),
    ],
)
def test_what_no_budget_can_be_is_refused_by_its_field(options: dict[str, Any], where: str):
    with pytest.raises(InvalidRequest, match=where.replace(".", r"\.")):
        parse_options(options)
