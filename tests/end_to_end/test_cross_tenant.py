"""What tenants share, the dynamic library, and what they do not, everything else: by answer, listing, error or time."""

from __future__ import annotations

import math
import random
from typing import Any

import openai
import pytest
from client import Service, picture, png, user

from kvstore.records.keys import DYNAMIC_TENANT
from kvstore.tiers.paths import tenant_digest

pytestmark = pytest.mark.service

ONE, TWO, OPS = "key-of-one", "key-of-two", "key-of-ops"


def page(file_id: str) -> dict[str, Any]:
    return {"type": "file", "file": {"file_id": file_id}}


def ask(service: Service, key: str, *parts: Any) -> dict[str, Any]:
    """The `orbit` report of a tenant's question, once what it taught is stored."""
    answer = service.openai(key).chat.completions.create(
        model=service.model, messages=user(*parts), max_tokens=2, temperature=0
    )
    service.settle()
    return answer.to_dict()["orbit"]


def points(report: dict[str, Any]) -> list[str]:
    return [chunk["operating_point"] for chunk in report["chunks"]]


def upload(service: Service, key: str, number: int) -> str:
    return service.openai(key).files.create(file=("page.png", png(number)), purpose="vision").id


# -- the dynamic library ----------------------------------------------------------------------------------------------


def test_a_reference_is_encoded_for_one_tenant_and_serves_all(guarded: Service):
    shared = upload(guarded, OPS, 401)
    with pytest.raises(openai.NotFoundError):
        ask(guarded, ONE, page(shared), "?")
    store = guarded.openai(OPS).vector_stores.create(name="pages", file_ids=[shared])
    assert [s.id for s in guarded.openai(ONE).vector_stores.list()] == [store.id]
    assert points(ask(guarded, ONE, page(shared), "What is this?")) == ["encoded"]
    second = ask(guarded, TWO, page(shared), "And this?")
    assert (points(second), second["vision_tokens_encoded"]) == (["recomputed"], 0)
    assert points(ask(guarded, TWO, page(shared), "And this?")) == ["patched"]
    assert points(ask(guarded, OPS, page(shared), "Whose?")) == ["recomputed"]
    assert points(ask(guarded, TWO, picture(401), "Mine?")) == ["encoded"], "the same bytes, uploaded, are one's own"
    guarded.openai(OPS).vector_stores.delete(store.id)


def test_taking_a_file_out_of_its_last_store_deletes_its_kv_everywhere(guarded: Service):
    boss, shared = guarded.openai(OPS), upload(guarded, OPS, 402)
    stores = [boss.vector_stores.create(name=str(n), file_ids=[shared]).id for n in range(2)]
    ask(guarded, ONE, page(shared), "What?")
    boss.vector_stores.files.delete(shared, vector_store_id=stores[0])
    assert points(ask(guarded, TWO, page(shared), "What?")) == ["recomputed"], "another store still holds it"
    library = guarded.root / "library"
    everybodys = f"records/*/*/{tenant_digest(DYNAMIC_TENANT)}/*/*.arrow"
    assert list(library.glob(everybodys))
    boss.vector_stores.files.delete(shared, vector_store_id=stores[1])
    assert not list(library.glob(everybodys))
    assert not list(library.glob(f"by-content/{tenant_digest(DYNAMIC_TENANT)}/*/*"))
    with pytest.raises(openai.NotFoundError):
        ask(guarded, ONE, page(shared), "What?")
    boss.vector_stores.files.create(stores[0], file_id=shared)
    assert points(ask(guarded, ONE, page(shared), "What?")) == ["encoded"], "no worker's memory had it either"
    assert boss.files.delete(shared).deleted
    assert boss.vector_stores.retrieve(stores[0]).file_counts.total == 0
    for store in stores:
        boss.vector_stores.delete(store)


def test_only_an_administrator_maintains_the_dynamic_library(guarded: Service):
    own, boss = upload(guarded, ONE, 403), guarded.openai(OPS)
    shared = boss.vector_stores.create(name="everybody's").id
    with pytest.raises(openai.PermissionDeniedError, match="administrator"):
        guarded.openai(ONE).vector_stores.files.create(shared, file_id=own)
    with pytest.raises(openai.PermissionDeniedError, match="administrator"):
        guarded.openai(ONE).vector_stores.delete(shared)
    boss.vector_stores.delete(shared)


