"""A stage on a GPU ends with all that it started."""

from __future__ import annotations

import sys
import time

from tests.benchmarks.gpu_stages import ended

_STARTS_ANOTHER = """
import subprocess, sys, time
print(subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]).pid, flush=True)
time.sleep({seconds})
"""


def is_there(process: int) -> bool:
    with open(f"/proc/{process}/stat") as stat:
        return stat.read().split()[2] != "Z"


def gone(process: int) -> bool:
    """True once the process has ended, within some seconds."""
    for _ in range(100):
        try:
            if not is_there(process):
                return True
        except FileNotFoundError:
            return True
        time.sleep(0.05)
    return False


def test_what_a_stage_left_behind_ends_with_it_and_with_its_time():
    for seconds, code in ((0, 0), (60, "out of time")):
        found, said, _ = ended([sys.executable, "-c", _STARTS_ANOTHER.format(seconds=seconds)], 5, captured=True)
        assert found == code
        assert gone(int(said))
