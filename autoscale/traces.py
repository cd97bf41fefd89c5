"""Traces: requests with their times, sizes and chunks, from public files or generated.

| source    | file                                                    | chunks                                      |
|-----------|---------------------------------------------------------|---------------------------------------------|
| Mooncake  | JSONL: timestamp (ms), input_length, output_length,     | blocks of 512 tokens; an id names the block |
|           | hash_ids                                                | and all before it                           |
| Azure     | CSV: TIMESTAMP, ContextTokens, GeneratedTokens          | none: text                                  |
| ServeGen  | folder of chunk-N-trace.csv and chunk-N-dataset.json    | images; the files name none: a stated share |
|           |                                                         | of them repeats earlier ones, by Zipf's law |
| generated | one of `SHAPES` (see `generated`)                       | as of ServeGen                              |
"""

from __future__ import annotations

import ast
import csv
import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import NamedTuple

import numpy as np

BLOCK_TOKENS = 512  # of Mooncake's hash ids
_CATALOGUE = 4096  # images that come again, at most
_WINDOW_S = 600.0  # of ServeGen's files


class BadTrace(ValueError):
    """A trace that cannot be read; the message says where and why."""


class Chunk(NamedTuple):
    """Image, document or block of a prompt.

    `is_prefix`: its id names all that stands before it, too.
    """

    content: str
    tokens: int
    is_prefix: bool = False


