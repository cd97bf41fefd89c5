"""`orbitserve doctor`: checks of this machine, and what to do about each problem.

| check             | what it does                                                              | where        |
|-------------------|---------------------------------------------------------------------------|--------------|
| packages          | compares installed versions with the lock file                            | here         |
| processor, memory, disk, ports | reads what the system says                                   | here         |
| LibreOffice       | looks for what makes pages of office files; one may do without            | here         |
| library, files    | stores, reads and deletes a blob in the configured directories and URLs   | here         |
| torch             | imports torch and torchvision                                             | own process  |
| build tools       | looks for what Triton builds its launchers with (GPUs)                    | here         |
| GPUs, roles on GPUs | names the devices; whether the roles of a configuration fit them        | own process  |
| NIXL loopback     | reads another process' memory over UCX (GPUs: another GPU's), its GB/s    | own process  |
| Ray               | starts a local cluster and runs one task                                  | own process  |
| engine            | `prefill_workers.engine.self_check`: forward, KV round trip, rotation     | own process  |

Checks that load native code run in processes of their own (`python -m serving.cli.doctor PROBE`), so that a crash or a
hang of one is a finding and not the end of the report.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from functools import partial
from importlib import metadata
from pathlib import Path

import httpx
import pyarrow as pa
from rich.console import Console
from rich.table import Table
from rich.text import Text

from infra.lock import lock_file
from infra.machine import multiplies_bf16
from infra.ports import url_host
from infra.reference import DEFAULT_MODEL, weights
from infra.vllm_env import GPU_ENVIRONMENT, is_cpu_build, vllm_environment
from kvstore.errors import TierUnavailable
from kvstore.settings import FileSettings, LibrarySettings
from kvstore.tiers.base import Tier
from kvstore.tiers.stack import TierStack
from kvstore.uploads.files import FileStore
from prefill_workers.engine.spec import EngineSpec
from serving.cli.doctor_gpu import check_build_tools, probe_gpus, probe_nixl
from serving.cli.findings import CheckResult
from serving.config import OrbitServeConfig
from serving.deploy.gpu_fit import reserved
from serving.documents.office import converter

GIB = 1 << 30
DEFAULT_PORTS = (8000,)  # HTTP
MIN_MEMORY_BYTES = 6 * GIB  # but for weights: a replica a role, each a process with torch and vLLM; the object store
MIN_DISK_BYTES = 4 * GIB
PROBE_TIMEOUT_S = 180.0
_RESULT_MARK = "doctor-result:"
_ENGINE_REMEDIES = (  # by what the engine said
    (
        r"max seq len|cache blocks|max_model_len",
        "the KV pool holds no such prompt: raise `prefill.kv_cache_gib` (on a GPU, if unset, "
        "`gpu_memory_utilization`), or lower `model.max_model_len` or leave it out",
    ),
    (
        r"out of memory|OutOfMemory|MemoryError|(cannot|can't) allocate|available memory|exit status -9\b",
        "free memory, lower `kv_cache_gib` of the roles (on a GPU, if unset, `gpu_memory_utilization`), or take a "
        "smaller model",
    ),
    (
        r"no result within",
        "wait until the machine is less busy; a large checkpoint may take longer to load, and be served all the same",
    ),
)
_HEALTH_TIMEOUT_S = 10.0


def run_doctor(
    checkpoint: Path | None = None,
    ports: Sequence[int] = DEFAULT_PORTS,
    library: LibrarySettings | None = None,
    files: tuple[str, FileSettings] | None = None,
    engine: EngineSpec | None = None,
    host: str = "127.0.0.1",
    config: OrbitServeConfig | None = None,
) -> list[CheckResult]:
    """Run every check and return all findings, in about a minute on two cores.

    Never raises for a bad machine.

    Args:
        checkpoint: the model whose engine is checked; None takes the bundled one.
        ports: TCP ports that have to be free at `host`, or in use by OrbitServe.
        library: settings of the library whose tiers are checked; None checks none.
        files: URL and settings of the uploaded files whose place is checked; None checks none.
        engine: the engine that is checked; None: the checkpoint's, with default settings.
        config: the deployment whose roles must fit the GPUs; None: none.
    """
    engine = engine or EngineSpec(str(checkpoint or weights(DEFAULT_MODEL)), hand_off=False)
    lock, pinned = lock_file("cpu" if is_cpu_build() else "gpu"), Path(sys.prefix, "environment.stamp").exists()
    results = [check_packages(lock, pinned), check_processor(), check_memory(checkpoint), check_disk(_on_disk(library))]
    results += [check_port(port, host) for port in ports]
    results.append(check_office())
    results += check_library(library) if library is not None else []
    results += [check_files(*files)] if files is not None else []
    results += run_probe("torch", remedy="run `make setup`; `.venv/bin/python -c 'import torchvision'` shows the error")
    results += check_build_tools()
    if not is_cpu_build():
        wanted = {} if config is None else reserved(config)
        results += run_probe("gpus", json.dumps(wanted), remedy="see `nvidia-smi`")
    results += run_probe(
        "nixl",
        environment={} if is_cpu_build() else GPU_ENVIRONMENT,
        remedy="KV moves over UCX: check that nothing forbids shared memory (/dev/shm) or loopback TCP",
    )
    results += run_probe(
        "ray",
        remedy="stop other local clusters (`ray stop`) or wait until the machine is less busy; logs are in /tmp/ray",
    )
    found = run_probe(
        "engine",
        json.dumps(asdict(engine)),
        environment=vllm_environment(kv_cache_gib=engine.kv_cache_gib),
        remedy="do not serve with this engine: run `make setup`, then report the model, the processor and this line",
    )
    return results + [replace(result, remedy=_engine_remedy(result)) for result in found]


def print_report(results: Iterable[CheckResult], console: Console | None = None) -> bool:
    """Print findings as a table, each failure with its remedy.

    Returns whether every check passed.
    """
    results = list(results)
    table = Table(box=None, pad_edge=False, show_header=False)
    for result in results:
        mark = Text("ok", style="green") if result.ok else Text("FAIL", style="bold red")
        finding = Text(result.detail)
        if not result.ok:
            finding.append(f"\n→ {result.remedy}", style="yellow")
        table.add_row(mark, Text(result.name), finding)
    console = console or Console()
    console.print(table)
    failed = sum(not result.ok for result in results)
    console.print(Text(f"{failed} of {len(results)} checks failed", "red") if failed else "all checks passed")
    return failed == 0


# -- checks in this process --------------------------------------------------------------------------------------------


def check_packages(lock: Path, pinned: bool = True) -> CheckResult:
    """Installed versions against the `name==version` lines of `lock`.

    Args:
        lock: the tested set for this Python.
        pinned: whether a difference is a fault. Without `infra/bootstrap.sh`, pip chose among the versions that
            `pyproject.toml` allows.
    """
    pins = re.findall(r"^([\w.-]+)(?:\[[\w,-]+\])?==([^\s\\]+)", lock.read_text(), re.MULTILINE)
    wrong = []
    for name, wanted in pins:
        try:
            found = metadata.version(name)
        except metadata.PackageNotFoundError:
            found = "missing"
        if found != wanted:
            wrong.append(f"{name} {found} (want {wanted})")
    if wrong and not pinned:
        return CheckResult("packages", True, f"{len(wrong)} of {len(pins)} are not what was tested ({lock.name})")
    if wrong:
        return CheckResult("packages", False, ", ".join(wrong), "run `make setup`")
    return CheckResult("packages", True, f"{len(pins)} as in {lock.name}")


def check_processor() -> CheckResult:
    """Cores, and the vector instructions without which vLLM's CPU kernels do not load."""
    cores = len(os.sched_getaffinity(0))
    flags = set(re.findall(r"avx512f|amx_bf16|avx512_bf16|avx2", _read("/proc/cpuinfo")))
    detail = f"{cores} cores, {' '.join(sorted(flags)) or 'no AVX2'}"
    if "avx2" in flags and is_cpu_build() and not multiplies_bf16():
        detail += "; many times slower in bf16 than in fp32: set `model.dtype: float32`"
    if "avx2" in flags or not is_cpu_build():
        return CheckResult("processor", True, detail)
    return CheckResult("processor", False, detail, "vLLM's CPU kernels need AVX2: use another machine or an NVIDIA GPU")


