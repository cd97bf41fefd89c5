"""How a replica's process is set up."""

from __future__ import annotations

import os
import platform
import subprocess
import sys

import pytest

_LOOK = """
import os, threading
from pathlib import Path
from serving.replicas.process import give_way

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

_ENTER = """
import os
from serving.settings import PrefillRoleSettings
from serving.replicas.process import enter

enter(PrefillRoleSettings(threads=2))
import torch
"""

_ENTER_VLLM = """
import os
from infra import vllm_env
from serving.settings import PrefillRoleSettings
from serving.replicas.process import enter_vllm

vllm_env.is_cpu_build = lambda: False
enter_vllm(PrefillRoleSettings(threads=2), kv_cache_gib=None)
print(os.environ["TRITON_F32_DEFAULT"], os.environ["UCX_CUDA_IPC_ENABLE_GET_ZCOPY"])
"""

_FAULTS = """
import resource, threading
from serving.settings import PrefillRoleSettings
from serving.replicas.process import enter

def pages():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

def work():
    before = pages()
    for _ in range(10):
        [bytes([1]) * (10 << 20) for _ in range(4)]
    print((pages() - before) * resource.getpagesize() >> 20)

enter(PrefillRoleSettings(threads=2))
thread = threading.Thread(target=work)
thread.start(), thread.join()
"""


@pytest.mark.skipif("glibc" not in platform.libc_ver(), reason="about glibc's allocator")
@pytest.mark.parametrize(("given", "least", "most"), [({}, 0, 120), ({"MALLOC_ARENA_MAX": "4"}, 200, 1000)])
def test_what_a_thread_frees_is_at_hand_again_unless_it_is_told_otherwise(given: dict[str, str], least: int, most: int):
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MALLOC_")} | given
    command = [sys.executable, "-c", _FAULTS]
    found = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    assert least <= int(found.stdout) <= most, "MiB that came page by page, of the 400 that were asked for"


@pytest.mark.skipif(sys.platform != "linux", reason="OpenMP is libgomp on Linux")
@pytest.mark.parametrize(("given", "spins"), [({}, "10000"), ({"GOMP_SPINCOUNT": "3000"}, "3000")])
def test_openmp_keeps_a_processor_for_half_a_millisecond_unless_it_is_told_otherwise(given: dict[str, str], spins: str):
    # An engine in this process has vLLM preload OpenMP in all that it starts: before `enter`, with what is set here.
    dropped = {"GOMP_SPINCOUNT", "LD_PRELOAD"}
    inherited = {name: value for name, value in os.environ.items() if name not in dropped}
    environment = {**inherited, "OMP_DISPLAY_ENV": "VERBOSE", **given}
    found = subprocess.run([sys.executable, "-c", _ENTER], capture_output=True, text=True, check=True, env=environment)
    (line,) = [line for line in found.stderr.splitlines() if "GOMP_SPINCOUNT" in line]
    assert line.split("=")[1].strip() == f"'{spins}'", "as OpenMP read it"


@pytest.mark.parametrize(("gpus", "niceness"), [(0, "7"), (1, "0")])
def test_a_replica_gives_way_where_it_computes_on_processors(gpus: int, niceness: str):
    settings = f"DecodeRoleSettings(num_gpus={gpus}, niceness=7)"
    look = "import os; from serving.settings import DecodeRoleSettings; from serving.replicas.process import enter; "
    look += f"enter({settings}); print(os.getpriority(0, 0))"
    found = subprocess.run([sys.executable, "-c", look], capture_output=True, text=True, check=True)
    assert found.stdout.split() == [niceness]


def test_a_replica_computes_with_the_processors_that_it_may_use():
    look = "import os; from serving.settings import DecodeRoleSettings; from serving.replicas.process import enter; "
    look += "os.sched_setaffinity(0, [min(os.sched_getaffinity(0))]); enter(DecodeRoleSettings()); "
    look += "print(os.environ['OMP_NUM_THREADS'])"
    found = subprocess.run([sys.executable, "-c", look], capture_output=True, text=True, check=True)
    assert found.stdout.split() == ["1"]


def test_a_process_that_gives_way_further_is_left_as_it_is():
    look = "import os; from serving.replicas.process import give_way; give_way(3); print(os.getpriority(0, 0))"
    found = subprocess.run(["nice", "-n", "9", sys.executable, "-c", look], capture_output=True, text=True, check=True)
    assert found.stdout.split() == ["9"]


def test_all_threads_of_a_process_give_way_and_those_that_they_start():
    found = subprocess.run([sys.executable, "-c", _LOOK], capture_output=True, text=True, check=True)
    assert found.stdout.split() == ["7"]


_LOG = """
import logging, logging.config, logging.handlers, sys
from serving.replicas.process import keep_log_open

# as Ray Serve writes a replica's log
logging.getLogger().addHandler(logging.handlers.MemoryHandler(1, target=logging.StreamHandler(sys.stdout)))
keep_log_open()
logging.config.dictConfig({"version": 1, "disable_existing_loggers": False})
logging.getLogger("prefill_workers.fidelity.monitor").warning("a point is switched off")
"""


def test_what_a_replica_says_is_logged_whoever_configures_logging_anew():
    done = subprocess.run([sys.executable, "-c", _LOG], capture_output=True, text=True, check=True)
    assert done.stdout == "a point is switched off\n"


def test_an_operators_own_switches_of_gpus_stay():
    environment = os.environ | {"UCX_CUDA_IPC_ENABLE_GET_ZCOPY": "off"}
    said = subprocess.run(
        [sys.executable, "-c", _ENTER_VLLM], env=environment, capture_output=True, check=True, text=True
    )
    assert said.stdout.split() == ["ieee", "off"]
