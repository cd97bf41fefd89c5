"""Stages on a GPU: they end with all that they started, and count only if they have measured something."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import pytest

from infra.vllm_env import GPU_ENVIRONMENT
from serving.cli import doctor_gpu
from tests.benchmarks import gpu_stages
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


def test_a_benchmark_that_wrote_no_record_has_not_ended_well(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    record = tmp_path / "ttft.json"
    monkeypatch.setattr(gpu_stages, "_OUT", tmp_path)
    monkeypatch.setattr(gpu_stages, "_NEEDS", {})
    monkeypatch.setitem(gpu_stages._RECORDS, "ttft", record)
    record.write_text("an earlier call's")
    monkeypatch.setitem(gpu_stages._COMMANDS, "ttft", ["-c", ""])
    gpu_stages.main(["ttft"])
    assert gpu_stages.finished() == set()
    monkeypatch.setitem(gpu_stages._COMMANDS, "ttft", ["-c", f"open({str(record)!r}, 'w').write('numbers')"])
    gpu_stages.main(["ttft"])
    assert gpu_stages.finished() == {"ttft"}


def test_the_benchmark_of_the_command_line_is_run_by_its_stage(monkeypatch: pytest.MonkeyPatch):
    called: list[str] = []
    monkeypatch.setattr("serving.cli.main.app", lambda: called.append("orbitserve"))
    option, code, *arguments = gpu_stages._COMMANDS["link-time"]
    assert (option, arguments[:2]) == ("-c", ["bench", "link-time"])
    exec(code, {})
    assert called == ["orbitserve"], "a module without a guard would be imported alone"


@pytest.mark.parametrize(("stage", "absent"), [("exactness", "pytest"), ("hand-off", "nixl"), ("ttft", "vllm")])
def test_a_stage_whose_packages_are_absent_is_left_out(
    stage: str, absent: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(gpu_stages, "_OUT", tmp_path)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == absent else name)
    monkeypatch.setattr(gpu_stages, "ended", lambda *_: pytest.fail("it ran"))
    gpu_stages.main([stage])
    assert json.loads(capsys.readouterr().out) == {"stage": "left out", "of": stage, "absent": [absent]}
    assert gpu_stages.finished() == set()


def test_a_hand_off_is_measured_with_the_switches_that_engines_have(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(gpu_stages, "_OUT", tmp_path)
    for switch in GPU_ENVIRONMENT:
        monkeypatch.setenv(switch, "off")
    found = dict[str, str]()
    monkeypatch.setattr(doctor_gpu, "probe_nixl", lambda: found.update(os.environ) or [])
    gpu_stages.hand_off()
    assert found.items() >= GPU_ENVIRONMENT.items()