@dataclass(frozen=True, slots=True)
class Request:
    """Request: seconds from the trace's start, tokens of text, chunks, tokens of the answer."""

    at: float
    text: int
    chunks: tuple[Chunk, ...]
    output: int

    @property
    def prompt(self) -> int:
        """Tokens of the prompt."""
        return self.text + sum(chunk.tokens for chunk in self.chunks)

    def blocks(self, block_size: int) -> int:
        """KV blocks that its sequence reserves."""
        return -(-(self.prompt + self.output) // block_size) + 1


def mooncake(path: Path) -> Iterator[Request]:
    """Requests of a Mooncake trace."""
    for number, line in enumerate(_lines(path), 1):
        try:
            row = json.loads(line)
            left, ids = int(row["input_length"]), row["hash_ids"]
            chunks = tuple(Chunk(f"block-{one}", BLOCK_TOKENS, True) for one in ids[: left // BLOCK_TOKENS])
            text = max(1, left - BLOCK_TOKENS * len(chunks))
            yield Request(row["timestamp"] / 1e3, text, chunks, max(1, int(row["output_length"])))
        except (ValueError, KeyError, TypeError) as error:
            raise BadTrace(f"{path}, line {number}: no request of a Mooncake trace: {error!r}") from error


def azure(path: Path) -> Iterator[Request]:
    """Requests of an Azure LLM inference trace of 2023."""
    rows = csv.DictReader(_lines(path))
    first: datetime | None = None
    for number, row in enumerate(rows, 2):
        try:
            when = datetime.fromisoformat(row["TIMESTAMP"][:26])
            text, output = int(row["ContextTokens"]), int(row["GeneratedTokens"])
        except (ValueError, KeyError, TypeError) as error:
            raise BadTrace(f"{path}, line {number}: no request of an Azure trace: {error!r}") from error
        first = first or when
        yield Request((when - first).total_seconds(), max(1, text), (), max(1, output))


class Images:
    """Images of a trace that names none: a share repeats earlier ones.

    By Zipf's law with exponent 1.
    """

    def __init__(self, reuse: float, rng: np.random.Generator) -> None:
        if not 0 <= reuse <= 1:
            raise BadTrace(f"the share of images that come again is from 0 to 1, not {reuse:g}")
        self._reuse, self._rng, self._new = reuse, rng, 0
        self._known: list[Chunk] = []
        weights = 1 / np.arange(1, _CATALOGUE + 1)
        self._cumulated = np.cumsum(weights)

    def draw(self, tokens: int) -> Chunk:
        """The next image; one that came before keeps its size."""
        if self._known and self._rng.random() < self._reuse:
            most = self._cumulated[len(self._known) - 1]
            return self._known[int(np.searchsorted(self._cumulated, self._rng.random() * most))]
        self._new += 1
        image = Chunk(f"image-{self._new}", max(1, tokens))
        if len(self._known) < _CATALOGUE:
            self._known.append(image)
        else:
            self._known[int(self._rng.integers(_CATALOGUE))] = image
        return image


class _Histograms:
    """ServeGen's histograms of one client: by window and field, values and their cumulated shares."""

    def __init__(self, path: Path) -> None:
        try:
            self._windows = {float(start): fields for start, fields in json.loads(path.read_text()).items()}
        except (OSError, ValueError) as error:
            raise BadTrace(f"{path}: no dataset of ServeGen: {error}") from error
        self._parsed: dict[tuple[float, str], tuple[np.ndarray, np.ndarray]] = {}
        self._starts = np.array(sorted(self._windows))

    def draw(self, start: float, field: str, count: int, rng: np.random.Generator) -> np.ndarray:
        """Values of a field in the window that begins at `start`, or in the last one before it that has any."""
        at = self._starts[max(0, int(np.searchsorted(self._starts, start, side="right")) - 1)]
        if (at, field) not in self._parsed:
            shares = ast.literal_eval(self._windows[at].get(field) or "{0: 1.0}") or {0: 1.0}
            values = np.array(list(shares), dtype=float)
            self._parsed[at, field] = values, np.cumsum(list(shares.values()))
        values, cumulated = self._parsed[at, field]
        drawn = np.searchsorted(cumulated, rng.random(count) * cumulated[-1])
        return values[np.minimum(drawn, len(values) - 1)]


def servegen(
    folder: Path, reuse: float, scale: float = 1.0, seed: int = 0, start_s: float = 0.0, seconds: float = 86_400.0
) -> Iterator[Request]:
    """Requests drawn from ServeGen's description of clients, in order.

    Args:
        reuse: share of the images that came before.
        scale: of all rates.
        start_s, seconds: the part of the day.
    """
    traces = sorted(folder.glob("chunk-*-trace.csv"))
    if not traces:
        raise BadTrace(f"{folder}: no chunk-*-trace.csv of ServeGen in this folder")
    rng = np.random.default_rng(seed)
    images = Images(reuse, rng)
    clients = [
        (_windows(trace), _Histograms(trace.with_name(trace.name.replace("-trace.csv", "-dataset.json"))))
        for trace in traces
    ]
    first = math.floor(start_s / _WINDOW_S)
    for number in range(first, math.ceil((start_s + seconds) / _WINDOW_S)):
        start = number * _WINDOW_S
        drawn: list[tuple[float, int, int, int, int]] = []
        for windows, histograms in clients:
            if start in windows:
                drawn += _of_client(windows[start], histograms, start, scale, rng)
        for at, text, image_tokens, count, output in sorted(drawn):
            if start_s <= at < start_s + seconds:
                chunks = tuple(images.draw(image_tokens // count) for _ in range(count))
                yield Request(at - start_s, max(1, text), chunks, max(1, output))


class _Rate(NamedTuple):
    rate: float
    cv: float
    family: str
    shape: float


def _windows(path: Path) -> dict[float, _Rate]:
    found = {}
    for number, row in enumerate(csv.reader(_lines(path)), 1):
        try:
            start, rate, cv = map(float, row[:3])
            if rate > 0:
                shape = float(row[4]) if row[3] == "Weibull" else 0.0
                found[start] = _Rate(rate, cv if cv > 0 else 1.0, row[3], shape)
        except (ValueError, IndexError) as error:
            raise BadTrace(f"{path}, line {number}: no window of ServeGen: {error}") from error
    return found


def _of_client(
    window: _Rate, histograms: _Histograms, start: float, scale: float, rng: np.random.Generator
) -> list[tuple[float, int, int, int, int]]:
    times = start + _arrivals(window.rate * scale, _WINDOW_S, window, rng)
    count = len(times)
    columns = [
        histograms.draw(start, field, count, rng)
        for field in ("text_tokens", "image_tokens", "image_count", "output_tokens")
    ]
    text, image_tokens, image_count, output = columns
    image_count = np.where(image_tokens > 0, np.maximum(image_count, 1), 0)
    together = zip(times, text, image_tokens, image_count, output, strict=True)
    return [(float(at), int(a), int(b), int(c), int(d)) for at, a, b, c, d in together]


def _arrivals(rate: float, seconds: float, window: _Rate, rng: np.random.Generator) -> np.ndarray:
    """Times of a renewal process from a random phase: Weibull, or Gamma by its coefficient of variation."""
    most = int(rate * seconds * 1.5) + 20
    if window.family == "Weibull":
        between = rng.weibull(window.shape, most) / (rate * math.gamma(1 + 1 / window.shape))
    else:
        shape = 1 / window.cv**2
        between = rng.gamma(shape, 1 / (shape * rate), most)
    times = np.cumsum(between) - rng.random() * between[0]
    return times[times < seconds]


# -- generated --------------------------------------------------------------------------------------------------------

BURSTY = (15.0, 2.0, 10.0, 15.0, 5.0, 2.0)  # requests a second, each for a sixth of the time (llm-d's shape)


def _steady(share: float) -> float:
    return 1.0


def _diurnal(share: float) -> float:
    """A day: the night has a fifth of the noon's rate."""
    return 0.6 - 0.4 * math.cos(2 * math.pi * share)


def _bursty(share: float) -> float:
    return BURSTY[min(int(share * len(BURSTY)), len(BURSTY) - 1)] / max(BURSTY)


def _wavering(share: float) -> float:
    """Six waves between 1.9 and 2.1, over 2.1."""
    return (2.0 + 0.1 * math.sin(12 * math.pi * share)) / 2.1


SHAPES: dict[str, Callable[[float], float]] = {
    "steady": _steady,
    "diurnal": _diurnal,
    "bursty": _bursty,
    "wavering": _wavering,
}


@dataclass(frozen=True)
class Sizes:
    """Sizes of generated requests, in tokens: means of geometric text and answers; images."""

    text: int = 200
    image: int = 1024
    images: Sequence[int] = (1, 1, 1, 2, 4)
    output: int = 120


def generated(
    shape: str, rate: float, seconds: float, reuse: float = 0.3, seed: int = 0, sizes: Sizes | None = None
) -> Iterator[Request]:
    """Poisson arrivals whose rate follows a shape; `rate` is its largest, in requests a second."""
    if shape not in SHAPES:
        raise BadTrace(f"no shape {shape!r}; there are {', '.join(SHAPES)}")
    sizes = sizes or Sizes()
    rng = np.random.default_rng(seed)
    images, level = Images(reuse, rng), SHAPES[shape]
    at = 0.0
    while (at := at + rng.exponential(1 / rate)) < seconds:
        if rng.random() < level(at / seconds):
            count = sizes.images[int(rng.random() * len(sizes.images))]
            chunks = tuple(images.draw(sizes.image) for _ in range(count))
            yield Request(at, int(rng.geometric(1 / sizes.text)), chunks, int(rng.geometric(1 / sizes.output)))


def opened(path: Path, **of_servegen: float) -> Iterator[Request]:
    """Requests of a public trace, by what the path holds.

    Raises:
        BadTrace: it is none of those that are known.
    """
    if path.is_dir():
        return servegen(path, **of_servegen)  # type: ignore[arg-type]
    first = next(_lines(path), "")
    if "hash_ids" in first:
        return mooncake(path)
    if first.startswith("TIMESTAMP,ContextTokens"):
        return azure(path)
    raise BadTrace(f"{path}: neither a trace of Mooncake, Azure or ServeGen nor an access log")


def _lines(path: Path) -> Iterator[str]:
    try:
        with path.open() as file:
            yield from file
    except (OSError, UnicodeDecodeError) as error:
        raise BadTrace(f"{path} cannot be read: {error}") from error
