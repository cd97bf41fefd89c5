"""Stages of `gpu.sh`: measurements and comparisons on a GPU, each in its own process.

| stage      | settles                                                                  | aim          | vLLM |
|------------|--------------------------------------------------------------------------|--------------|------|
| kernel     | the kernel's bits against the operator; its bytes a second               | 0.8 of copy  |      |
| link       | eight chunks of 1,024 tokens, from the host and from device memory       | 15 and 1 ms  |      |
| copies     | pageable and page-locked copies, each way                                |              |      |
| host       | the host kernel, by threads                                              |              |      |
| forming    | forming a patch on the GPU, and on one thread                            | 10 times     |      |
| hand-off   | a read of GPU memory between two processes over NIXL                     | over 5 GB/s  |      |
| self-check | an engine of a 7B model's shape against vLLM's own prefill               | passes       | yes  |
| graphs     | forwards of 40 to 500 tokens, padded and captured, against eager ones    | half         | yes  |
| exactness  | links of one family against vLLM's own prefill                           | passes       | yes  |
| link-time  | linking two and eight pages of 1,024 tokens against prefilling them      | 16, 8 times  | yes  |
| ttft       | first token with an image of 2,048 tokens linked, against vLLM's         | 16 times     | yes  |
"""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import types
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

_OUT = Path(os.environ.get("OUT", "build/gpu"))
_TOTAL_SECONDS = 460.0
_TOKENS, _CHUNKS, _RANK, _BLOCK = 1024, 8, 32, 64
_BUCKETS = (64, 128, 256, 512)  # tokens of forwards that are captured: a linked prompt has as much text
_ENGINE = ("self-check", "graphs", "exactness", "link-time", "ttft")
_NEEDS = {**dict.fromkeys(_ENGINE, ("vllm",)), "exactness": ("vllm", "pytest"), "hand-off": ("nixl",)}  # modules
_ORBITSERVE = ["-c", "from serving.cli.main import main; main()"]
_RECORDS = {name: _OUT / f"{name}.json" for name in ("link-time", "ttft")}  # what a stage has to write
_COMMANDS = {
    "exactness": ["-m", "pytest", "-q", "tests/integration/test_engine.py", "-k", "bit_for_bit or exact_link"],
    "link-time": [*_ORBITSERVE, "bench", "link-time", "--quick", "--json", str(_RECORDS["link-time"])],
    "ttft": ["-m", "tests.benchmarks", "ttft", "--quick", "--json", str(_RECORDS["ttft"])],
}
_SECONDS = {"self-check": 100.0, "graphs": 100.0, "exactness": 100.0, "link-time": 150.0, "ttft": 300.0}  # others: 60


def say(stage: str, **facts: Any) -> None:
    """One JSON line, on the screen and in the file."""
    line = json.dumps({"stage": stage, **facts})
    print(line, flush=True)
    with (_OUT / "gpu.jsonl").open("a") as out:
        out.write(line + "\n")


def finished() -> set[str]:
    """Stages that an earlier call has ended well."""
    path = _OUT / "gpu.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return {line["of"] for line in lines if line["stage"] == "end" and line["code"] == 0}


def main(asked: list[str]) -> None:
    """Run the stages that are asked for, or have not ended well before."""
    _OUT.mkdir(parents=True, exist_ok=True)
    until = time.monotonic() + _TOTAL_SECONDS
    for name in asked or [stage for stage in (*STAGES, *_ENGINE) if stage not in finished()]:
        if absent := [module for module in _NEEDS.get(name, ()) if importlib.util.find_spec(module) is None]:
            say("left out", of=name, absent=absent)
            continue
        left = until - time.monotonic()
        if left < 10:
            say("end", of=name, code="no time left; call again")
            continue
        arguments = _COMMANDS.get(name, ["-m", "tests.benchmarks.gpu_stages", "--one", name])
        record, began = _RECORDS.get(name), time.monotonic()
        if record is not None:
            record.unlink(missing_ok=True)  # an earlier call's
        code, said, errors = ended([sys.executable, *arguments], min(left, _SECONDS.get(name, 60.0)), name in _COMMANDS)
        if code == 0 and record is not None and not record.exists():
            code = "it has measured nothing"
        if name in _COMMANDS:
            say(name, said=said[-3000:], errors=errors[-500:] if code else "")
        say("end", of=name, code=code, seconds=round(time.monotonic() - began, 1))


