"""Requests generated from an OpenAPI document, and what is wrong with their answers."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import schemathesis
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis.errors import Unsatisfiable
from schemathesis import Case, GenerationMode
from schemathesis.schemas import APIOperation

_EXAMPLES = 40  # of an operation and mode, if there is time
Answer = tuple[int, str]  # status and content type


def faults(
    document: dict[str, Any],
    ask: Callable[[Case], Answer],
    seconds: float,
    is_wanted: Callable[[APIOperation], bool] = lambda operation: True,
) -> list[str]:
    """Answers that the document does not know, and server errors; one of a kind.

    Valid and invalid requests of every operation are asked, the same ones every time, as many as `seconds` allow.
    """
    schema = schemathesis.openapi.from_dict(document)
    operations = [found.ok() for found in schema.get_all_operations()]
    wanted = [operation for operation in operations if is_wanted(operation)]
    found: dict[str, str] = {}
    for operation in wanted:
        for mode in GenerationMode:
            until = time.monotonic() + seconds / len(wanted) / len(GenerationMode)
            for fault, case in _asked(operation, mode, ask, until):
                found.setdefault(fault, case.as_curl_command())
    return [f"{fault}: {command}" for fault, command in found.items()]


def _asked(
    operation: APIOperation, mode: GenerationMode, ask: Callable[[Case], Answer], until: float
) -> Iterator[tuple[str, Case]]:
    told: list[tuple[str, Case]] = []

    @seed(0)
    @settings(
        max_examples=_EXAMPLES, database=None, phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    @given(operation.as_strategy(generation_mode=mode))
    def one(case: Case) -> None:
        if time.monotonic() < until:
            told.extend((fault, case) for fault in _faults(operation, *ask(case)))

    with suppress(Unsatisfiable):  # of an operation without parameters no request is invalid
        one()
    yield from told


def _faults(operation: APIOperation, status: int, kind: str) -> Iterator[str]:
    responses = operation.definition.raw["responses"]
    name = f"{operation.label} answers {status}"
    if status >= 500 and status != 501:
        yield name
    elif str(status) not in responses:
        yield f"{name}, which is not documented"
    else:
        documented = responses[str(status)].get("content", {})
        if documented and kind.partition(";")[0] not in documented:
            yield f"{name} as {kind!r}, documented as {list(documented)}"
