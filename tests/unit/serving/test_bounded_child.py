"""The process in which an untrusted file is read: it is limited before a byte of the file comes."""

from __future__ import annotations

from pathlib import Path

import pytest

from serving.documents.bounded_child import bounded_child

MEMORY = 512 << 20
SCRIPT = """
import json, resource, sys
job = json.loads(sys.stdin.buffer.readline())
limits = [resource.getrlimit(getattr(resource, "RLIMIT_" + name)) for name in ("AS", "CPU", "FSIZE", "CORE")]
data = sys.stdin.buffer.read(job["bytes"])
print(json.dumps({"limits": limits, "job": len(job["times"]), "data": data.decode()}), flush=True)
print(json.dumps({"asked": json.loads(sys.stdin.buffer.readline())}))
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "child.py"
    path.write_text(SCRIPT)
    return path


def test_limits_stand_before_it_reads_and_cannot_be_raised(script: Path):
    with bounded_child(script, {"times": []}, b"", 20, MEMORY) as child:
        line = child.line()
    assert line is not None
    assert line["limits"] == [[MEMORY] * 2, [20] * 2, [0, 0], [0, 0]], "of each, the hard one as well"


def test_a_job_may_be_longer_than_an_argument_of_a_process_and_more_is_asked_later(script: Path):
    with bounded_child(script, {"times": [1 / 3] * 100_000}, b"file", 20, MEMORY) as child:
        line = child.line()
        child.send([1, 2])
        more = child.line()
    assert line is not None
    assert (line["job"], line["data"], more) == (100_000, "file", {"asked": [1, 2]})


def test_what_ends_without_an_answer_has_none(tmp_path: Path):
    path = tmp_path / "child.py"
    path.write_text("raise SystemExit(3)")
    with bounded_child(path, {}, b"file" * (1 << 20), 20, MEMORY) as child:
        assert child.line() is None
    assert not child.is_late
