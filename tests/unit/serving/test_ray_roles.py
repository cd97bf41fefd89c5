"""The roles over Ray Serve handles: what is lost on the way comes out in our words, what a role raised as it did."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import ActorUnavailableError, RayActorError, RayTaskError
from ray.serve._private.common import DeploymentID
from ray.serve.exceptions import DeploymentUnavailableError

from prefill_workers.protocol import LeaseState, Overloaded, Refusal, lease_owner
from serving.errors import NoReplica, RoleUnavailable
from serving.frontend import reachability
from serving.frontend.ray_calls import answered, answered_by_all, answers_of_all, has_died
from serving.frontend.ray_roles import RayRoles

TRANSFER = {"remote_request_id": f"{lease_owner(17, 'holder')}-3"}
ONE: Any = SimpleNamespace(n=1)
LOST = [
    RayActorError(error_msg="The actor died unexpectedly.\n\tactor_id: 1234"),
    ActorUnavailableError("no answer\n\tip: 10.0.0.1", bytes(16)),
    DeploymentUnavailableError(DeploymentID("prefill")),
]


def raised(cause: BaseException) -> RayTaskError:
    """What Ray makes of a role's own error."""
    return RayTaskError("link", "a remote traceback", cause).as_instanceof_cause()


class Response:
    """A call's answer: awaited, it gives or raises `outcome`; without one it never does."""

    def __init__(self, outcome: Any = None, *, ever: bool = True) -> None:
        self.outcome, self.ever = outcome, ever
        self.cancelled = False

    def __await__(self):
        if not self.ever:
            yield from asyncio.Event().wait().__await__()
        if isinstance(self.outcome, BaseException):
            raise self.outcome
        return self.outcome

    async def get_async(self) -> Any:
        return await self

    def cancel(self) -> None:
        self.cancelled = True


class Said(str):
    """An output of a decode worker, of one choice."""

    outputs = (SimpleNamespace(index=0),)


class Stream:
    """A stream of items, of which the one that is an error is raised; the last is followed by silence unless `ends`."""

    def __init__(self, *items: Any, ends: bool = True) -> None:
        self.items, self.ends = list(items), ends
        self.cancelled = False

    def __aiter__(self) -> Stream:
        return self

    async def __anext__(self) -> Any:
        await asyncio.sleep(0)
        if not self.items:
            if self.ends:
                raise StopAsyncIteration
            await asyncio.Event().wait()
        item = self.items.pop(0)
        if isinstance(item, BaseException):
            raise item
        return Said(item) if isinstance(item, str) else item

    def cancel(self) -> None:
        self.cancelled = True


class Role:
    """A handle whose every method is answered by `response`, and broadcasts by `answers`."""

    def __init__(self, response: Any = None, answers: Sequence[Any] | Exception = ()) -> None:
        self.response, self.answers = response, answers
        self.called: list[tuple[Any, ...]] = []

    def options(self, **_: Any) -> Role:
        return self

    def __getattr__(self, method: str) -> Any:
        def remote(*arguments: Any) -> Any:
            self.called.append((method, *arguments))
            return self.response

        return SimpleNamespace(remote=remote)

    def broadcast(self, method: str, *arguments: Any) -> Any:
        self.called.append((method, *arguments))

        async def results_async(return_exceptions: bool, timeout_s: float | None = None) -> Sequence[Any]:
            assert return_exceptions, "one that is lost must not hide the others"
            if isinstance(self.answers, Exception):  # there is none
                raise self.answers
            return self.answers

        async def one_by_one() -> list[Any]:
            return [Response(answer) for answer in await results_async(True)]

        return SimpleNamespace(results_async=results_async, _fetch_replica_results_async=one_by_one)


def roles(**handles: Any) -> RayRoles:
    return RayRoles({name: handles.get(name, Role()) for name in ("prefill", "decode", "library")}, Role())


async def told(stream: Stream, got: list[Any] | None = None) -> list[Any]:
    """What `generate` yields of a decode worker's stream."""
    got = [] if got is None else got
    async for output in roles(decode=Role(stream)).generate([1], TRANSFER, ONE, "id"):
        got.append(output)
    return got


@pytest.mark.parametrize("error", LOST, ids=lambda error: type(error).__name__)
async def test_a_role_that_is_lost_is_unavailable_in_one_line_without_ids(error: Exception):
    with pytest.raises(RoleUnavailable) as unavailable:
        await answered(Response(error))
    assert unavailable.value.__cause__ is error
    assert str(unavailable.value) in (str(error).partition("\n")[0], "a replica does not answer")
    assert not re.search(r"\n|1234|0000|10\.0\.0\.1", str(unavailable.value)), "these are for the log"


@pytest.mark.parametrize(("prompt", "answer"), [([100, 120], [120, 80]), ([80, 100], [100]), ([100], [80])])
async def test_the_longest_sequence_finds_room_on_all_workers_of_both_roles(prompt: list[int], answer: list[int]):
    handles = (Role(Response(replicas[0]), replicas) for replicas in (prompt, answer))
    assert await roles(**dict(zip(("prefill", "decode"), handles, strict=True))).longest() == 80


async def test_what_a_role_raised_comes_as_it_raised_it():
    assert await answered(Response("an answer")) == "an answer"
    own = Overloaded("the queue is full")
    with pytest.raises(Overloaded) as again:
        await answered(Response(raised(own)))
    assert again.value is own
    whole = raised(SystemExit(1))  # no error of ours: Ray's own word for it
    with pytest.raises(RayTaskError) as unknown:
        await answered(Response(whole))
    assert unknown.value is whole


