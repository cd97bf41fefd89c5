"""Time to first token of questions about a stream, shown as a window of short clips.

A camera sends a clip every four seconds; each step shows the clips of the last minute, of which one is new. Both arms
are sent the same prompts. Between two steps, while the camera records, ours works off what it does in idle time;
the clock stands, and what that took is told (`idle ms`): a machine where it takes longer than a clip leaves some of it.

| arm           | what answers                                                            |
|---------------|-------------------------------------------------------------------------|
| vllm          | vLLM's OpenAI server with prefix caching                                |
| session       | ours with `orbit.session`: clips that stay are relocated                |
| vllm, first   | vLLM asked about one clip that never came before                        |
| ours, first   | ours asked about another one                                            |
"""

from __future__ import annotations

import base64
import io
import statistics
import time
from itertools import count
from typing import Any

import av
import httpx
import numpy as np
from rich.console import Console

from infra.checkpoints import checkpoint_path
from serving.bench.harness import Arm, Benchmark, Outcome
from serving.bench.models import CHECKPOINT, measured_dtype
from serving.loadtest.images import Timed, timed_chat
from tests.benchmarks.servers import Server, ours, vllm_alone

_DESCRIPTIONS = {
    "vllm": "vLLM's OpenAI server with prefix caching",
    "session": "OrbitServe, a session of survivors: refresh",
    "vllm, first": "vLLM, one clip that is new",
    "ours, first": "OrbitServe, one clip that is new",
}
_SECONDS, _FPS = 4, 2  # of a clip; as many frames a second as are sampled
_CONTEXT = 8192
_QUESTION = {"type": "text", "text": "what"}


def run(quick: bool, console: Console) -> Outcome:
    """Measure both arms, step by step."""
    side, window, steps = (112, 3, 2) if quick else (224, 15, 6)
    checkpoint, numbers = checkpoint_path(CHECKPOINT), count()
    samples: dict[str, list[float]] = {name: [] for name in _DESCRIPTIONS}
    encoded, idle = list[float](), list[float]()
    with (
        vllm_alone(checkpoint, context=_CONTEXT) as alone,
        ours(checkpoint, console, quick, model={"max_model_len": _CONTEXT}) as service,
        httpx.Client(timeout=600) as web,
    ):
        alone.settle()
        session = {"orbit": {"session": {"id": "camera"}}}
        arms: dict[str, tuple[Server, dict[str, Any]]] = {"vllm": (alone, {}), "session": (service, session)}

        def ask(server: Server, clips: list[dict[str, Any]], fields: dict[str, Any]) -> Timed:
            messages = [{"role": "user", "content": [*clips, _QUESTION]}]
            return timed_chat(web, server.url, server.model, messages, **fields)

        shown = [clip(next(numbers), side) for _ in range(window)]
        for step in range(-2, steps):  # two to warm up
            shown = [*shown[1:], clip(next(numbers), side)]
            for name, (server, fields) in arms.items() if step % 2 else reversed(arms.items()):
                timed = ask(server, shown, fields)
                began = time.perf_counter()
                service.settle()
                if step >= 0:
                    samples[name].append(timed.ttft_ms)
                if name == "session" and step >= 0:
                    idle.append((time.perf_counter() - began) * 1e3)
                    chunks = timed.orbit["chunks"]
                    encoded.append(timed.orbit["vision_tokens_encoded"] / (chunks[-1]["tokens"] - 2))
            if step >= 0:
                last = {name: round(times[-1]) for name, times in samples.items() if times}
                console.print(f"  {window} clips, step {step + 1} of {steps}: {last} ms")
        for step in range(-1, steps):
            for name, server in (("vllm, first", alone), ("ours, first", service)):
                service.settle()
                timed = ask(server, [clip(next(numbers), side)], {})
                if step >= 0:
                    samples[name].append(timed.ttft_ms)
    middle = {name: statistics.median(times) for name, times in samples.items()}
    figures = {
        "ttft_over_vllm": middle["session"] / middle["vllm"],
        "encoded_over_new": statistics.mean(encoded),
        "first_over_vllm": middle["ours, first"] / middle["vllm, first"],
    }
    axis = str(window)
    arms_of = [Arm(name, text, {axis: samples[name]}) for name, text in _DESCRIPTIONS.items()]
    workload = {
        "model": CHECKPOINT,
        "dtype": measured_dtype(),
        "clips": window,
        "seconds": _SECONDS,
        "side": side,
        "steps": steps,
        "in_flight": 1,
    }
    tables = {"idle ms": {"session": {axis: statistics.median(idle)}}}
    return Outcome(workload, arms_of, figures, tables, axis="clips")


def clip(number: int, side: int) -> dict[str, Any]:
    """A part with a clip of moving noise; the same number gives the same bytes."""
    noise = np.random.default_rng(number).integers(0, 256, (side // 8, side // 8, 3), dtype=np.uint8)
    picture = noise.repeat(8, axis=0).repeat(8, axis=1)
    buffer = io.BytesIO()
    with av.open(buffer, "w", format="mp4") as container:
        stream = container.add_stream("libx264", rate=_FPS)
        stream.width, stream.height, stream.pix_fmt = side, side, "yuv420p"
        for frame in range(_SECONDS * _FPS):
            shown = av.VideoFrame.from_ndarray(np.roll(picture, 8 * frame, axis=1), format="rgb24")
            container.mux(stream.encode(shown))
        container.mux(stream.encode())
    url = "data:video/mp4;base64," + base64.b64encode(buffer.getvalue()).decode()
    return {"type": "video_url", "video_url": {"url": url}}


BENCHMARK = Benchmark(
    "video-window",
    "Time to first token of questions about a stream whose window of clips slides: vLLM's prefix caching, and ours.",
    run,
    {
        "ttft_over_vllm": ("<=", 0.2),
        "encoded_over_new": ("<=", 1.0),
        "first_over_vllm": ("<=", 1.25),
    },
)
