"""Several processes on one directory, and processes that die while writing."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from kvstore_support import FINGERPRINT, canonical

from kvstore.library import Library
from kvstore.records.format import encode
from kvstore.settings import LibrarySettings
from kvstore.tiers.disk import DiskTier
from kvstore.tiers.paths import path_of

ROOT = Path(__file__).parents[3]

# The writers import neither torch nor the library, so that they start at once: argv is directory, key, blob, times.
WRITE_ONE_KEY = """
import pathlib, pyarrow
from kvstore.tiers.disk import DiskTier
tier, buffer = DiskTier(sys.argv[1]), pyarrow.py_buffer(pathlib.Path(sys.argv[3]).read_bytes())
print("ready", flush=True)
for _ in range(int(sys.argv[4])):
    tier.put(sys.argv[2], [buffer])
"""


def start_writer(tmp_path: Path, value: float, times: int) -> subprocess.Popen[str]:
    """Another process that writes the same key again and again, with every number equal to `value`."""
    record = canonical(tokens=400, created=1.0)
    blob = tmp_path / f"{value}.blob"
    blob.write_bytes(encode(replace(record, kv=torch.full_like(record.kv, value))))
    script = f"import sys; sys.path.insert(0, {str(ROOT)!r})\n{WRITE_ONE_KEY}"
    arguments = [str(tmp_path / "library"), path_of(record), str(blob), str(times)]
    writer = subprocess.Popen([sys.executable, "-c", script, *arguments], stdout=subprocess.PIPE, text=True)
    assert writer.stdout is not None
    assert writer.stdout.readline() == "ready\n"
    return writer


def read(directory: Path) -> torch.Tensor | None:
    settings = LibrarySettings(directory=directory, load_timeout_s=30)
    with Library(settings, FINGERPRINT) as library:
        record = canonical(tokens=400)
        loaded = library.get_canonical(record.key, "acme")
        assert library.stats().corrupt == 0
        return None if loaded is None else loaded.kv


def test_two_processes_writing_one_key_leave_a_whole_record(tmp_path: Path) -> None:
    writers = [start_writer(tmp_path, value, 40) for value in (1.0, 2.0)]
    seen: set[float] = set()
    while any(writer.poll() is None for writer in writers):
        kv = read(tmp_path / "library")
        if kv is not None:
            assert kv.unique().numel() == 1
            seen.add(kv[0, 0, 0].item())
    assert [writer.returncode for writer in writers] == [0, 0]
    final = read(tmp_path / "library")
    assert final is not None
    assert seen | {final[0, 0, 0].item()} <= {1.0, 2.0}
    assert list((tmp_path / "library" / ".partial").iterdir()) == []


@pytest.mark.parametrize("delay", [0.0, 0.005, 0.013, 0.029])
def test_a_killed_writer_leaves_nothing_half_written(tmp_path: Path, delay: float) -> None:
    writer = start_writer(tmp_path, 1.0, 1_000_000)
    time.sleep(delay)
    writer.send_signal(signal.SIGKILL)
    writer.wait()
    kv = read(tmp_path / "library")  # opening the directory sweeps what the writer left
    assert kv is None or torch.equal(kv, torch.ones_like(kv))
    assert list((tmp_path / "library" / ".partial").iterdir()) == []
    assert list(DiskTier(tmp_path / "library").keys()) in ([], [path_of(canonical(tokens=400))])
