"""`orbitserve loadtest` from its command line to its report and pictures, against a mock server."""

from __future__ import annotations

import asyncio
import io
import json
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from openai_mock import MockServer
from rich.console import Console
from typer.testing import CliRunner

from serving.cli.main import app
from serving.loadtest.client import Tally
from serving.loadtest.progress import watching

SMALL = ["--set", "columns=2", "--set", "rows=2", "--warmup", "1"]


@pytest.fixture
def server() -> Iterator[MockServer]:
    """A mock server on a loop of its own: the command makes one for itself."""
    mock = MockServer(faults={3: "500"})
    started, ended = threading.Event(), asyncio.Event()
    loop = asyncio.new_event_loop()

    async def serve() -> None:
        async with mock.running():
            started.set()
            await ended.wait()

    thread = threading.Thread(target=lambda: loop.run_until_complete(serve()))
    thread.start()
    started.wait()
    yield mock
    loop.call_soon_threadsafe(ended.set)
    thread.join()
    loop.close()


def run(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["loadtest", *arguments], catch_exceptions=False)
    return result.exit_code, result.output


def test_a_run_prints_writes_and_draws_and_two_reports_make_one_picture(server: MockServer, tmp_path: Path):
    reports = []
    for name in ("first", "second"):
        reports.append(tmp_path / f"{name}.json")
        code, shown = run(
            *("--url", server.url, "--rates", "40,80", "--count", "5", "--ttft-limit", "5000", "--name", name),
            *("--json", str(reports[-1]), "--plot", str(tmp_path / f"{name}.png"), "--api-key", "secret", *SMALL),
        )
        assert code == 0, shown
        assert name in shown
        assert "goodput" in shown
        assert "40/s, warm-up: 1 due, 1 sent, 0 in flight, 1 done, 0 429, 0 errors" in shown
        assert (tmp_path / f"{name}.png").read_bytes().startswith(b"\x89PNG")
    document = json.loads(reports[0].read_text())
    assert {"command", "date", "versions", "machine", "endpoint", "arrivals"} < document.keys()
    assert "secret" not in reports[0].read_text()
    assert document["workload"]["name"] == "mrag"
    assert [rate["rate"] for rate in document["rates"]] == [40, 80]
    first = document["rates"][0]
    assert (first["requests"], first["ok"], first["errors"]) == (5, 4, {"500": 1})  # the 4th, after one of warm-up
    assert first["cached_tokens_share"] == 0.75
    assert first["operating_points"] == {"patched": 4, "encoded": 4}
    assert first["stages_ms"] == {"link": 20.0, "decode": 5.0}
    assert "stages, median ms: link 20, decode 5" in shown
    assert len(first["samples"]["ttft_ms"]) == 5
    for picture in (tmp_path / "both.png", tmp_path / "new" / "both"):  # a PNG, whatever it is called
        code, shown = run("plot", *map(str, reports), "--out", str(picture))
        assert code == 0, shown
        assert picture.read_bytes().startswith(b"\x89PNG")
    code, shown = run("plot", *map(str, reports), "--out", str(reports[0] / "both.png"))
    assert (code, "is no folder" in shown.replace("\n", " ")) == (2, True)


def test_a_terminal_sees_the_run_as_it_goes():
    screen, tally = io.StringIO(), Tally(planned=7)
    with watching(Console(file=screen, force_terminal=True, width=120), "mrag at 4/s", tally):
        tally.sent = 3  # the table that the run ends with is drawn again
    table, last = screen.getvalue().rsplit("mrag at 4/s: ", 1)
    assert all(name in table for name in ("rate", "due", "in flight", "TTFT p50, ms"))
    assert any(row.split("│")[1:5] == [" mrag at 4/s ", " 7   ", " 3    ", " 3         "] for row in table.splitlines())
    assert last.startswith("7 due, 3 sent, 3 in flight, 0 done")


def test_a_trace_is_replayed(server: MockServer, tmp_path: Path):
    trace = tmp_path / "trace.jsonl"
    trace.write_text('{"at": 0, "images": 1}\n{"at": 0.05, "images": 2}\n')
    code, shown = run("--url", server.url, "--trace", str(trace), "--json", str(tmp_path / "report.json"), *SMALL)
    assert code == 0, shown
    document = json.loads((tmp_path / "report.json").read_text())
    assert document["arrivals"]["kind"] == "trace"
    assert [rate["rate"] for rate in document["rates"]] == [20]
    kinds = [[part["type"] for part in body["messages"][0]["content"]] for body in server.bodies]
    assert [kind.count("image_url") for kind in kinds] == [1, 1, 2]  # the warm-up is as the trace begins
    assert document["rates"][0]["asked_before"] == 0, "each with new pictures"