def ended(command: list[str], seconds: float, captured: bool) -> tuple[int | str, str, str]:
    """Exit code of a command, its output and its errors.

    Out of time, and at its end, all that it started ends with it: a server left behind would keep the GPU's memory.
    """
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as errors:
        files = {"stdout": out, "stderr": errors} if captured else {}  # not pipes: whoever is left behind holds them
        run = subprocess.Popen(command, start_new_session=True, **files)
        code: int | str
        try:
            code = run.wait(seconds)
        except subprocess.TimeoutExpired:
            code = "out of time"
        with suppress(ProcessLookupError):
            os.killpg(run.pid, signal.SIGKILL)
        run.wait()
        said = []
        for file in (out, errors):
            file.seek(0)
            said.append(file.read())
    return code, said[0], said[1]


# -- the model that is measured: 28 layers of 4 KV heads of 128, as Qwen2.5-VL-7B --------------------------------------


def layout(layers: int = 28) -> Any:
    from kvstore.operator.layout import Layout
    from kvstore.operator.rotary import RotaryScheme

    return Layout.gqa(layers, 4, 128, RotaryScheme.from_base(128, 1e6))


def patch(rank: int = _RANK) -> Any:
    """An int8 patch of a chunk."""
    import torch

    from kvstore.operator.directions import Directions
    from kvstore.operator.patch import Patch, PatchKind

    shape, generator = layout(), torch.Generator().manual_seed(1)

    def numbers(width: int) -> Any:
        return torch.randn(shape.layers, width, rank, generator=generator)

    parts = [Directions.of(numbers(_TOKENS), 0.05 * numbers(segment.features)) for segment in shape.segments]
    return Patch(PatchKind.own, rank, tuple(part.to(torch.int8) for part in parts), (1.0, 1.0))


def chunk() -> Any:
    import torch

    return torch.randn(layout().layers, _TOKENS, layout().features).bfloat16()


def pages(tokens_first: bool = False) -> tuple[list[Any], Any]:
    """Caches of all layers with room for all chunks, and their table."""
    import torch

    from kvstore.operator.page_table import PageTable

    blocks = _CHUNKS * _TOKENS // _BLOCK + 1
    shape = (28, blocks, _BLOCK, 4, 256) if tokens_first else (28, blocks, 4, _BLOCK, 256)
    whole = torch.zeros(shape, dtype=torch.bfloat16, device="cuda")
    caches = list((whole.transpose(2, 3) if tokens_first else whole).unbind(0))
    segment, head, column = torch.cartesian_prod(*map(torch.arange, (2, 4, 128))).unbind(1)
    elements = (head * _BLOCK + torch.arange(_BLOCK)[:, None]) * 256 + segment * 128 + column
    table = PageTable.of(caches, elements, layout())
    assert table is not None
    return caches, table


def device_ms(body: Callable[[], object], turns: int = 20) -> float:
    """Milliseconds of the device."""
    import torch

    for _ in range(3):
        body()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    begin.record()
    for _ in range(turns):
        body()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / turns


def wall_ms(body: Callable[[], object], turns: int = 5) -> float:
    """Median milliseconds until the device has done it."""
    import torch

    body()
    samples = []
    for _ in range(turns):
        torch.cuda.synchronize()
        began = time.perf_counter()
        body()
        torch.cuda.synchronize()
        samples.append(1e3 * (time.perf_counter() - began))
    return statistics.median(samples)


# -- stages without vLLM -----------------------------------------------------------------------------------------------


def kernel() -> None:
    import torch

    from kvstore.operator import device_kernel
    from kvstore.operator.apply import _apply_by_layer
    from kvstore.operator.device_kernel import Placement, describe, place
    from prefill_workers.engine.device_writer import _rebuilt, _tensors

    shape, host, factors = layout(), chunk(), patch()
    expected = torch.empty_like(host)
    _apply_by_layer(host, factors, 1234, shape, expected)
    kv = host.cuda()
    there = _rebuilt(factors, [tensor.cuda() for tensor in _tensors(factors, kv.dtype)])
    target = torch.empty_like(kv)
    copied = device_ms(lambda: target.copy_(kv))
    slots = torch.randperm(_TOKENS) + _BLOCK
    constants = device_kernel.constants
    for tokens_first in (False, True):
        caches, table = pages(tokens_first)
        for precision in ("tf32x3", "ieee"):
            device_kernel.constants = lambda *a, p=precision, **k: {**constants(*a, **k), "PRECISION": p}
            for name, used in (("patched", there), ("relocated", None)):
                descriptor = describe([Placement(kv, used, 1234, slots)], shape, kv.dtype)
                words = descriptor.words.cuda()
                launch = lambda d=descriptor, w=words, t=table: place(d, w, t, shape, kv.dtype)  # noqa: E731
                began = time.perf_counter()
                launch()
                torch.cuda.synchronize()
                compiled = time.perf_counter() - began
                facts: dict[str, Any] = {}
                if used is not None:
                    block, token = slots.cuda() // _BLOCK, slots.cuda() % _BLOCK
                    rows = torch.stack([cache[block, :, token] for cache in caches]).cpu()
                    found = torch.cat([rows[..., :128].flatten(2), rows[..., 128:].flatten(2)], -1)
                    apart = (found.float() - expected.float()).abs()
                    facts = {
                        "equal": (found == expected).float().mean().item(),
                        "off": (apart.max() / expected.float().abs().max()).item(),
                    }
                took = device_ms(launch)
                say(
                    "kernel", pages="NHD" if tokens_first else "HND", what=name, precision=precision, ms=took,
                    of_a_copy=copied / took, gb_s=2 * kv.nbytes / took / 1e6, compile_s=compiled, **facts,
                )  # fmt: skip


