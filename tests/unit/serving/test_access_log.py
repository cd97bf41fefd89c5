"""The access log: what it says of a request, that it says nothing of content, and that it stands in nobody's way."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm.multimodal.inputs import MultiModalBatchedField, MultiModalFieldElem, MultiModalKwargsItem

from kvstore.catalog.index import prefix_key
from prefill_workers.modes import OperatingPoint, Text
from prefill_workers.protocol import TEXT, ChunkOutcome, ChunkSpan, LinkRequest, LinkResult
from serving.access_log import AccessLog, BadLog, LoggedRequest, _File, expanded, log_files, read, runs_of
from serving.frontend.engine_client import LinkedEngineClient
from serving.settings import AccessLogSettings

SECRET = list(b"what nobody may read")  # tokens of a document and of the text around
IMAGE = [151, *[7] * 6, 152]
OUTCOME = ChunkOutcome(8, OperatingPoint.PATCHED, 0, "because")


def request(mask: torch.Tensor | None = None) -> LinkRequest:
    """Text, an image of six placeholders, a document."""
    tokens = [*SECRET, *IMAGE, *SECRET]
    start = len(SECRET)
    field = MultiModalBatchedField(keep_on_cpu=True)
    grid = MultiModalKwargsItem(
        {
            "image_grid_thw": MultiModalFieldElem(data=torch.tensor([1, 4, 6]), field=field),
            "pixels_kept_on_cpu": MultiModalFieldElem(data=torch.rand(100), field=field),
        }
    )
    picture = ChunkSpan("ab" * 32, "image", start, start + 8, start + 1, 6, grid, mask)
    document = ChunkSpan("cd" * 32, TEXT, start + 8, len(tokens), start + 8, len(SECRET))
    return LinkRequest("secret-request-id", tokens, (picture, document), tenant="acme", prefix=(3, 1, 4))


def result() -> LinkResult:
    return LinkResult(
        "lease", {}, (OUTCOME, OUTCOME), 30, 12, {"forward": 9.0, "place": 0.5, "plan": 1.0}, compute_ms=4.2
    )


@pytest.fixture
def make_log(tmp_path: Path) -> Callable[..., AccessLog]:
    def make(**settings: Any) -> AccessLog:
        settings.setdefault("directory", tmp_path / "logs")
        draw = settings.pop("draw", None)
        return AccessLog(AccessLogSettings(**settings), "one", "model", draw)

    return make


def logged(log: AccessLog, *requests: LinkRequest) -> list[LoggedRequest]:
    for each in requests:
        log.offer(each, [0, 0], result())
    log.close()
    return list(read(log.path)) if log.path.exists() else []


def test_a_line_says_what_a_forward_over_its_chunks_needs(make_log: Callable[..., AccessLog]):
    mask = torch.tensor([1, 1, 0, 1, 1, 0], dtype=torch.bool)
    (line,) = logged(make_log(), request(mask))
    picture, document = line.chunks
    assert (line.model, line.tenant, line.mode, line.text, line.between) == ("model", "acme", "auto", "auto", 0)
    assert (line.prefix, line.prefix_tokens) == (prefix_key((3, 1, 4)), 3)
    assert (line.reused, line.computed, line.forward_ms, line.place_ms) == (30, 12, 4.2, 0.5)
    assert (picture.content, picture.modality, picture.tokens, picture.point) == ("ab" * 32, "image", 8, "patched")
    assert (picture.first, picture.count, expanded(picture.ids)) == (1, 6, IMAGE)
    assert picture.mask is not None
    assert expanded(picture.mask) == mask.int().tolist()
    assert {name: (field.dtype, field.data) for name, field in picture.grid.items()} == {
        "image_grid_thw": ("int64", [1, 4, 6])
    }
    assert (document.modality, document.tokens, document.ids, document.group) == (TEXT, len(SECRET), (), 0)


def test_nothing_of_what_was_written_or_shown_is_in_a_line(make_log: Callable[..., AccessLog]):
    log = make_log()
    logged(log, request())
    text = log.path.read_text()
    assert "secret-request-id" not in text
    numbers = json.loads(text, parse_int=lambda n: int(n))
    assert not set(SECRET) & {token for chunk in numbers["chunks"] for token, _ in chunk.get("ids", [])}
    assert "pixels" not in text
    document = numbers["chunks"][1]
    assert set(document) == {"content", "modality", "tokens", "point", "group"}


def test_a_share_of_the_requests_is_logged_and_each_line_stands_for_several(make_log: Callable[..., AccessLog]):
    draws = iter([0.1, 0.6, 0.2, 0.9])
    lines = logged(make_log(sample=0.5, draw=lambda: next(draws)), *[request()] * 4)
    assert [line.weight for line in lines] == [2.0, 2.0]


def test_a_line_says_how_much_text_stands_between_chunks(make_log: Callable[..., AccessLog]):
    asked = request()
    picture, document = asked.chunks
    apart = replace(document, start=document.start + 2, first=document.first + 2)
    (line,) = logged(make_log(), replace(asked, chunks=(picture, apart), text=Text.STRICT))
    assert (line.text, line.between) == ("strict", 2)


def test_requests_without_chunks_are_not_logged(make_log: Callable[..., AccessLog]):
    assert logged(make_log(), LinkRequest("text", SECRET)) == []


def test_full_files_are_put_aside_and_the_oldest_go(make_log: Callable[..., AccessLog]):
    log = make_log(max_file_bytes=2000, rotated_files=2)
    logged(log, *[request()] * 20)
    files = sorted(log.path.parent.iterdir())
    assert [file.name for file in files] == ["access-one.jsonl", "access-one.jsonl.1", "access-one.jsonl.2"]
    assert all(file.stat().st_size <= 2000 for file in files)
    assert 0 < len(list(read(log.path.parent))) < 20


def test_a_disk_that_cannot_keep_up_costs_lines_and_no_time(
    make_log: Callable[..., AccessLog], monkeypatch: pytest.MonkeyPatch
):
    go_on, written = threading.Event(), AccessLog._document

    def slow(*arguments: Any) -> Any:
        go_on.wait()
        return written(*arguments)

    monkeypatch.setattr(AccessLog, "_document", slow)
    log = make_log(queue=2)
    for _ in range(10):
        log.offer(request(), [], result())
    assert log.dropped >= 7  # two wait, one may be in the making
    go_on.set()
    log.close()
    assert log.dropped + log.written == 10


def test_a_directory_that_refuses_is_told_once_and_harms_nobody(
    make_log: Callable[..., AccessLog], tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    (tmp_path / "file").write_text("in the way")
    log = make_log(directory=tmp_path / "file")
    with caplog.at_level(logging.WARNING):
        assert logged(log, request(), request()) == []
    assert log.dropped == 2
    assert len([record for record in caplog.records if "not logged" in record.message]) == 1


def test_no_access_log_is_written_unless_asked_for():
    assert AccessLogSettings().directory is None
    assert LinkedEngineClient.access_log is None


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("not json", "Invalid JSON"),
        ("[]", "valid dictionary|object"),
        ('{"v": 9}', "v: "),
        ('{"chunks": []}', "v: Field required"),
        ('CHUNK {"tokens": 9}', "not of 9 tokens"),
        ('CHUNK {"first": 4}', "do not lie within 8 tokens"),
        ('CHUNK {"mask": [[1, 2]]}', "mask is not of 6"),
        ('CHUNK {"ids": [[7, -1]]}', r"chunks\.0\.ids"),
        ('CHUNK {"grid": {"thw": {"dtype": "load", "data": []}}}', r"grid\.thw\.dtype"),
        ('CHUNK {"content": "../../etc"}', r"chunks\.0\.content"),
    ],
)
def test_a_bad_line_is_named_with_its_number_and_what_is_wrong(
    make_log: Callable[..., AccessLog], line: str, words: str
):
    log = make_log()
    logged(log, request())
    good = log.path.read_text()
    if line.startswith("CHUNK "):
        document = json.loads(good)
        document["chunks"][0] |= json.loads(line.removeprefix("CHUNK "))
        line = json.dumps(document)
    log.path.write_text(f"{good}\n{line}\n")
    with pytest.raises(BadLog, match=rf"access-one\.jsonl:3: .*({words})"):
        list(read(log.path))


def test_a_last_line_without_its_end_is_left_out(make_log: Callable[..., AccessLog]):
    log = make_log()
    logged(log, request())
    with log.path.open("a") as file:
        file.write('{"v": 1, "ti')
    assert len(list(read(log.path))) == 1


def test_a_missing_log_is_named(tmp_path: Path):
    with pytest.raises(BadLog, match=r"none\.jsonl: no such file"):
        list(read(tmp_path / "none.jsonl"))
    with pytest.raises(BadLog, match="no access log"):
        list(read(tmp_path))


def test_runs_and_values_are_each_others_inverse():
    values = [1, 1, 2, 1, 3, 3, 3]
    assert runs_of(values) == [(1, 2), (2, 1), (1, 1), (3, 3)]
    assert expanded(runs_of(values)) == values


def test_a_stuck_disk_does_not_hold_a_replica_up_that_shuts_down(
    make_log: Callable[..., AccessLog], monkeypatch: pytest.MonkeyPatch
):
    log = make_log()
    stuck = threading.Event()
    monkeypatch.setattr(log, "_document", lambda *item: stuck.wait(20))
    log.offer(request(), [0, 0], result())
    began = time.monotonic()
    log.close(timeout=0.1)
    assert time.monotonic() - began < 5
    stuck.set()


def test_a_directorys_logs_are_bounded_also_those_of_replicas_that_ended(
    tmp_path: Path, make_log: Callable[..., AccessLog]
):
    logs = tmp_path / "logs"
    logs.mkdir()
    for age, name in enumerate(("access-gone.jsonl", "access-gone.jsonl.1", "notes.txt")):
        (logs / name).write_text("x" * 3000)
        os.utime(logs / name, (time.time() - age - 10,) * 2)
    assert logged(make_log(max_bytes=4000), request())
    assert {file.name for file in logs.iterdir()} == {"access-gone.jsonl", "access-one.jsonl", "notes.txt"}
    assert len(logged(make_log(max_bytes=4000, max_file_bytes=1000), *[request()] * 3)) == 1
    files = {file.name: file.stat().st_size for file in logs.iterdir() if file.name != "notes.txt"}
    assert "access-gone.jsonl" not in files
    assert sum(files.values()) <= 4000 + max(files.values())


def test_rotated_files_are_read_before_those_that_came_later(tmp_path: Path):
    for age, name in enumerate(["access-b.jsonl", "access-a.jsonl", "access-a.jsonl.1", "access-a.jsonl.2"]):
        (tmp_path / name).touch()
        os.utime(tmp_path / name, (1000 - age, 1000 - age))
    oldest_first = ["access-a.jsonl.2", "access-a.jsonl.1", "access-a.jsonl", "access-b.jsonl"]
    assert [file.name for file in log_files(tmp_path)] == oldest_first
    for name in oldest_first:
        os.utime(tmp_path / name, (1000, 1000))
    assert [file.name for file in log_files(tmp_path)] == oldest_first


def test_a_quiet_replica_whose_file_another_one_deleted_begins_another(tmp_path: Path):
    settings = AccessLogSettings(directory=tmp_path, max_bytes=10)
    quiet = _File(tmp_path / "access-quiet.jsonl", settings)
    quiet.write("x" * 10)
    busy = _File(tmp_path / "access-busy.jsonl", settings)
    busy.write("y" * 10)
    busy.doRollover()
    assert not (tmp_path / "access-quiet.jsonl").exists()
    for line in ("again", "and again"):
        quiet.write(line)
    assert (tmp_path / "access-quiet.jsonl").read_text() == "again\nand again\n"


_ON_A_FULL_DISK = """
import resource, sys
from pathlib import Path
from serving.access_log import _File
from serving.settings import AccessLogSettings

