"""How a replica's process is set up."""

from __future__ import annotations

import subprocess
import sys

_LOOK = """
import os, threading
from pathlib import Path
from serving.replica_process import give_way

started, over = threading.Event(), threading.Event()
before = threading.Thread(target=lambda: (started.set(), over.wait()))
before.start(), started.wait()
give_way(7)
after = threading.Thread(target=over.wait)
after.start()
nice = {Path(task, "stat").read_text().rsplit(")", 1)[1].split()[16] for task in Path("/proc/self/task").glob("*")}
over.set()
print(*nice)
"""


def test_a_process_that_gives_way_further_is_left_as_it_is():
    look = "import os; from serving.replica_process import give_way; give_way(3); print(os.getpriority(0, 0))"
    found = subprocess.run(["nice", "-n", "9", sys.executable, "-c", look], capture_output=True, text=True, check=True)
    assert found.stdout.split() == ["9"]


def test_all_threads_of_a_process_give_way_and_those_that_they_start():
    found = subprocess.run([sys.executable, "-c", _LOOK], capture_output=True, text=True, check=True)
    assert found.stdout.split() == ["7"]