def test_a_tenants_store_is_its_own(guarded: Service):
    own = upload(guarded, ONE, 404)
    mine = guarded.openai(ONE).vector_stores.create(name="mine", file_ids=[own]).id
    assert [store.id for store in guarded.openai(ONE).vector_stores.list()] == [mine]
    assert list(guarded.openai(TWO).vector_stores.list()) == []
    with pytest.raises(openai.NotFoundError):
        guarded.openai(TWO).vector_stores.retrieve(mine)
    with pytest.raises(openai.NotFoundError):
        guarded.openai(TWO).vector_stores.delete(mine)
    guarded.openai(ONE).vector_stores.delete(mine)


# -- isolation --------------------------------------------------------------------------------------------------------


def test_another_tenants_file_is_as_unknown_as_one_that_never_was(guarded: Service):
    theirs = upload(guarded, ONE, 411)
    nobodys = theirs[:-8] + "00000000"
    client = guarded.openai(TWO)

    def refusal(call: Any, file_id: str) -> str:
        with pytest.raises(openai.NotFoundError) as caught:
            call(file_id)
        return caught.value.response.text.replace(file_id, "ID")

    for call in (
        client.files.retrieve,
        client.files.content,
        client.files.delete,
        lambda file_id: ask(guarded, TWO, page(file_id), "?"),
    ):
        assert refusal(call, theirs) == refusal(call, nobodys)
    seen, unseen = ([file.id for file in client.files.list(after=one)] for one in (theirs, nobodys))
    assert seen == unseen
    boss = guarded.openai(OPS)
    store = boss.vector_stores.create(name="mine").id
    adding = lambda file_id: boss.vector_stores.files.create(store, file_id=file_id)  # noqa: E731
    assert refusal(adding, theirs) == refusal(adding, nobodys)
    boss.vector_stores.delete(store)
    assert theirs not in [file.id for file in client.files.list()]
    assert guarded.openai(ONE).files.retrieve(theirs).id == theirs


def test_time_does_not_tell_what_another_tenant_holds(guarded: Service):
    """One has asked about an image, by all means that leave traces; two asks with it, and with one that nobody has."""

    def work() -> dict[str, int]:
        """What all requests so far made the roles do."""
        stats = guarded.role("PrefillWorker", "stats")
        loop, library = stats["loop"], stats["library"]
        # how many looks for what is absent share one read depends on when they meet: they are not counted
        done = {name: getattr(library, name) for name in ("hits", "memory_hits", "tier_hits")}
        done |= {"forwards": loop.forwards, "tokens": loop.tokens_forwarded}
        return done | {"images": guarded.role("VisionEncoder", "stats")["images"]}

    def observe(number: int) -> tuple[Any, float]:
        """Everything that a question of tenant two did, and the time to its first token."""
        before = work()
        report = ask(guarded, TWO, picture(number), "What is this?")
        after = work()
        counts = {name: report[name] for name in ("tokens_reused", "tokens_computed", "vision_tokens_encoded")}
        return (report["chunks"], counts, {name: after[name] - before[name] for name in after}), report["ttft_ms"]

    for number in (420, 421):  # whatever happens once only
        observe(number)
    done, times = [], {"held": list[float](), "unknown": list[float]()}
    chance = random.Random(7)
    for pair in range(12):
        held, unknown = 430 + 2 * pair, 431 + 2 * pair
        upload(guarded, ONE, held)
        for _ in range(2):
            report = ask(guarded, ONE, picture(held), "What is this?")
        assert points(report) == ["patched"]
        arms = [("held", held), ("unknown", unknown)]
        for name, number in chance.sample(arms, 2):
            what, ttft = observe(number)
            done.append(what)
            times[name].append(ttft)
    assert all(what == done[0] for what in done)
    assert rank_test(times["held"], times["unknown"]) > 1e-4


def rank_test(a: list[float], b: list[float]) -> float:
    """Two-sided p of the Mann-Whitney test (normal approximation) that neither sample tends to be the larger."""
    wins = sum((x > y) + 0.5 * (x == y) for x in a for y in b)
    deviation = math.sqrt(len(a) * len(b) * (len(a) + len(b) + 1) / 12)
    return math.erfc(abs(wins - len(a) * len(b) / 2) / deviation / math.sqrt(2))


def test_the_rank_test_rejects_what_is_apart_and_only_that():
    low, high = [float(n) for n in range(12)], [float(n) for n in range(100, 112)]
    assert rank_test(low, high) == rank_test(high, low) < 1e-4
    assert rank_test(low, low) == 1
    assert rank_test(low[::2] + high[::2], low[1::2] + high[1::2]) > 0.5
