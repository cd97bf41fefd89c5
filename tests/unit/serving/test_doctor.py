"""The doctor: every problem is one finding with a remedy, whatever the probe behind it does."""

import io
import json
import socket
import sys
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler, HTTPServer
from importlib import metadata
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from rich.console import Console

from kvstore.settings import FileSettings, LibrarySettings
from prefill_workers.engine.spec import EngineSpec
from serving.cli import doctor
from serving.cli.doctor import (
    CheckResult,
    check_disk,
    check_files,
    check_library,
    check_memory,
    check_packages,
    check_port,
    print_report,
    run_probe,
)


def probe_that_runs(code: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, **options: object) -> list[CheckResult]:
    """`run_probe` with an interpreter that runs `code` in place of the probe."""
    script = tmp_path / "interpreter"
    script.write_text(f"#!{sys.executable}\n{code}\n")
    script.chmod(0o755)
    monkeypatch.setattr(doctor.sys, "executable", str(script))
    return run_probe("some probe", remedy="do this", **options)


def test_a_package_of_another_version_and_a_missing_one_are_named(tmp_path: Path) -> None:
    lock = tmp_path / "lock"
    lock.write_text("# comment\npytest==0.1 \\\n    --hash=sha256:00\nno-such-package==1.0\n")
    result = check_packages(lock)
    assert not result.ok
    assert f"pytest {metadata.version('pytest')} (want 0.1)" in result.detail
    assert "no-such-package missing (want 1.0)" in result.detail
    assert "make setup" in result.remedy
    chosen_by_pip = check_packages(lock, pinned=False)
    assert chosen_by_pip.ok
    assert chosen_by_pip.detail == "2 of 2 are not what was tested (lock)"


def test_packages_as_locked_pass(tmp_path: Path) -> None:
    lock = tmp_path / "some.lock"
    lock.write_text(f"pytest=={metadata.version('pytest')}\nray[serve]=={metadata.version('ray')}\n")
    assert check_packages(lock) == CheckResult("packages", True, "2 as in some.lock")


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.2"])
def test_a_taken_port_fails_and_a_free_one_passes(host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_HEALTH_TIMEOUT_S", 0.2)  # whoever has it never answers
    with socket.socket() as server:
        server.bind((host, 0))
        server.listen()
        port = server.getsockname()[1]
        taken = check_port(port, host)
    assert not taken.ok
    assert f":{port}" in taken.remedy
    assert check_port(port, host).ok


@pytest.mark.parametrize(
    ("status", "said", "ours"),
    [
        (200, {"status": "ok"}, True),
        (503, {"status": "unhealthy", "reason": "decode did not answer"}, True),
        (200, "success", False),
        (404, {"detail": "Not Found"}, False),
    ],
)
def test_a_port_that_orbitserve_has_passes(status: int, said: Any, ours: bool) -> None:
    class Answer(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status)
            self.end_headers()
            self.wfile.write(json.dumps(said).encode())

        def log_message(self, *_: Any) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Answer) as server:
        Thread(target=server.handle_request, daemon=True).start()
        found = check_port(server.server_port)
    assert found.ok is ours
    assert ("in use by a running OrbitServe" in found.detail) is ours


def test_the_disk_that_is_looked_at_is_the_librarys(tmp_path: Path) -> None:
    assert doctor._on_disk(LibrarySettings(directory=tmp_path / "not" / "there yet")) == tmp_path
    for nowhere in (None, LibrarySettings(directory=None)):
        assert doctor._on_disk(nowhere) == Path.cwd()


def test_too_little_disk_fails_with_what_is_needed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert check_disk(tmp_path).remedy == "" or not check_disk(tmp_path).ok
    monkeypatch.setattr(doctor, "MIN_DISK_BYTES", 1 << 60)
    result = check_disk(tmp_path)
    assert not result.ok
    assert f"{1 << 30} GiB" in result.remedy