def link() -> None:
    import torch

    from kvstore.operator.device_kernel import Placement
    from prefill_workers.engine.copy_stream import RING_BYTES, CudaCopyStream, PinnedRing
    from prefill_workers.engine.device_cache import DeviceCache
    from prefill_workers.engine.device_writer import DeviceWriter

    _, table = pages()
    ring = PinnedRing(CudaCopyStream(torch.device("cuda")), RING_BYTES)
    chunks = [
        Placement(chunk(), patch(), 1000 * n, torch.arange(_TOKENS) + n * _TOKENS + _BLOCK, True, True)  # they last
        for n in range(_CHUNKS)
    ]
    for name, limit in (("from the host", 0), ("from device memory", 4 << 30)):
        writer = DeviceWriter(table, layout(), torch.bfloat16, ring, DeviceCache(limit))
        writer.write(chunks)
        torch.cuda.synchronize()
        began = time.perf_counter()
        writer.write(chunks)
        enqueued = 1e3 * (time.perf_counter() - began)
        total = wall_ms(lambda w=writer: w.write(chunks))
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            writer.write(chunks)
            torch.cuda.synchronize()
        counts = {event.key[:40]: event.count for event in profile.key_averages() if event.device_time_total}
        say(
            "link",
            what=name,
            ms=total,
            enqueue_ms=enqueued,
            megabytes=_CHUNKS * chunks[0].kv.nbytes / 1e6,
            counts=counts,
        )


def copies() -> None:
    import torch

    from prefill_workers.engine.copy_stream import RING_BYTES, CudaCopyStream, PinnedRing

    kv, ring = chunk(), PinnedRing(CudaCopyStream(torch.device("cuda")), RING_BYTES)
    pinned, there = kv.pin_memory(), kv.cuda()
    say(
        "copies", megabytes=kv.nbytes / 1e6, to_pageable_ms=wall_ms(lambda: kv.cuda()),
        to_pinned_ms=wall_ms(lambda: pinned.to("cuda", non_blocking=True)), to_ring_ms=wall_ms(lambda: ring.send([kv])),
        from_pageable_ms=wall_ms(lambda: there.cpu()), from_ring_ms=wall_ms(lambda: ring.fetch(there)),
        from_by_layer_ms=wall_ms(lambda: [rows.cpu() for rows in there]),
    )  # fmt: skip


def host() -> None:
    import torch

    from kvstore.operator.apply import apply

    kv, factors, out = chunk(), patch(), chunk()
    for threads in (1, 4, 16):
        torch.set_num_threads(threads)
        say("host", threads=threads, apply_ms=wall_ms(lambda: apply(kv, factors, 9, layout(), out=out)))


def forming() -> None:
    import torch

    from kvstore.operator.patch import form_patch

    shape = layout()
    delta = torch.randn(28, _TOKENS, 48) @ torch.randn(28, 48, shape.features) * 0.02
    delta += torch.randn(delta.shape) * 0.005
    there = delta.cuda()
    on_gpu = wall_ms(lambda: form_patch(there, shape, _RANK, dtype=torch.int8, spread=True), 3)
    alone, beside = beside_products(lambda: form_patch(there, shape, _RANK, dtype=torch.int8, spread=True))
    torch.set_num_threads(1)
    began = time.perf_counter()
    form_patch(delta, shape, _RANK, dtype=torch.int8, spread=True)
    took = 1e3 * (time.perf_counter() - began)
    say("forming", gpu_ms=on_gpu, one_thread_ms=took, forward_ms=alone, forward_beside_ms=beside)


