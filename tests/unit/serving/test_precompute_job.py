"""The offline caching job without engines: what workers share, how entries are grouped, and what the command says."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from typer.testing import CliRunner

from serving.cli.main import app
from serving.config import OrbitServeConfig
from serving.offline.precompute import PrecomputeError, Summary, entry_blocks, outcomes
from serving.offline.precompute_ledger import Ledger, Outcome
from serving.offline.precompute_manifest import Entry, ImageSource, Manifest, from_table
from serving.offline.precompute_worker import Company, groups


def entries(*sizes: int) -> list[Entry]:
    return [Entry(i, str(i), (ImageSource("x"),) * size) for i, size in enumerate(sizes)]


def numbers(grouped: list[list[Entry]]) -> list[list[int]]:
    return [[entry.number for entry in group] for group in grouped]


def wait_until(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_groups_hold_few_images_and_keep_the_order():
    assert numbers(list(groups(entries(1, 1, 2, 1, 9, 0, 1), images=4))) == [[0, 1, 2], [3], [4], [5, 6]]


def test_an_entry_that_was_begun_in_vain_is_tried_alone():
    assert numbers(list(groups(entries(1, 1, 1, 1), images=4, alone={1}))) == [[0], [1], [2, 3]]
    assert numbers(list(groups(entries(1, 1), images=4, alone={0, 1}))) == [[0], [1]]
    assert numbers(list(groups(entries(1, 0, 1), images=4, alone={0}))) == [[0], [1, 2]], "nor with one of no images"


def test_alone_is_alone_in_the_process():
    company, beside = Company(), threading.Event()
    order: list[str] = []

    def runs(name: str, alone: bool, until: threading.Event) -> None:
        with company.keep(alone=alone):
            order.append(name)
            assert until.wait(10)
            order.append(f"{name} ends")

    with ThreadPoolExecutor(4) as pool:
        first = [pool.submit(runs, name, False, beside) for name in "ab"]
        wait_until(lambda: len(order) == 2)
        at_once = threading.Event()
        at_once.set()
        lone = pool.submit(runs, "lone", True, at_once)
        wait_until(lambda: company._alone == 1)
        last = pool.submit(runs, "c", False, at_once)
        beside.set()
        for future in (*first, lone, last):
            future.result(10)
    assert sorted(order[:2]) == ["a", "b"], "those that are not to be alone run beside one another"
    assert order[4:] == ["lone", "lone ends", "c", "c ends"], "it waits for those before, and those behind for it"


async def test_a_record_has_one_owner_at_a_time_and_whoever_waits_gets_it_then():
    ledger = Ledger(10)
    assert await ledger.take("a/1", [["x", "y"], ["z"]]) == [0, 1]
    assert await ledger.take("b/1", [["y", "w"], ["v"]]) == [1]  # all of a group, or none of it
    waiting = asyncio.create_task(ledger.take("b/2", [["y", "w"]]))
    await asyncio.sleep(0)
    await ledger.release("b/1")
    await asyncio.sleep(0)
    assert not waiting.done()
    await ledger.release("a/1")
    assert await waiting == [0]


async def test_one_owner_may_have_the_same_record_in_two_groups():
    assert await Ledger(10).take("a/1", [["x", "y"], ["y", "z"]]) == [0, 1]


async def test_what_a_worker_held_when_it_died_is_free_when_it_starts_again_or_after_the_lease():
    ledger = Ledger(10, lease_seconds=0.05)
    await ledger.take("a/1", [["x"]])
    await ledger.restarted("a")
    assert await ledger.take("b/1", [["x"]]) == [0]
    assert await ledger.take("c/1", [["x"]]) == [0]  # b never comes back


async def test_what_a_dead_worker_still_waits_for_is_not_its_successors():
    ledger = Ledger(10)
    await ledger.take("a/1", [["x"]])
    waiting = asyncio.create_task(ledger.take("b/1", [["x"]]))
    await asyncio.sleep(0)
    await ledger.restarted("b")
    await ledger.release("a/1")
    assert await waiting == []
    assert await ledger.take("b/2", [["x"]]) == [0]


async def test_entries_that_were_begun_and_never_ended_are_counted():
    ledger = Ledger(10)
    await ledger.begin([1, 2])
    await ledger.end([Outcome(1, "one", "stored")])
    await ledger.begin([2])
    assert await ledger.attempts([1, 2, 3]) == [None, 2, 0]


async def test_an_entry_has_one_outcome_and_it_is_seen_once():
    ledger = Ledger(10)
    await ledger.end([Outcome(1, "one", "stored"), Outcome(2, "two", "failed")])
    assert [outcome.name for outcome in await ledger.drain()] == ["one", "two"]
    await ledger.end([Outcome(1, "one", "present"), Outcome(3, "three", "stored")])  # a batch that was run again
    assert [outcome.name for outcome in await ledger.drain()] == ["three"]
    assert await ledger.drain() == []


def test_a_manifest_travels_inentry_blocks_of_a_few_entries(tmp_path: Path):
    (tmp_path / "list.jsonl").write_text("\n".join(json.dumps({"path": f"{i}.png"}) for i in range(10)))
    manifest = Manifest(str(tmp_path / "list.jsonl"))
    blocks = [from_table(table) for table in entry_blocks(manifest.url, {}, 7, 3)]
    assert numbers(blocks) == [[0, 1, 2], [3, 4, 5], [6]]
    assert [entry for block in blocks for entry in block] == list(manifest.entries(7))


def test_the_summary_counts_work_from_first_start_to_last_end():
    summary = Summary()
    summary.add(Outcome(0, "a", "stored", images=2, canonicals=2, patches=2, began=10.0, ended=12.0))
    summary.add(Outcome(1, "b", "stored", images=4, canonicals=4, began=11.0, ended=13.0))
    summary.add(Outcome(2, "c", "failed", "no such file"))
    assert (summary.entries, summary.images, summary.canonicals, summary.patches) == (3, 6, 6, 2)
    assert (summary.seconds, summary.chunks_per_second) == (3.0, 2.0)
    assert [outcome.name for outcome in summary.failures] == ["c"]


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    return tmp_path / "model"


def test_a_library_that_keeps_nothing_is_refused(checkpoint: Path, tmp_path: Path):
    config = OrbitServeConfig.model_validate({"model": {"path": checkpoint}, "library": {"directory": None}})
    (tmp_path / "a.png").touch()
    with pytest.raises(PrecomputeError, match="nothing would be kept"):
        next(outcomes(config, Manifest(str(tmp_path)), 1))


def test_a_dry_run_reads_the_manifest_alone_and_fails_for_bad_entries(checkpoint: Path, tmp_path: Path):
    lines = ['{"path": "1.png"}', '{"images": ["1.png", "2.png"], "patches": "orbit", "tenant": "a[/b]"}']
    path = tmp_path / "list.jsonl"
    path.write_text("\n".join(lines))
    arguments = ["precompute", str(path), "--model", str(checkpoint), "--dry-run"]
    good = CliRunner().invoke(app, arguments)
    assert good.exit_code == 0
    assert "2 entries, 0 of them bad; 3 images" in good.output
    assert "orbit (1), own (1); tenants: a[/b] (1), local (1)" in good.output
    path.write_text("\n".join([*lines, "{"]))
    bad = CliRunner().invoke(app, arguments)
    assert bad.exit_code == 1
    assert "list.jsonl:3: Expecting property name" in bad.output
    assert CliRunner().invoke(app, [*arguments, "--limit", "2"]).exit_code == 0


def test_content_is_of_a_tenant_with_a_key(checkpoint: Path, tmp_path: Path):
    (tmp_path / "pages").mkdir()
    (tmp_path / "pages" / "1.png").touch()
    config = tmp_path / "config.yaml"
    config.write_text(f"model: {{path: {checkpoint}}}\nhttp: {{api_keys: {{hush: acme}}}}\n")
    arguments = ["precompute", str(tmp_path / "pages"), "--config", str(config), "--dry-run"]
    refused = CliRunner().invoke(app, arguments)
    assert refused.exit_code == 2
    assert "no API key is of tenant 'local'" in refused.output
    for tenant in ("acme", "dynamic-library"):
        good = CliRunner().invoke(app, [*arguments, "--tenant", tenant])
        assert good.exit_code == 0
        assert f"tenants: {tenant} (1)" in good.output


@pytest.mark.parametrize("arguments", [["missing.jsonl"], ["missing.jsonl", "--dry-run"]])
def test_an_unusable_manifest_ends_the_command_with_an_error(checkpoint: Path, arguments: list[str]):
    result = CliRunner().invoke(app, ["precompute", "--model", str(checkpoint), *arguments])
    assert result.exit_code == 2
    assert "missing.jsonl: there is no such manifest" in result.output