def test_the_memory_that_is_needed_grows_with_the_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_read", lambda _: f"MemTotal: {16 << 20} kB\nMemAvailable: {10 << 20} kB\n")
    monkeypatch.setattr(doctor, "is_cpu_build", lambda: True)
    assert check_memory(tmp_path).ok
    with (tmp_path / "model.safetensors").open("wb") as weights:
        weights.truncate(3 << 30)
    result = check_memory(tmp_path)
    assert not result.ok
    assert "until 12.0 GiB are available" in result.remedy
    monkeypatch.setattr(doctor, "is_cpu_build", lambda: False)
    assert check_memory(tmp_path).ok, "they lie in the GPU's"


def test_a_library_whose_tiers_answer_passes_and_keeps_nothing(tmp_path: Path) -> None:
    settings = LibrarySettings(directory=tmp_path / "near", url=f"file://{tmp_path}/far")
    results = check_library(settings)
    assert [result.name for result in results] == ["library directory", "library URL"]
    assert all(result.ok for result in results)
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


def test_the_place_of_files_is_tried_with_its_options(tmp_path: Path) -> None:
    assert check_files(str(tmp_path / "files"), FileSettings()).ok
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []
    wrong = check_files("s3://bucket/files", FileSettings(storage_options={"endpoint_url": "no address"}))
    unknown = check_files("no-such-scheme://somewhere", FileSettings())
    assert not wrong.ok
    assert not unknown.ok
    assert "`files_url` or `files.storage_options`" in unknown.remedy


@pytest.mark.parametrize(
    ("detail", "words"),
    [
        ("exit status 1: ValueError: No available memory for the cache blocks.", "prefill.kv_cache_gib"),
        ("exit status 1: ValueError: To serve one request with the model's max seq len (9)", "model.max_model_len"),
        ("exit status 1: torch.OutOfMemoryError: CUDA out of memory.", "free memory"),
        ("exit status 1: RuntimeError: DefaultCPUAllocator: can't allocate memory", "free memory"),
        ("exit status -9: loading", "free memory"),
        ("no result within 180 s", "less busy"),
        ("log-probability off by 0.4", "do not serve with this engine"),
    ],
)
def test_what_to_do_about_an_engine_depends_on_what_it_said(
    monkeypatch: pytest.MonkeyPatch, detail: str, words: str
) -> None:
    def probe(name: str, *_: str, remedy: str, **__: Any) -> list[CheckResult]:
        return [CheckResult(name, False, detail, remedy), CheckResult(name, True, "out of memory, not")]

    monkeypatch.setattr(doctor, "run_probe", probe)
    failed, passed = doctor.run_doctor(ports=())[-2:]
    assert words in failed.remedy
    assert passed.remedy == ""