def beside_products(body: Callable[[], object]) -> tuple[float, float]:
    """Milliseconds of a 7B model's products, alone and beside `body` on another thread."""
    import threading

    import torch

    weight, rows = (torch.randn(n, 3584, device="cuda", dtype=torch.bfloat16) for n in (3584, 512))
    stop = threading.Event()

    def others() -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            while not stop.is_set():
                body()

    def products() -> None:
        for _ in range(28 * 4):
            rows @ weight.T

    alone = device_ms(products)
    thread = threading.Thread(target=others)
    thread.start()
    beside = device_ms(products)
    stop.set()
    thread.join()
    return alone, beside


def hand_off() -> None:
    from infra.vllm_env import GPU_ENVIRONMENT
    from serving.cli.doctor_gpu import probe_nixl

    os.environ.update(GPU_ENVIRONMENT)  # as engines have it
    for result in probe_nixl():
        say("hand-off", ok=result.ok, detail=result.detail)


def started_engine(buckets: tuple[int, ...]) -> tuple[Any, float]:
    """An engine of a 7B model with random weights, and the seconds of its start."""
    from infra.vllm_env import vllm_environment

    os.environ.update(vllm_environment(kv_cache_gib=None))
    from infra.checkpoints import checkpoint_path
    from prefill_workers.engine.engine import PrefillEngine
    from prefill_workers.engine.spec import EngineSpec

    folder, began = checkpoint_path("qwen2_5_vl-7b"), time.perf_counter()
    spec = EngineSpec(
        str(folder), "bfloat16", "dummy", 8192, kv_cache_gib=8, hand_off=False, device_bytes=1 << 30, buckets=buckets
    )
    return PrefillEngine(spec), time.perf_counter() - began


def graphs() -> None:
    from dataclasses import replace

    import torch

    from kvstore.operator.device_kernel import Placement
    from prefill_workers.engine.self_check import self_check
    from prefill_workers.sequence import LinkSequence, Run

    engine, started = started_engine(_BUCKETS)
    say("graphs", start_s=started, passed=all(outcome.passed for outcome in self_check(engine)))
    captured = engine.spec
    kv, blocks = chunk(), range(1, 2 + 2 * _TOKENS // _BLOCK)
    for tokens in (40, 100, 200, 500):
        index = torch.arange(_TOKENS + tokens)
        ids = torch.randint(0, 1000, (len(index),), dtype=torch.int32)
        sequence = LinkSequence(ids, index.expand(3, -1), blocks)
        facts, given = dict[str, float](), list[Any]()
        for name, spec in (("eager", replace(captured, buckets=())), ("captured", captured)):
            engine.spec = spec
            placed = engine.place([Placement(kv, patch(), 9, engine.slots(blocks, 0, _TOKENS))])
            forward = lambda: engine.forward([(sequence, [Run(_TOKENS, len(index))])], ends=[0])  # noqa: B023, E731
            given.append(forward())
            facts |= {f"{name}_ms": wall_ms(forward, 20), f"{name}_device_ms": 1e3 * engine.forward_span.seconds}
            facts |= {"place_device_ms": 1e3 * placed.seconds}
        apart = (given[0] - given[1]).abs().max() / given[0].abs().max()
        say("graphs", tokens=tokens, **facts, off=apart.item())
    engine.shutdown()


def checked() -> None:
    from prefill_workers.engine.self_check import self_check

    engine, started = started_engine(())
    for outcome in self_check(engine):
        say("self-check", name=outcome.name, passed=outcome.passed, detail=outcome.detail)
    say("self-check", start_s=started, places_on_device=engine.places_on_device, block_size=engine.block_size)
    engine.shutdown()


STAGES: dict[str, Callable[[], None]] = {
    "kernel": kernel, "link": link, "copies": copies, "host": host, "forming": forming,
    "hand-off": hand_off,
}  # fmt: skip


def one(name: str) -> None:
    """One stage, in this process."""
    for absent in ("blake3", "pyarrow"):  # imported by what is used here, not called
        if importlib.util.find_spec(absent) is None:
            sys.modules[absent] = types.ModuleType(absent)
            sys.modules[absent].__dict__.update(blake3=None, Buffer=object)
    {**STAGES, "self-check": checked, "graphs": graphs}[name]()


if __name__ == "__main__":
    if sys.argv[1:2] == ["--one"]:
        one(sys.argv[2])
    else:
        main(sys.argv[1:])