def check_memory(checkpoint: Path | None = None) -> CheckResult:
    """Check available memory: for the roles and, on CPUs, the weights in two of them."""
    files = checkpoint.glob("*.safetensors") if checkpoint is not None and is_cpu_build() else ()
    needed = MIN_MEMORY_BYTES + 2 * sum(file.stat().st_size for file in files)
    meminfo = re.findall(r"^(\w+): +(\d+) kB", _read("/proc/meminfo"), re.MULTILINE)
    sizes = {name: int(kib) << 10 for name, kib in meminfo}
    available, total = sizes.get("MemAvailable", 0), sizes.get("MemTotal", 0)
    detail = f"{available / GIB:.1f} of {total / GIB:.1f} GiB available"
    remedy = f"free memory until {needed / GIB:.1f} GiB are available, or lower `kv_cache_gib` of the roles"
    return _verdict("memory", available >= needed, detail, remedy)


def _on_disk(library: LibrarySettings | None) -> Path:
    """A folder of the file system that has the library's directory, or will have it."""
    directory = library.directory if library is not None else None
    wanted = Path.cwd() / (directory or "")
    return next(folder for folder in (wanted, *wanted.parents) if folder.is_dir())


def check_disk(folder: Path) -> CheckResult:
    """Free space where the library lies, or would by default."""
    free = shutil.disk_usage(folder).free
    remedy = f"the library and Ray need {MIN_DISK_BYTES // GIB} GiB: free some, or move the library elsewhere"
    return _verdict("disk", free >= MIN_DISK_BYTES, f"{free / GIB:.1f} GiB free in {folder}", remedy)


