"""The service against its own OpenAPI document: what is answered to requests that are generated from it."""

from __future__ import annotations

import pytest
import requests
from api_fuzz import Answer, faults
from client import Service
from schemathesis import Case

pytestmark = pytest.mark.service

ADMINISTRATOR = {"Authorization": "Bearer key-of-ops"}
SECONDS = 40.0  # for all operations
LONGEST = 4  # tokens of an answer


def test_answers_to_generated_requests_are_as_documented(guarded: Service):
    def ask(case: Case) -> Answer:
        if isinstance(case.body, dict) and "messages" in case.body:
            case.body |= {"model": guarded.model, "max_tokens": LONGEST, "n": 1}
        arguments = case.as_transport_kwargs(guarded.url, ADMINISTRATOR)
        answer = requests.request(**arguments, timeout=30)
        return answer.status_code, answer.headers.get("Content-Type", "")

    document = requests.get(f"{guarded.url}/openapi.json", timeout=30).json()
    assert not faults(document, ask, SECONDS)
    assert requests.get(f"{guarded.url}/health", timeout=60).status_code == 200
