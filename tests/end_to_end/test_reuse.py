"""What the service does not pay for twice, as its answers report it."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from client import Service, picture, png, user

pytestmark = pytest.mark.service


def points(answer: dict[str, Any]) -> list[str]:
    return [chunk["operating_point"] for chunk in answer["orbit"]["chunks"]]


def test_seen_images_are_linked_in_any_order_without_vision_or_prefill(service: Service):
    first = service.chat(user(picture(101), picture(102), picture(103), "What changes?"))
    assert points(first) == ["encoded"] * 3
    assert first["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    service.settle()

    again = service.chat(user(picture(103), "then", picture(101), "and", picture(102), "Which is best?"))
    orbit = again["orbit"]
    assert points(again)[:2] == ["patched"] * 2
    assert points(again)[2] in ("patched", "composed"), "by the set, or by its pairs, whichever was compiled first"
    assert orbit["vision_tokens_encoded"] == 0
    assert orbit["tokens_reused"] == orbit["prefix_tokens_reused"] + sum(chunk["tokens"] for chunk in orbit["chunks"])
    assert (
        orbit["tokens_reused"] + orbit["tokens_computed"] == orbit["prompt_tokens"] == again["usage"]["prompt_tokens"]
    )
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == orbit["tokens_reused"]
    assert orbit["ttft_ms"] > 0
    assert {"link", "decode"} <= orbit["stages_ms"].keys()


def test_text_between_pages_keys_their_patches_where_it_is_long_or_a_request_says_so(service: Service):
    def ask(between: str, text: str = "auto") -> list[str]:
        messages = user(picture(161), between, picture(162), "What is it?")
        answer = service.chat(messages, orbit={"text": text})
        service.settle()
        return points(answer)

    assert ask("and") == ["encoded", "encoded"]
    assert ask("or") == ["patched", "patched"]
    assert ask("which was printed before this one:") == ["patched", "recomputed"]
    assert ask("which was printed before this one:") == ["patched", "patched"]
    assert ask("which was printed behind this one:") == ["patched", "recomputed"]
    assert ask("or", "strict") == ["recomputed", "recomputed"]
    assert ask("or", "strict") == ["patched", "patched"]
    assert ask("and", "strict") == ["patched", "recomputed"]
    assert ask("which was printed long before this one:", "free") == ["patched", "patched"]


def test_usage_and_report_are_streamed_too(service: Service):
    messages = user(picture(111), "What is this?")
    service.chat(messages)
    service.settle()
    last = service.stream(messages)[-1]
    assert last["usage"]["prompt_tokens_details"]["cached_tokens"] == last["orbit"]["tokens_reused"] > 0


def test_exact_computes_but_does_not_encode_again(service: Service):
    messages = user(picture(121), "What is this?")
    service.chat(messages, "exact")
    service.settle()
    again = service.chat(messages, "exact")
    assert points(again) == ["recomputed"]
    assert again["orbit"]["tokens_reused"] == again["orbit"]["prefix_tokens_reused"]
    assert again["orbit"]["vision_tokens_encoded"] == 0


@pytest.mark.parametrize(("number", "mode"), [(141, "mpic-32"), (145, "cacheblend-15")])
def test_some_tokens_of_a_stored_chunk_are_computed_on_request(service: Service, number: int, mode: str):
    service.chat(user(picture(number), "What is this?"))
    service.settle()
    orbit = service.chat(user(picture(number + 1), picture(number), "And now?"), mode)["orbit"]
    new, stored = orbit["chunks"]
    assert (orbit["mode"], new["operating_point"], stored["operating_point"]) == (mode, "encoded", "selected")
    count = 32 if mode == "mpic-32" else -(-stored["tokens"] * 15 // 100)
    assert stored["reason"] == f"mode {mode}: {count} of {stored['tokens']} tokens computed in context"
    assert orbit["tokens_reused"] == orbit["prefix_tokens_reused"] + stored["tokens"] - count
    assert orbit["tokens_reused"] + orbit["tokens_computed"] == orbit["prompt_tokens"]


def test_full_reuse_needs_no_antecedents(service: Service):
    service.chat(user(picture(131), "What is this?"))
    service.settle()
    blind = service.chat(user(picture(132), picture(131), "And now?"), "full-reuse")
    assert points(blind) == ["encoded", "relocated"]


def test_off_stores_nothing(service: Service):
    before = service.holdings()
    service.chat(user(picture(141), "What is this?"), "off")
    service.wait_until_nothing_is_left_since(before)
    assert points(service.chat(user(picture(141), "What is this?"), "off")) == ["encoded"]


def test_an_upload_and_the_same_image_inline_are_one_chunk(service: Service):
    client = service.openai()
    uploaded = client.files.create(file=("page.png", png(151)), purpose="vision")
    service.chat(user({"type": "file", "file": {"file_id": uploaded.id}}, "What is this?"))
    service.settle()
    assert points(service.chat(user(picture(151), "What is this?"))) == ["patched"]


def test_a_system_prompt_keys_patches(service: Service):
    def ask(system: str) -> list[str]:
        return points(service.chat([{"role": "system", "content": system}, *user(picture(161), "What is this?")]))

    ask("You are terse.")
    service.settle()
    assert ask("You are terse.") == ["patched"]
    assert ask("You are very wordy.") == ["recomputed"]


def test_deleting_the_last_upload_deletes_what_was_derived_from_it(service: Service):
    client = service.openai()
    messages = user(picture(171), "What is this?")
    one, two = (client.files.create(file=("page.png", png(171)), purpose="vision").id for _ in range(2))
    service.chat(messages)
    service.settle()
    client.files.delete(one)
    assert points(service.chat(messages)) == ["patched"], "another upload of the same content is still there"
    client.files.delete(two)
    assert points(service.chat(messages)) == ["encoded"]


def test_metrics_count_what_was_reused(service: Service):
    def reused() -> float:
        lines = httpx.get(service.url + "/metrics").text.splitlines()
        return float(next(x for x in lines if x.startswith("orbitserve_prompt_tokens_reused_total{")).split()[1])

    messages = user(picture(181), "What is this?")
    service.chat(messages)
    service.settle()
    before = reused()
    assert reused() - before == 0
    answer = service.chat(messages)
    assert reused() - before == answer["orbit"]["tokens_reused"] > 0


def test_metrics_say_what_was_compiled_when_idle(service: Service):
    def forwards() -> float:
        lines = httpx.get(service.url + "/metrics").text.splitlines()
        counted = [line for line in lines if line.startswith('orbitserve_compile_forwards_total{job="orders"')]
        return sum(float(line.split()[1]) for line in counted)

    before = forwards()
    service.chat(user(picture(191), picture(192), "What changes?"))
    service.settle()
    assert forwards() == before + 2


def test_decode_is_given_as_much_kv_as_asked_for_and_gives_all_of_it_back(service: Service):
    """Of some 400 tokens a block of 128 and of 150 more the last 8, in whole blocks."""
    messages = user(*(picture(number) for number in range(171, 177)), "What changes?")
    before = service.holdings()
    length = {"max_tokens": 150, "ignore_eos": True}
    whole = service.chat(messages, orbit={"kv_budget": 1}, **length)["orbit"]["kv"]
    assert whole["kept"] == whole["tokens"]
    assert whole["dropped"] == 0
    asked = {"kv_budget": 0.3, "elastic": {"window": 8}}
    for more, saw in (({}, "all"), ({"logprobs": True}, "kept"), ({"n": 2, "temperature": 1.0}, "kept")):
        answer = service.chat(messages, orbit=asked, **length, **more)
        kv = answer["orbit"]["kv"]
        assert kv["kept"] < 0.7 * kv["tokens"] == 0.7 * answer["usage"]["prompt_tokens"]
        assert kv["bytes_handed_off"] * whole["kept"] == whole["bytes_handed_off"] * kv["kept"]
        assert kv["dropped"] > 0
        assert kv["first_token_saw"] == saw
        assert answer["usage"]["completion_tokens"] == 150 * len(answer["choices"])

    def all_came_back() -> bool:
        now = service.holdings()
        return now.leases <= before.leases and now.blocks <= before.blocks

    service.wait_until(all_came_back)
    assert service.role("DecodeWorker", "all_blocks_free")