def test_bodies_of_a_trace_that_are_sent_again_are_told(server: MockServer, tmp_path: Path):
    trace, report = tmp_path / "trace.jsonl", tmp_path / "report.json"
    body = {"messages": [{"role": "user", "content": "What?"}], "max_tokens": 2}
    trace.write_text("".join(json.dumps({"at": 0.02 * number, "body": body}) + "\n" for number in range(3)))
    code, shown = run("--url", server.url, "--trace", str(trace), "--rates", "40,80", "--json", str(report), *SMALL)
    assert code == 0, shown
    rates = json.loads(report.read_text())["rates"]
    assert [rate["asked_before"] for rate in rates] == [1, 3]  # the first in the warm-up
    assert "40/s: 1 requests had been sent before" in shown
    assert "80/s: 3 requests had been sent before" in shown


@pytest.mark.parametrize("option", ["--json", "--plot"])
def test_a_report_that_cannot_be_written_is_refused_before_anything_is_sent(
    server: MockServer, tmp_path: Path, option: str
):
    file = tmp_path / "file"
    file.touch()
    for wrong, why in ((file / "report", f"{file} is no folder"), (tmp_path, "it is a folder")):
        code, shown = run("--url", server.url, "--rates", "40", "--count", "5", option, str(wrong), *SMALL)
        assert code == 2
        assert f"cannot write {wrong}: {why}" in shown.replace("\n", " ")
    assert server.bodies == []


def test_a_server_that_lists_no_models_is_asked_for_the_one_that_is_named(server: MockServer):
    server.lists_models = False
    asked = ("--url", server.url, "--rates", "40", "--count", "3", *SMALL)
    code, shown = run(*asked)
    assert code == 1
    assert "models answered 404" in shown
    code, shown = run(*asked, "--model", "mock")
    assert code == 0, shown
    assert {body["model"] for body in server.bodies} == {"mock"}


def test_rates_that_were_measured_are_reported_if_a_later_one_fails(server: MockServer, tmp_path: Path):
    few = ["--workload", "novel", "--set", "pages=4", "--set", "retrieved=3", "--set", "columns=2", "--set", "rows=2"]
    report = tmp_path / "report.json"
    code, shown = run(
        *("--url", server.url, "--rates", "40,80", "--count", "3", "--warmup", "0", "--json", str(report), *few)
    )
    assert code == 2, shown
    assert "1 of 2 rates are reported" in shown
    assert [rate["rate"] for rate in json.loads(report.read_text())["rates"]] == [40]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--rates", "1,fast"], "--rates 1,fast"),
        (["--rates", "0"], "greater than 0"),
        (["--set", "pages"], "NAME=VALUE"),
        (["--set", "pages=none"], "pages"),
        (["--set", "zipf=1000"], "zipf: Input should be less than or equal to 50"),
        (["--set", "zipf=nan"], "zipf"),
        (["--workload", "mgar"], "no workload 'mgar'"),
        (["--images", "bytes"], "inline or files"),
        (["--trace", "/nowhere.jsonl"], "/nowhere.jsonl"),
        (["plot", "/nowhere.json", "--out", "/nowhere.png"], "/nowhere.json"),
    ],
)
def test_wrong_input_is_named(arguments: list[str], words: str):
    code, shown = run(*arguments)
    assert code == 2, shown
    assert words in shown


def test_a_server_that_is_not_there_and_one_that_only_fails(server: MockServer):
    code, shown = run("--url", "http://127.0.0.1:9")
    assert code == 1
    assert "127.0.0.1:9" in shown
    server.faults = dict.fromkeys(range(100), "500")
    code, shown = run("--url", server.url, "--rates", "50", "--count", "3", *SMALL)
    assert code == 1
    assert "500: " in shown


@pytest.mark.parametrize("url", ["127.0.0.1:1", "http://127.0.0.1:abc", "localhost:8000/v1", "http://", "http://[::1"])
def test_what_is_no_url_is_told(url: str):
    code, shown = run("--url", url)
    assert code == 1
    assert f"error: {url} is no URL of a server: it begins with http:// or https://, and a port is a number" in shown


@pytest.mark.parametrize("rates", [{}, {"rates": []}, {"rates": None}, {"rates": 3}])
def test_a_report_without_rates_is_not_drawn(tmp_path: Path, rates: dict[str, object]):
    report = tmp_path / "report.json"
    report.write_text(json.dumps({"kind": "orbitserve loadtest", "name": "x", "workload": {"name": "mrag"}, **rates}))
    code, shown = run("plot", str(report), "--out", str(tmp_path / "picture.png"))
    assert code == 2
    assert f"{report}: this report has no rates" in shown


def test_workloads_are_listed_with_parameters_and_defaults():
    code, shown = run("workloads")
    assert code == 0
    assert "one-shot" in shown
    assert "zipf=1.0" in shown