def check_port(port: int, host: str = "127.0.0.1") -> CheckResult:
    """Check that the service could listen on a TCP port, or that OrbitServe has it already."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            if _serves(port, host):
                return CheckResult(f"port {port}", True, "in use by a running OrbitServe")
            remedy = f"see who has it with `ss -ltnp 'sport = :{port}'`, or set another port in the configuration"
            return CheckResult(f"port {port}", False, error.strerror or str(error), remedy)
    return CheckResult(f"port {port}", True, "free")


def _serves(port: int, host: str) -> bool:
    """True if a service there answers /health as `serving.api.app` does, healthy or not."""
    url = f"http://{url_host(host)}:{port}/health"
    try:
        said = httpx.get(url, timeout=_HEALTH_TIMEOUT_S, trust_env=False).json()
    except (httpx.HTTPError, ValueError):
        return False
    return isinstance(said, dict) and said.get("status") in ("ok", "unhealthy")


def check_office() -> CheckResult:
    """Say whether office files can be read here; a deployment may do without."""
    missing = "not installed: docx, pptx, odt, odp and html files are refused"
    return CheckResult("LibreOffice", True, converter() or missing)


def check_library(settings: LibrarySettings) -> list[CheckResult]:
    """Store, read and delete a small blob in the library's directory and behind its URL."""
    results = []
    for name, field, other in (("library directory", "directory", "url"), ("library URL", "url", "directory")):
        place = getattr(settings, field)
        if place is None:
            continue
        remedy = f"correct `library.{field}`" + (" or `library.storage_options`" if field == "url" else "")
        remedy += "; until then chunks are computed instead of loaded"
        alone = settings.model_copy(update={other: None, "object_store_bytes": 0})
        results.append(_check_place(name, str(place), partial(_only_tier, alone), remedy))
    return results


def _only_tier(settings: LibrarySettings) -> Tier:
    (tier,) = TierStack.tiers_of(settings)
    return tier


def check_files(url: str, settings: FileSettings) -> CheckResult:
    """Store, read and delete a small blob where uploaded files are kept."""
    remedy = "correct `files_url` or `files.storage_options`; until then nothing can be uploaded"
    return _check_place("files", url, lambda: FileStore(url, settings).tier, remedy)


def _check_place(name: str, place: str, tier_of: Callable[[], Tier], remedy: str) -> CheckResult:
    key, probe = f"doctor/{uuid.uuid4().hex}", os.urandom(1 << 16)
    start = time.perf_counter()
    try:
        tier = tier_of()
        tier.put(key, [pa.py_buffer(probe)])
        found = tier.get(key)
        tier.delete(key)
    except TierUnavailable as error:
        return CheckResult(name, False, str(error), remedy)
    ok = found is not None and found.to_pybytes() == probe
    elapsed_ms = 1e3 * (time.perf_counter() - start)
    detail = f"{place}: stored, read and deleted in {elapsed_ms:.0f} ms" if ok else f"{place}: the bytes differ"
    return _verdict(name, ok, detail, remedy)


