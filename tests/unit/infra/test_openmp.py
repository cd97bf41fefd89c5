"""How a process's OpenMP threads wait, looked at from outside: by the threads that it has."""

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator

import pytest

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="OpenMP is libgomp on Linux")

_COMPUTE = "import os, torch; from infra.cpu import openmp; torch.zeros(1 << 20); "
_TASKS = "len(os.listdir('/proc/self/task'))"
_SETTLED = f"""
import time
def settled(count):
    end = time.monotonic() + 10
    while {_TASKS} != count and time.monotonic() < end: time.sleep(0.01)
    return {_TASKS}
"""


def run(code: str, **environment: str) -> list[str]:
    """What it prints in a process of its own, with two threads for OpenMP."""
    given = {**os.environ, "OMP_NUM_THREADS": "2", **environment}
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=given)
    return found.stdout.split()


def test_released_threads_end_and_come_back():
    look = f"print({_TASKS})"
    lines = run(_COMPUTE + f"{look}; openmp.release(); {look}; torch.zeros(1 << 20); {look}")
    before, released, after = map(int, lines)
    assert released == before - 1
    assert after == before


def test_alone_a_thread_computes_without_others_until_it_is_done():
    code = "print(torch.get_num_threads())"
    lines = run(_COMPUTE + f"{code}\nwith openmp.alone(): {code}\n{code}")
    assert lines == ["2", "1", "2"]


def test_alone_is_over_after_an_error_too():
    code = _COMPUTE + "\ntry:\n with openmp.alone(): raise KeyError\nexcept KeyError: print(torch.get_num_threads())"
    assert run(code) == ["2"]


def test_while_others_compute_there_are_more_threads_than_processors_and_libgomp_has_them_sleep():
    code = f"""{_COMPUTE}{_SETTLED}
plain = {_TASKS}
openmp._running = lambda: os.cpu_count()
openmp.consider_others(); print(settled(plain + 2) - plain)
openmp._running = lambda: 0
openmp.consider_others(); print(settled(plain + 1) - plain)
"""
    assert run(code) == ["2", "1"], "the thread that keeps the further team, and that team's other thread"


def test_nobody_is_considered_where_that_is_switched_off():
    code = f"""{_COMPUTE}
plain = {_TASKS}
openmp._running = lambda: os.cpu_count()
openmp.consider_others(); time.sleep(0.1); print({_TASKS} - plain)
"""
    assert run("import time; " + code, ORBITSERVE_CONSIDER_OTHERS="0") == ["0"]


def test_nobody_is_considered_where_the_system_does_not_tell():
    code = f"{_COMPUTE} openmp._load = lambda: None; print(openmp._others())"
    assert run(code) == ["0"]


@pytest.fixture
def busy() -> Iterator[None]:
    """Another process that computes."""
    process = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    yield
    process.kill()
    process.wait()


def until(met: Callable[[], bool], seconds: float = 20.0) -> bool:
    """Whether it comes to be."""
    deadline = time.monotonic() + seconds
    while not met() and time.monotonic() < deadline:
        time.sleep(0.01)
    return met()


@pytest.mark.usefixtures("busy")
def test_another_process_that_computes_is_seen():
    from infra.cpu import openmp

    assert until(lambda: openmp._others() >= 1)


def test_one_that_stops_at_once_is_not(monkeypatch: pytest.MonkeyPatch):
    from infra.cpu import openmp

    seen = iter([2, 1, 0])
    monkeypatch.setattr(openmp, "_running", lambda: next(seen))
    assert openmp._others() == 0


def test_setting_the_brake_returns_at_once():
    from infra.cpu import openmp

    brake = openmp._Brake()
    began = time.monotonic()
    for wanted in (True, False) * 50:
        brake.set(wanted)
    assert time.monotonic() - began < 5
    assert any(thread.name == "openmp-brake" for thread in threading.enumerate())
