"""The service in bf16: rounding may turn near ties, nothing else."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from client import Reference, Service
from test_cluster import ask
from test_exactness import ASK, CASES, token_logprobs

pytestmark = pytest.mark.service

# A tie is near if its two logits are closer than this. bf16 keeps 8 bits: logits of size 8 are 2**-5 apart, and the
# rounding of every layer before adds up to a few of these.
NEAR = 0.15


@pytest.fixture(scope="module")
def reference_bf16() -> Iterator[Reference]:
    engine = Reference("bfloat16")
    yield engine
    engine.close()


@pytest.mark.parametrize("case", CASES)
def test_the_top_token_is_the_engines_unless_nearly_tied(guarded: Service, reference_bf16: Reference, case: str):
    expected = reference_bf16.chat(CASES[case])
    answer = ask(guarded, "key-of-one", CASES[case], mode="exact", **ASK).json()
    compared = 0
    for ours, token, theirs in zip(
        answer["choices"][0]["token_ids"], expected.token_ids, expected.logprobs, strict=True
    ):
        best, second = sorted((entry.logprob for entry in theirs.values()), reverse=True)[:2]
        if ours != token:
            assert best - second < NEAR, f"token {compared}: {ours} for {token}, which led by {best - second:.3f}"
            break  # from here on the two answers continue different texts
        compared += 1
    assert compared > 0 or best - second < NEAR
    first = token_logprobs(answer)[0]
    both = [(first[name], e.logprob) for t, e in expected.logprobs[0].items() if (name := f"token_id:{t}") in first]
    assert len(both) > len(first) // 2
    assert all(ours == pytest.approx(theirs, abs=NEAR) for ours, theirs in both)
