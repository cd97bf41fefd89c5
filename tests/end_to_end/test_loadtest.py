"""`orbitserve loadtest` against the real service: what it counts is what the service did."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from client import Service
from typer.testing import CliRunner

from serving.cli.main import app

pytestmark = pytest.mark.service
SMALL = ("columns=6", "rows=8", "max_tokens=4")
PAIRS = ("pages=2", "retrieved=2")


def load(service: Service, report: Path, *arguments: str, shape: tuple[str, ...] = PAIRS) -> dict[str, Any]:
    """A run of eight requests at 8 a second; what is reported of it."""
    command = ["loadtest", "--url", service.url, "--rates", "8", "--count", "8", "--ignore-eos", *arguments]
    command += [option for value in (*SMALL, *shape) for option in ("--set", value)]
    result = CliRunner().invoke(app, [*command, "--json", str(report)], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    (rate,) = json.loads(report.read_text())["rates"]
    assert (rate["ok"], rate["without_content"]) == (8, 0), result.output
    return rate


def test_a_load_test_sees_pages_encoded_once_and_linked_from_then_on(service: Service, tmp_path: Path):
    first = load(service, tmp_path / "first.json", "--mode", "auto", "--images", "files", "--warmup", "0")
    assert first["operating_points"].keys() & {"encoded", "recomputed"}
    service.settle()
    second = load(service, tmp_path / "second.json", "--mode", "auto", "--warmup", "0")  # the same pages, inline
    assert second["operating_points"] == {"patched": 16}
    assert second["cached_tokens_share"] > first["cached_tokens_share"]
    assert second["samples"]["output_tokens"] == [4] * 8
    off = load(service, tmp_path / "off.json", "--mode", "off", "--warmup", "1")
    assert off["cached_tokens_share"] == 0
    assert off["operating_points"].keys().isdisjoint({"patched"})


@pytest.mark.parametrize(
    ("workload", "shape"),
    [("agent", ("sessions=2", "shortest_action=4", "longest_action=8")), ("chat", ("gallery=3", "text_words=4"))],
)
def test_pictures_that_come_back_are_not_encoded_again(
    service: Service, tmp_path: Path, workload: str, shape: tuple[str, ...]
):
    arguments = ("--workload", workload, "--images", "files", "--mode", "auto", "--warmup", "4")
    first = load(service, tmp_path / "first.json", *arguments, shape=shape)["operating_points"]
    service.settle()
    again = load(service, tmp_path / "again.json", *arguments, shape=shape)["operating_points"]
    assert "encoded" not in again, again
    assert sum(again.values()) == sum(first.values())