def _engine_remedy(result: CheckResult) -> str:
    """Remedy for an engine: a machine that is too small or busy is less wrong than one that miscomputes."""
    if result.ok:
        return ""
    known = (remedy for pattern, remedy in _ENGINE_REMEDIES if re.search(pattern, result.detail, re.IGNORECASE))
    return next(known, result.remedy)


def _verdict(name: str, ok: bool, detail: str, remedy: str) -> CheckResult:
    return CheckResult(name, ok, detail, "" if ok else remedy)


def _read(path: str) -> str:
    return Path(path).read_text() if Path(path).exists() else ""


# -- checks in processes of their own ----------------------------------------------------------------------------------


def run_probe(
    name: str,
    *arguments: str,
    remedy: str,
    environment: dict[str, str] | None = None,
    timeout_s: float = PROBE_TIMEOUT_S,
) -> list[CheckResult]:
    """Run `PROBES[name]` in a fresh interpreter.

    A crash, a hang or silence becomes one failed finding.
    """
    with tempfile.TemporaryFile("w+") as log:
        probe = subprocess.Popen(
            [sys.executable, "-m", "serving.cli.doctor", name, *arguments],
            env={**os.environ, **(environment or {})},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        code: int | None = None
        with suppress(subprocess.TimeoutExpired):
            try:
                code = probe.wait(timeout_s)
            finally:  # with the processes that it has started
                with suppress(ProcessLookupError):
                    os.killpg(probe.pid, signal.SIGKILL)
                probe.wait()
        log.seek(0)
        lines = log.read().split("\n")
    for line in reversed(lines):
        if line.startswith(_RESULT_MARK):
            findings = [CheckResult(**finding) for finding in json.loads(line.removeprefix(_RESULT_MARK))]
            return [_verdict(f.name, f.ok, f.detail, f.remedy or remedy) for f in findings]
    if code is None:
        return [CheckResult(name, False, f"no result within {timeout_s:.0f} s", remedy)]
    return [CheckResult(name, False, f"exit status {code}: {_last_words(lines)}", remedy)]


def _last_words(lines: Sequence[str]) -> str:
    """The last line that names an error, else the last line at all."""
    said = [line.strip() for line in lines if line.strip()]
    errors = [line for line in said if re.search(r"\b\w+(Error|Exception): ", line)]
    return (errors or said or ["it said nothing"])[-1]


def _probe_torch() -> list[CheckResult]:
    import torch
    import torchvision.transforms.v2  # what image processors use

    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    detail = f"torch {torch.__version__} on {device}, torchvision {torchvision.__version__}"
    return [CheckResult("torch", True, detail)]


def _probe_ray() -> list[CheckResult]:
    import ray

    start = time.perf_counter()
    ray.init("local", num_cpus=1, include_dashboard=False, log_to_driver=False, object_store_memory=100 << 20)
    answer = ray.get(ray.remote(lambda: 6 * 7).remote())
    ray.shutdown()
    detail = f"{ray.__version__}, cluster and task in {time.perf_counter() - start:.1f} s"
    return [CheckResult("Ray", answer == 42, detail)]


def _probe_engine(spec: str) -> list[CheckResult]:
    from prefill_workers.engine.self_check import check_alone

    outcomes = check_alone(EngineSpec(**json.loads(spec)))
    return [CheckResult(f"engine: {name}", ok, detail) for name, ok, detail in outcomes]


PROBES: dict[str, Callable[..., list[CheckResult]]] = {
    "torch": _probe_torch,
    "gpus": probe_gpus,
    "nixl": probe_nixl,
    "ray": _probe_ray,
    "engine": _probe_engine,
}


def main(arguments: Sequence[str]) -> None:
    """Run one probe and print its findings for `run_probe`.

    Called as `python -m serving.cli.doctor PROBE [ARGUMENT ...]`.
    """
    name, *rest = arguments
    findings = [asdict(result) for result in PROBES[name](*rest)]
    print(f"\n{_RESULT_MARK}{json.dumps(findings)}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