path = Path(sys.argv[1])
file = _File(path, AccessLogSettings(directory=path.parent))
for line in sys.stdin.read().splitlines():
    left = resource.RLIM_INFINITY if line != "full" else path.stat().st_size + 10_000
    resource.setrlimit(resource.RLIMIT_FSIZE, (left, resource.RLIM_INFINITY))
    try:
        file.write("x" * 20_000 if line == "full" else line)
    except OSError as error:
        print(error.strerror)
file.close()
"""


@pytest.mark.parametrize("after", [0, 1])
def test_a_full_disk_costs_the_lines_that_it_had_no_room_for(
    make_log: Callable[..., AccessLog], tmp_path: Path, after: int
):
    log = make_log()
    logged(log, request())
    line = log.path.read_text()
    command = [sys.executable, "-c", _ON_A_FULL_DISK, str(log.path)]
    lines = "full\n" * 2 + line * after
    ended = subprocess.run(command, input=lines, capture_output=True, text=True, check=True, cwd=Path.cwd())
    assert ended.stdout == "File too large\n" * 2
    assert log.path.read_text().startswith(line * (1 + after))
    assert len(list(read(log.path))) == 1 + after


@pytest.mark.parametrize("half", ['{"v": 1, "ti', "x" * 100_000])
@pytest.mark.parametrize("whole", [0, 2])
def test_a_file_that_ends_in_the_middle_of_a_line_is_gone_on_with(
    make_log: Callable[..., AccessLog], whole: int, half: str
):
    log = make_log()
    logged(log, *[request()] * whole)
    log.path.parent.mkdir(exist_ok=True)
    with log.path.open("a") as file:
        file.write(half)
    assert len(logged(make_log(), request())) == whole + 1
    assert half not in log.path.read_text()
