"""Chat requests whose token counts are known in advance, and their time to first token."""

from __future__ import annotations

import base64
import io
import json
import time
from dataclasses import dataclass
from typing import Any

import httpx
import numpy as np
from PIL import Image

PIXELS = 28  # of one vision token, each way
TEXT_TOKENS = 32  # of a request, the chat template's included
_BEFORE, _AFTER = 6, 7  # characters of text around the image; the bundled tokenizers take one token each
SHAPES = {256: (16, 16), 512: (32, 16), 1024: (32, 32), 2048: (64, 32)}  # vision tokens: (wide, high)


def noise(tokens: int, number: int = 0) -> Image.Image:
    """A noisy picture that takes `tokens` placeholder tokens."""
    wide, high = SHAPES[tokens]
    spots = np.random.default_rng(number).random((high * PIXELS // 4, wide * PIXELS // 4, 3))
    return Image.fromarray((spots * 255).astype("uint8")).resize(
        (wide * PIXELS, high * PIXELS), Image.Resampling.NEAREST
    )


def image_url(tokens: int, number: int = 0) -> str:
    """A noisy picture that takes `tokens` placeholder tokens, as a data URL."""
    return data_url(noise(tokens, number))


def data_url(picture: Image.Image) -> str:
    """A picture as a PNG data URL."""
    return f"data:image/png;base64,{base64.b64encode(png(picture)).decode()}"


def png(picture: Image.Image) -> bytes:
    """A picture as a PNG file."""
    buffer = io.BytesIO()
    picture.save(buffer, "PNG")
    return buffer.getvalue()


def around(image: str, turn: int) -> list[dict[str, Any]]:
    """A user turn of an image with unique text around it: no prefix was seen before."""
    before, after = f"{turn:0{_BEFORE}d}"[::-1], "and so?."[:_AFTER]
    parts = [
        {"type": "text", "text": before},
        {"type": "image_url", "image_url": {"url": image}},
        {"type": "text", "text": after},
    ]
    return [{"role": "user", "content": parts}]


@dataclass(frozen=True)
class Timed:
    """One streamed answer: when its first token came, and what was said about it at the end."""

    ttft_ms: float
    prompt_tokens: int
    orbit: dict[str, Any]
    cached_tokens: int = 0  # of the prompt, as far as the server says
    text: str = ""

    @property
    def computed_tokens(self) -> int:
        """Prompt tokens that were not cached."""
        return self.prompt_tokens - self.cached_tokens


def timed_chat(client: httpx.Client, url: str, model: str, messages: list[dict[str, Any]], **fields: Any) -> Timed:
    """Send a chat request and time its first token at the client.

    The body is serialised before the clock starts.
    """
    body = {
        "model": model,
        "messages": messages,
        "max_tokens": 2,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
        **fields,
    }
    content = json.dumps(body).encode()
    began = time.perf_counter()
    first, text = 0.0, ""
    last: dict[str, Any] = {}
    headers = {"Content-Type": "application/json"}
    with client.stream("POST", f"{url}/v1/chat/completions", content=content, headers=headers) as response:
        if response.status_code != 200:
            raise RuntimeError(f"{url} answered {response.status_code}: {response.read().decode()}")
        for line in response.iter_lines():
            if not line.startswith("data: {"):
                continue
            event = json.loads(line[len("data: ") :])
            if "error" in event:
                raise RuntimeError(f"{url} answered: {event['error']}")
            said = event["choices"][0]["delta"].get("content") if event["choices"] else None
            if said:
                first = first or (time.perf_counter() - began) * 1e3
                text += said
            last = event
    usage = last["usage"]
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    return Timed(first, usage["prompt_tokens"], last.get("orbit", {}), cached, text)