def test_a_tier_that_does_not_answer_is_named_with_its_setting(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")
    directory, url = check_library(LibrarySettings(directory=tmp_path / "file", url="no-such-scheme://somewhere"))
    assert not directory.ok
    assert "library.directory" in directory.remedy
    assert not url.ok
    assert "no-such-scheme" in url.detail
    assert "library.storage_options" in url.remedy


def test_findings_of_a_probe_arrive_between_noise(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    finding = '[{"name": "a", "ok": true, "detail": "fine"}, {"name": "b", "ok": false, "detail": "broken"}]'
    code = f"print('noise'); print({doctor._RESULT_MARK + finding!r}); print('more noise')"
    results = probe_that_runs(code, monkeypatch, tmp_path)
    assert results == [CheckResult("a", True, "fine"), CheckResult("b", False, "broken", "do this")]


def test_a_probe_that_raises_reports_its_last_words(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    [result] = probe_that_runs("raise RuntimeError('no such kernel')", monkeypatch, tmp_path)
    assert result == CheckResult("some probe", False, "exit status 1: RuntimeError: no such kernel", "do this")


def test_advice_printed_after_an_error_does_not_hide_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    code = "print('[rank0]: InductorError: no compiler'); print('Set VERBOSE=1 for more'); raise SystemExit(1)"
    [result] = probe_that_runs(code, monkeypatch, tmp_path)
    assert result.detail == "exit status 1: [rank0]: InductorError: no compiler"


def test_a_probe_that_crashes_is_a_finding(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    [result] = probe_that_runs("import os; os.abort()", monkeypatch, tmp_path)
    assert not result.ok
    assert "exit status -6" in result.detail


def test_a_probe_that_hangs_is_a_finding(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    [result] = probe_that_runs("import time; time.sleep(60)", monkeypatch, tmp_path, timeout_s=0.2)
    assert not result.ok
    assert "no result within" in result.detail


def test_probes_see_the_environment_they_are_given(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    code = (
        "import json, os\n"
        f"print('{doctor._RESULT_MARK}' + json.dumps([dict(name='x', ok=True, detail=os.environ['GIVEN'])]))"
    )
    [result] = probe_that_runs(code, monkeypatch, tmp_path, environment={"GIVEN": "yes"})
    assert result.detail == "yes"


def test_the_engine_is_checked_with_the_kv_that_it_will_have(monkeypatch: pytest.MonkeyPatch) -> None:
    environments: dict[str, Mapping[str, str]] = {}

    def probe(name: str, *_: str, environment: Mapping[str, str] | None = None, **__: str) -> list[CheckResult]:
        environments[name] = environment or {}
        return []

    monkeypatch.setattr(doctor, "run_probe", probe)
    doctor.run_doctor(ports=(), engine=EngineSpec("model", kv_cache_gib=8))
    assert environments["engine"]["VLLM_CPU_KVCACHE_SPACE"] == "8"


def test_a_hand_off_is_measured_with_the_switches_that_engines_have(monkeypatch: pytest.MonkeyPatch) -> None:
    environments: dict[str, Mapping[str, str]] = {}

    def probe(name: str, *_: str, environment: Mapping[str, str] | None = None, **__: str) -> list[CheckResult]:
        environments[name] = environment or {}
        return []

    monkeypatch.setattr(doctor, "run_probe", probe)
    for is_cpu in (True, False):
        monkeypatch.setattr(doctor, "is_cpu_build", lambda is_cpu=is_cpu: is_cpu)
        doctor.run_doctor(ports=())
        assert ("UCX_CUDA_IPC_ENABLE_GET_ZCOPY" in environments["nixl"]) is not is_cpu


def test_a_probe_that_hangs_ends_with_the_processes_that_it_started(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    told = tmp_path / "pid"
    code = "import os"
    code += "\npid = os.spawnlp(os.P_NOWAIT, 'sleep', 'sleep', '60')"
    code += f"\nopen({str(told)!r}, 'w').write(str(pid))\nos.wait()"
    [result] = probe_that_runs(code, monkeypatch, tmp_path, timeout_s=5)
    assert result.detail == "no result within 5 s"
    started = Path(f"/proc/{told.read_text()}/stat")
    assert not started.exists() or started.read_text().rpartition(")")[2].split()[0] == "Z"


def test_nixl_moves_bytes_on_this_machine() -> None:
    [result] = run_probe("nixl", remedy="do this")
    assert result.ok, result.detail
    assert result.name == "NIXL loopback"


def test_the_report_shows_remedies_of_failures_only() -> None:
    out = io.StringIO()
    results = [CheckResult("port 1", False, "taken [by x]", "stop x"), CheckResult("disk", True, "enough", "unused")]
    assert not print_report(results, Console(file=out, width=100))
    text = out.getvalue()
    assert "taken [by x]" in text
    assert "stop x" in text
    assert "unused" not in text
    assert "1 of 2 checks failed" in text


def test_a_report_without_failures_says_so() -> None:
    out = io.StringIO()
    assert print_report([CheckResult("disk", True, "enough")], Console(file=out))
    assert "all checks passed" in out.getvalue()
