"""Writers of one vector store in processes of their own, killed at any time."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

from kvstore.uploads.files import FileStore
from kvstore.uploads.vector_stores import VectorStores

WRITERS, OWN_FILES = 8, 3

# Forks the writers. Each adds and removes files of its own, and adds the one that is everybody's; it logs
# what it begins and what it has done.
WRITE = """
import os, sys, time
from kvstore.uploads.files import FileStore
from kvstore.uploads.vector_stores import VectorStores

folder, writers, store, shared, *own = sys.argv[1:]
writers = int(writers)
size, pids = len(own) // writers, []
for number in range(writers):
    pid = os.fork()
    if pid:
        pids.append(pid)
        continue
    stores = VectorStores(FileStore(folder + "/files"))
    log = open(f"{folder}/log-{number}", "w", buffering=1)
    turn = 0
    while True:
        for file in own[number * size : (number + 1) * size]:
            action = "remove" if turn % 2 else "add"
            print("begun", action, file, file=log)
            if action == "add":
                stores.add(store, "one", {file: {"turn": turn}})
            else:
                stores.remove(store, file)
            print("done", action, file, file=log)
        stores.add(store, "one", {shared: {"writer": number}})
        turn += 1
print(*pids, flush=True)
sys.stdin.read()
"""


def test_writers_killed_at_any_time_lose_double_and_revive_nothing(tmp_path: Path):
    files = FileStore(str(tmp_path / "files"))
    stores = VectorStores(files)
    store = stores.create("shared", owner="one").id
    ids = [
        files.create("one", f"{n}.txt", "assistants", f"text {n}".encode()).id for n in range(1 + WRITERS * OWN_FILES)
    ]
    shared, own = ids[0], ids[1:]
    command = [sys.executable, "-c", WRITE, str(tmp_path), str(WRITERS), store, shared, *own]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        pids = [int(pid) for pid in parent.stdout.readline().split()]
        draw = random.Random(5)
        while len([log for log in tmp_path.glob("log-*") if "done remove" in log.read_text()]) < WRITERS:
            assert parent.poll() is None
            time.sleep(0.02)
        for pid in draw.sample(pids, WRITERS):
            time.sleep(draw.random() * 0.05)
            os.kill(pid, signal.SIGKILL)
        for log in tmp_path.glob("log-*"):
            last = -1
            while last != (last := log.stat().st_size):
                time.sleep(0.02)  # its writer is gone
        parent.kill()
    after = VectorStores(FileStore(str(tmp_path / "files")))
    for _ in range(2):  # a sweep brings nothing back
        there = [reference.file for reference in after.references(store)]
        assert len(there) == len(set(there))
        assert after.listed(store) == set(there)
        assert shared in there
        for log in tmp_path.glob("log-*"):
            states: dict[str, set[str]] = {}
            for line in log.read_text().splitlines():
                when, action, file = line.split()
                state = "there" if action == "add" else "gone"
                states[file] = {state} if when == "done" else states.get(file, {"gone"}) | {state}
            for file, possible in states.items():
                assert ("there" if file in there else "gone") in possible, (log.name, file)
        after.sweep()
