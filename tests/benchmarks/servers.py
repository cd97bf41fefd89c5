"""Servers to measure: ours on Ray Serve, ours embedded in this process, and vLLM's own."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import AsyncGenerator, Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import psutil
from rich.console import Console

from infra.ports import free_port
from infra.vllm_env import vllm_environment
from prefill_workers.protocol import SessionStats
from serving.bench.models import GPU_POOL_GIB, load_format, measured_dtype, on_gpu
from serving.config import OrbitServeConfig
from serving.engine_spec import decode_spec, front_end_config, prefill_spec

if TYPE_CHECKING:
    from prefill_workers.background.patch_precompiler import CompileStats
    from prefill_workers.engine.engine import PrefillEngine
    from prefill_workers.fidelity.monitor import PointStatus
    from prefill_workers.modes import OperatingPoint
    from prefill_workers.protocol import LeaseState

_READY_SECONDS = 900.0  # a busy machine has taken 370
GPU_PART = 0.2  # of a GPU's memory must be free for an engine beside others


@dataclass(frozen=True)
class Server:
    """An OpenAI server; `settle` waits until it is up and has stored what it learnt.

    `engine` is an embedded server's prefill engine: while no request is in flight it may be borrowed. `processes` are
    its processes, if it has any of its own.
    """

    url: str
    model: str
    settle: Callable[[], None]
    engine: PrefillEngine | None = None
    processes: Callable[[], Collection[psutil.Process]] = tuple


def bench_config(checkpoint: Path, root: Path, **sections: Any) -> OrbitServeConfig:
    """One replica a role with a fresh library below `root`; on a GPU machine they share it.

    No checks of fidelity: their models' weights are random, and a point that is switched off would not be measured.
    """
    settings: dict[str, Any] = {
        "model": {
            "path": checkpoint,
            "load_format": load_format(checkpoint),
            "dtype": measured_dtype(),
            "max_model_len": 4096,
        },
        "http": {"port": free_port()},
        "library": {"directory": root / "library"},
        "files_url": str(root / "files"),
        "prefill": {"fidelity": {"share": 0}},
    }
    if on_gpu():
        part = {"num_gpus": GPU_PART, "gpu_memory_utilization": GPU_PART}
        pool = {**part, "kv_cache_gib": GPU_POOL_GIB}
        settings |= {"prefill": settings["prefill"] | pool, "decode": pool, "vision": part}
        settings["precompute"] = {"num_gpus": GPU_PART}
    for name, section in sections.items():
        settings[name] = {**settings.get(name, {}), **section} if isinstance(section, dict) else section
    return OrbitServeConfig.model_validate(settings)


@contextmanager
def ours(checkpoint: Path, console: Console, quick: bool, **sections: Any) -> Iterator[Server]:
    """OrbitServe on Ray Serve; in quick runs with all roles in this process (starts sooner)."""
    with tempfile.TemporaryDirectory(prefix="orbitserve-bench-") as root:
        config = bench_config(checkpoint, Path(root), **sections)
        if quick:
            with embedded(config) as server:
                yield server
            return
        from serving.cli.demo import wait_until_formed
        from serving.deploy.launch import application

        with application(config, console) as url:
            yield Server(url, config.model.served_name, wait_until_formed)


@contextmanager
def vllm_alone(
    checkpoint: Path, kv_cache_gib: int = 1, *, compiled: bool = False, context: int = 4096
) -> Iterator[Server]:
    """vLLM's own OpenAI server with prefix caching, in the environment that our engines have.

    `compiled`: it compiles the model, as it does by default, and as needs a C++ compiler on a CPU; else it runs eagerly
    like our engines. `context`: tokens of the longest prompt. It keeps as many GiB of processed images as our ingress
    does. It starts beside whatever is done next: call `settle` before the first request.
    """
    port = free_port()
    command = [
        *(sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(checkpoint)),
        *("--dtype", measured_dtype()),
        *(
            "--port",
            str(port),
            "--host",
            "127.0.0.1",
            "--max-model-len",
            str(context),
            "--max-num-batched-tokens",
            "4096",
        ),
        *("--enable-prefix-caching", "--served-model-name", checkpoint.name),
        *("--enable-prompt-tokens-details", "--mm-processor-cache-gb", "1"),
        *(() if compiled else ("--enforce-eager",)),
        *("--load-format", load_format(checkpoint)),
    ]
    if on_gpu():
        command += ["--gpu-memory-utilization", str(GPU_PART), "--kv-cache-memory-bytes", str(kv_cache_gib << 30)]
    else:
        command += ["--block-size", "32"]  # not 128: of fewer it warns that they are slow
    environment = {**os.environ, **vllm_environment(kv_cache_gib=kv_cache_gib, threads=os.cpu_count())}
    if compiled:
        environment.pop("TORCH_COMPILE_DISABLE", None)
    with tempfile.NamedTemporaryFile(prefix="orbitserve-vllm-", suffix=".log") as log:
        process = subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT)
        try:
            url = f"http://127.0.0.1:{port}"
            settle = partial(_wait_until_healthy, url, process, Path(log.name))
            yield Server(url, checkpoint.name, settle, processes=partial(tree, psutil.Process(process.pid)))
        finally:
            process.terminate()
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()


def tree(root: psutil.Process) -> set[psutil.Process]:
    """A process and all that it started."""
    return {root, *root.children(recursive=True)}


@contextmanager
def standing_still(processes: Collection[psutil.Process]) -> Iterator[None]:
    """Processes that do not run meanwhile.

    What only waits wakes up all the same, and takes time from other processes (benchmark `idle`).
    """
    stopped = []
    try:
        for process in processes:
            with suppress(psutil.NoSuchProcess):
                process.suspend()
                stopped.append(process)
        yield
    finally:
        for process in stopped:
            with suppress(psutil.NoSuchProcess):
                process.resume()


def _wait_until_healthy(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + _READY_SECONDS
    while True:
        try:
            if httpx.get(f"{url}/health", timeout=2).status_code == 200:
                return
        except httpx.HTTPError:
            pass
        if process.poll() is not None or time.monotonic() > deadline:
            raise RuntimeError(f"vLLM's server did not start:\n{log.read_text()[-2000:]}")
        time.sleep(0.2)


# -- embedded ---------------------------------------------------------------------------------------------------------


class EmbeddedRoles:
    """`Roles` over plain objects: prefill in this process, decode in vLLM's own core process."""

    def __init__(self, config: OrbitServeConfig) -> None:
        from decode_workers.engine import DecodeEngine
        from kvstore.library import Library
        from prefill_workers.engine.engine import PrefillEngine
        from prefill_workers.link.linker import Linker
        from prefill_workers.patches.harvester import Harvester
        from prefill_workers.patches.patch_compiler import PatchCompiler, load_form
        from prefill_workers.scheduler.cost_model import measure_forward_cost
        from prefill_workers.scheduler.prefill_loop import PrefillLoop
        from prefill_workers.settings import LoopLimits

        # The decode core inherits the environment when it starts: every engine needs a port of its own.
        self._decode = DecodeEngine(decode_spec(config))
        os.environ["VLLM_NIXL_SIDE_CHANNEL_PORT"] = str(free_port())
        self.engine = PrefillEngine(prefill_spec(config))
        self._library = Library(config.library, self.engine.fingerprint)
        form = load_form(config.patch, self._library)
        compiler = PatchCompiler(self._library, form)
        settings = config.prefill
        self._linker = Linker(self.engine, self._library, form, keeps_prefixes=settings.prefix_cache)
        self._loop = PrefillLoop(
            self._linker,
            Harvester(self.engine, self._library, form, compiler.compile),
            LoopLimits(settings.max_batch_tokens, settings.max_queue, settings.lease_seconds),
            owner="embedded",
            cost_model=measure_forward_cost(self.engine),
        )
        self._loop.start()
        self._thread = ThreadPoolExecutor(1)

    async def prefetch(self, request: Any) -> Sequence[str]:
        """See `serving.replicas.prefill.PrefillWorker.prefetch`; here nothing is encoded ahead."""
        self._linker.prefetch(request)
        return ()

    async def encode(self, items: Sequence[Any]) -> Any:
        """Embeddings from the prefill engine's own tower; the loop must be idle (one at a time)."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, self.engine.encode, list(items))

    async def link(self, request: Any, indices: Sequence[int], embeddings: Any) -> Any:
        """See `serving.replicas.prefill.PrefillWorker.link`."""
        given = dict(zip(indices, embeddings, strict=True))
        plan = await asyncio.get_running_loop().run_in_executor(self._thread, self._linker.plan, request, given)
        return await asyncio.wrap_future(self._loop.submit(plan))

    def generate(
        self, token_ids: list[int], transfer: dict[str, Any], params: Any, request_id: str, **options: Any
    ) -> AsyncGenerator[Any, None]:
        """See `decode_workers.engine`."""
        return self._decode.generate(token_ids, transfer, params, request_id, **options)

    async def renew(self, lease: str) -> LeaseState:
        """See `prefill_workers.scheduler.prefill_loop`."""
        return self._loop.renew(lease)

    async def keep_answer(self, lease: str, token_ids: Sequence[int], offer: Mapping[str, Any] | None = None) -> None:
        """See `prefill_workers.scheduler.prefill_loop`."""
        await asyncio.wrap_future(self._loop.keep_answer(lease, token_ids, offer))
        if offer is not None:
            self._decode.end_hand_back(offer["remote_request_id"])

    async def abandon(self, transfer: dict[str, Any], readers: int) -> None:
        """See `decode_workers.engine`."""
        await self._decode.abandon(transfer, readers)

    async def check_health(self) -> None:
        """Raise when the decode engine died."""
        await self._decode.check_health()

    async def fidelity(self) -> dict[str, list[PointStatus]]:
        """Nothing is checked here: both arms of a comparison do the same work."""
        return {"embedded": self._linker.fidelity.status()}

    async def allow(self, point: OperatingPoint) -> int:
        """See `prefill_workers.fidelity.monitor`."""
        return int(self._linker.fidelity.allow(point))

    async def compiled(self) -> dict[str, CompileStats]:
        """See `prefill_workers.background.patch_precompiler`."""
        return {"embedded": self._loop.stats().compiled}

    async def session_stats(self) -> dict[str, SessionStats]:
        """See `serving.replicas.prefill.PrefillWorker.stats`."""
        store = self._linker.sessions.store
        return {"embedded": SessionStats(len(store), store.nbytes)}

    async def forget(self, content: str, tenant: str) -> None:
        """Delete everything derived from some content."""
        await self._linker.forgets.forget(content, tenant)
        await asyncio.to_thread(self._library.delete_content, content, tenant)

    def settle(self) -> None:
        """Wait until everything learnt is stored."""
        from prefill_workers.scheduler.loop_stats import drain

        drain(self._loop, 300)
        self._library.flush()

    def close(self) -> None:
        """Stop the engines."""
        self._loop.stop()
        self._library.close()
        self.engine.shutdown()
        self._decode.shutdown()


@contextmanager
def embedded(config: OrbitServeConfig) -> Iterator[Server]:
    """The same HTTP application on `EmbeddedRoles`, in a thread of this process."""
    os.environ.update(vllm_environment(kv_cache_gib=1, threads=os.cpu_count(), nixl_port=free_port()))
    import uvicorn

    from serving.api.app import build_api
    from serving.frontend.engine_client import LinkedEngineClient

    started: dict[str, Any] = {}
    ready = threading.Event()

    async def run() -> None:
        roles = EmbeddedRoles(config)
        front_end = front_end_config(config.model, 1.0)
        client = LinkedEngineClient(front_end, roles, config.sums_up_to, config.prefill)
        api = await build_api(client, config, on_delete=roles.forget)
        server = uvicorn.Server(uvicorn.Config(api, config.http.host, config.http.port, log_level="warning"))
        started.update(roles=roles, server=server)
        task = asyncio.create_task(server.serve())
        while not server.started and not task.done():
            await asyncio.sleep(0.02)
        ready.set()
        await task
        roles.close()

    def body() -> None:
        try:
            asyncio.run(run())
        except BaseException as error:
            started.setdefault("error", error)
            raise
        finally:
            ready.set()

    thread = threading.Thread(target=body, name="embedded-service", daemon=True)
    thread.start()
    ready.wait(_READY_SECONDS)
    if "server" not in started:
        raise RuntimeError("the embedded service did not start") from started.get("error")
    try:
        roles: EmbeddedRoles = started["roles"]
        url = f"http://{config.http.host}:{config.http.port}"
        yield Server(url, config.model.served_name, roles.settle, roles.engine)
    finally:
        started["server"].should_exit = True
        thread.join(30)