async def test_a_refusal_is_raised_where_it_was_asked_for():
    with pytest.raises(Overloaded, match="full"):
        await answered(Response(Refusal(Overloaded("full"))))
    got: list[Any] = []
    with pytest.raises(Overloaded, match="full"):
        await told(Stream("a", Refusal(Overloaded("full"))), got)
    assert got == ["a"]


async def test_a_call_is_cancelled_with_whoever_waits_for_it():
    response = Response(ever=False)
    waiting = asyncio.create_task(roles(prefill=Role(response)).link(SimpleNamespace(), (), ()))
    await asyncio.sleep(0)
    assert not response.cancelled
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert response.cancelled


@pytest.mark.parametrize("error", LOST, ids=lambda error: type(error).__name__)
async def test_a_replica_that_is_lost_among_others_is_told_once_all_were_called(error: Exception):
    role = Role(answers=[1, error, ValueError("not looked at")])
    with pytest.raises(RoleUnavailable) as unavailable:
        await answered_by_all(role, "allow", "patched")
    assert unavailable.value.__cause__ is error
    assert role.called == [("allow", "patched")]


async def test_a_role_without_a_replica_is_not_available():
    with pytest.raises(RoleUnavailable) as unavailable:
        await answered_by_all(Role(answers=LOST[2]), "stats")
    assert unavailable.value.__cause__ is LOST[2]


async def test_answers_of_all_replicas_and_what_one_of_them_raised():
    assert await answered_by_all(Role(answers=(1, 2)), "allow") == [1, 2]
    own = ValueError("its own")
    with pytest.raises(ValueError, match="its own") as again:
        await answered_by_all(Role(answers=[1, own]), "allow")
    assert again.value is own


async def test_all_answers_are_told_apart_and_a_role_without_a_replica_gives_none():
    answers = [1, *LOST, ValueError("its own")]
    assert await answers_of_all(Role(answers=answers), "follow") == answers
    assert await answers_of_all(Role(answers=LOST[2]), "follow") == []
    assert [has_died(error) for error in answers[1:]] == [True, False, False, False], "else it remembers"


async def test_answers_that_come_late_are_a_time_out():
    with pytest.raises(TimeoutError):
        await answers_of_all(Role(answers=TimeoutError()), "apply_decisions", timeout_s=1.0)


async def test_a_stream_that_ends_is_not_cancelled():
    stream = Stream("a", "b")
    assert await told(stream) == ["a", "b"]
    assert not stream.cancelled


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        *((error, RoleUnavailable) for error in LOST),
        (raised(Overloaded("full")), Overloaded),
        (raised(SystemExit(1)), RayTaskError),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else "",
)
async def test_a_stream_that_breaks_off_says_why_and_is_cancelled(error: Exception, expected: type[Exception]):
    stream, got = Stream("a", error, "never"), []
    with pytest.raises(expected):
        await told(stream, got)
    assert got == ["a"]
    assert stream.cancelled


async def test_a_stream_is_cancelled_with_whoever_reads_it():
    stream, got = Stream("a", ends=False), []
    reading = asyncio.create_task(told(stream, got))
    while not got:
        await asyncio.sleep(0)
    assert not stream.cancelled
    reading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reading
    assert stream.cancelled


async def test_closing_the_generator_cancels_its_stream():
    stream = Stream("a", "b")
    outputs = roles(decode=Role(stream)).generate([1], TRANSFER, ONE, "id")
    assert await anext(outputs) == "a"
    await outputs.aclose()
    assert stream.cancelled


@pytest.fixture
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("QUIET_S", "PERIOD_S", "PATIENCE_S", "LOST_S"):
        monkeypatch.setattr(reachability, name, 0.02)


@pytest.mark.usefixtures("_impatient")
@pytest.mark.parametrize("answers", [LOST[2], [LOST[1]], [TimeoutError()]], ids=["none", "unreachable", "silent"])
async def test_a_link_to_a_role_without_a_replica_that_answers_is_no_wait_for_ever(answers: Any):
    response = Response(ever=False)
    with pytest.raises(NoReplica, match="no replica of the prefill role answers"):
        await roles(prefill=Role(response, answers)).link(SimpleNamespace(), (), ())
    assert response.cancelled


@pytest.mark.usefixtures("_impatient")
async def test_a_generation_waits_for_kv_only_while_the_replica_that_holds_it_answers():
    stream = Stream(ends=False)
    handles = {"decode": Role(stream, ["decodes"]), "prefill": Role(answers=["another"])}
    with pytest.raises(RoleUnavailable, match="holds the prompt's KV"):
        await anext(roles(**handles).generate([1], TRANSFER, ONE, "id"))
    assert stream.cancelled
    handles["prefill"] = Role(answers=["another", "holder"])
    waiting = asyncio.ensure_future(anext(roles(**handles).generate([1], TRANSFER, ONE, "id")))
    await asyncio.sleep(0.2)
    assert not waiting.done()
    waiting.cancel()


@pytest.mark.usefixtures("_impatient")
async def test_an_answer_whose_kv_was_pulled_needs_nobody_who_held_it():
    """An answer that comes whole says nothing until its end: a renewal tells that its KV was read."""
    stream, prefill = Stream(ends=False), Role(answers=[LeaseState.READ])
    made = roles(decode=Role(stream, ["decodes"]), prefill=prefill)
    waiting = asyncio.ensure_future(anext(made.generate([1], TRANSFER, ONE, "id")))
    await asyncio.sleep(0)
    assert await made.renew(TRANSFER["remote_request_id"]) is LeaseState.READ
    prefill.answers = ["another"]
    await asyncio.sleep(0.2)
    assert not waiting.done()
    waiting.cancel()
