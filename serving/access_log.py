"""Access log of requests, from which `orbitserve compile-trace` decides what to compile.

One JSON object a line and request with chunks. It holds digests, counts and shapes, and nothing of what anybody wrote
or showed: of a prompt neither texts nor their tokens, of an image its placeholder tokens and its grid.

    v, time, model, tenant, mode, sample   `sample`: the share of requests that are logged
    text, between, before                  `orbit.text`; tokens of the longest text between two chunks, and of the
                                           conversation before the first
    prefix, prefix_tokens                  digest of the fixed prefix (see `catalog.index.prefix_key`) and its length
    reused, computed, forward_ms, place_ms tokens of chunks that were linked, and of all that were computed; what
                                           that took (of a forward that others shared, its part)
    ttft_ms, vision_ms, tokens             time to the first token (at `time`), of encoding in it; tokens of the prompt
    chunks: content, modality, tokens, point, group    in the order served; those of one group were free to trade places
            first, count, ids, mask, grid  placeholders, counted from the chunk's start; runs of its token ids and of
                                           what carries an embedding; the fields that fix positions. None of text

Lines are written by a thread behind a bounded queue: a disk that is slow or full costs lines, never a request.
"""

from __future__ import annotations

import json
import logging
import logging.handlers
import os
import queue
import random
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from io import TextIOWrapper
from itertools import groupby, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveInt,
    ValidationError,
    model_validator,
)

from kvstore.catalog.index import prefix_key
from kvstore.private_files import make_private_folder, private_opener
from serving.settings import AccessLogSettings

if TYPE_CHECKING:
    from prefill_workers.protocol import ChunkSpan, LinkRequest, LinkResult

logger = logging.getLogger(__name__)

VERSION = 1
TEXT = "text"  # as `prefill_workers.protocol.TEXT`, which cannot be had without an engine's libraries
_MOST_GRID_NUMBERS = 64  # a larger field is no grid, and is not logged
_WARN_SECONDS = 60.0  # between two warnings that lines cannot be written
_BLOCK = 1 << 16  # bytes in which the end of a file's last whole line is looked for
Runs = tuple[tuple[int, PositiveInt], ...]  # (value, how often in a row)


class BadLog(ValueError):
    """An access log that cannot be read; the message says where and why."""


class _Line(BaseModel):
    model_config = ConfigDict(extra="ignore", frozen=True)


class GridField(_Line):
    """One processed field of an image: its dtype and its numbers, nested as the tensor is."""

    dtype: Literal["bool", "uint8", "int8", "int16", "int32", "int64", "float16", "bfloat16", "float32", "float64"]
    data: Any


class LoggedChunk(_Line):
    """One chunk of a logged request."""

    content: str = Field(pattern="^[a-z0-9-]+$")
    modality: str
    tokens: PositiveInt
    point: str
    group: int | None = None
    first: NonNegativeInt = 0
    count: NonNegativeInt = 0
    ids: Runs = ()
    mask: Runs | None = None
    grid: dict[str, GridField] = {}

    @model_validator(mode="after")
    def _adds_up(self) -> LoggedChunk:
        if self.modality == TEXT:
            return self
        if sum(often for _, often in self.ids) != self.tokens:
            raise ValueError(f"its ids are not of {self.tokens} tokens")
        if self.first + self.count > self.tokens:
            raise ValueError(f"its placeholders do not lie within {self.tokens} tokens")
        if self.mask is not None and sum(often for _, often in self.mask) != self.count:
            raise ValueError(f"its mask is not of {self.count} placeholders")
        return self


class LoggedRequest(_Line):
    """One line of an access log."""

    v: int = Field(ge=VERSION, le=VERSION)
    time: float
    model: str
    tenant: str
    mode: str
    text: str = "auto"
    between: NonNegativeInt = 0
    before: NonNegativeInt = 0
    sample: float = Field(gt=0, le=1)
    prefix: str
    prefix_tokens: NonNegativeInt = 0
    reused: NonNegativeInt = 0
    computed: NonNegativeInt = 0
    forward_ms: NonNegativeFloat = 0.0
    place_ms: NonNegativeFloat = 0.0
    ttft_ms: NonNegativeFloat | None = None
    vision_ms: NonNegativeFloat = 0.0
    tokens: NonNegativeInt = 0
    chunks: tuple[LoggedChunk, ...] = Field(min_length=1)

    @property
    def weight(self) -> float:
        """Number of requests that the line stands for."""
        return 1 / self.sample


# -- reading ----------------------------------------------------------------------------------------------------------


def log_files(path: Path) -> list[Path]:
    """Access log files at a path: the file itself, or a directory's, in the order of writing.

    Rotated files are included.

    Raises:
        BadLog: there is none.
    """
    if path.is_dir():
        found = sorted(path.glob("access-*.jsonl*"), key=_age)
        if not found:
            raise BadLog(f"{path}: no access log (access-*.jsonl) in this directory")
        return found
    if not path.exists():
        raise BadLog(f"{path}: no such file or directory")
    return [path]


def _age(file: Path) -> tuple[int, int, str]:
    rotated = file.suffix[1:]
    return file.stat().st_mtime_ns, -int(rotated) if rotated.isdigit() else 0, file.name


def read(path: Path) -> Iterator[LoggedRequest]:
    """The requests of a log, see `log_files`.

    A last line without its end is left out: a server may just be writing it, or was killed.

    Raises:
        BadLog: naming file and line.
    """
    for file in log_files(path):
        try:
            with file.open("rb") as lines:
                for number, line in enumerate(lines, 1):
                    if line.endswith(b"\n") and line.strip():
                        yield _parsed(line, f"{file}:{number}")
        except OSError as error:
            raise BadLog(f"{file}: cannot be read: {error.strerror}") from error


def _parsed(line: bytes, where: str) -> LoggedRequest:
    try:
        return LoggedRequest.model_validate_json(line)
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(map(str, first["loc"]))
        raise BadLog(f"{where}: {field + ': ' if field else ''}{first['msg']}") from error


# -- writing ----------------------------------------------------------------------------------------------------------


class AccessLog:
    """Writes one replica's log. `offer` belongs to one thread and never waits.

    Args:
        name: of the replica; its file is `access-NAME.jsonl` in the settings' directory.
        model: name under which the model is served.
    """

    def __init__(self, settings: AccessLogSettings, name: str, model: str, draw: _Draw | None = None) -> None:
        assert settings.directory is not None
        self.path = settings.directory / f"access-{name}.jsonl"
        self.written = self.dropped = 0
        self._settings, self._model = settings, model
        self._draw = draw or random.Random().random
        self._queue: queue.Queue[tuple[float, LinkRequest, Sequence[int | None], LinkResult, float | None] | None]
        self._queue = queue.Queue(settings.queue)
        self._warned = -_WARN_SECONDS
        self._thread = threading.Thread(target=self._write, name="access-log", daemon=True)
        self._thread.start()

    def offer(
        self, request: LinkRequest, groups: Sequence[int | None], result: LinkResult, ttft_ms: float | None = None
    ) -> None:
        """Log a linked request, if it has chunks and is drawn.

        Args:
            groups: of its chunks, empty where none may move.
            ttft_ms: time to its first token, which has just been given; None: not known.
        """
        if not request.chunks or self._draw() >= self._settings.sample:
            return
        try:
            self._queue.put_nowait((time.time(), request, groups, result, ttft_ms))
        except queue.Full:
            self._lose("the disk is too slow")

    def close(self, timeout: float | None = None) -> None:
        """Write what is queued, and end; after `timeout` seconds what is left is lost."""
        began = time.monotonic()
        with suppress(queue.Full):
            self._queue.put(None, timeout=timeout)
            self._thread.join(None if timeout is None else max(timeout - (time.monotonic() - began), 0))

    def _write(self) -> None:
        file: _File | None = None
        while (item := self._queue.get()) is not None:
            try:
                if file is None:
                    make_private_folder(self.path.parent)
                    file = _File(self.path, self._settings)
                file.write(json.dumps(self._document(*item), separators=(",", ":")))
                self.written += 1
            except Exception as error:  # whatever it is, requests go on
                self._lose(f"{type(error).__name__}: {error}")
        if file is not None:
            file.close()

    def _lose(self, reason: str) -> None:
        self.dropped += 1
        if time.monotonic() - self._warned >= _WARN_SECONDS:
            self._warned = time.monotonic()
            logger.warning("%s: %d requests not logged so far: %s", self.path, self.dropped, reason)

    def _document(
        self,
        now: float,
        request: LinkRequest,
        groups: Sequence[int | None],
        result: LinkResult,
        ttft_ms: float | None,
    ) -> dict[str, Any]:
        if len(groups) != len(request.chunks):
            groups = [None] * len(request.chunks)
        chunks = [
            {
                "content": span.content,
                "modality": span.modality,
                "tokens": len(span),
                "point": str(outcome.operating_point),
                "group": group,
                **(_shape(span, request.token_ids) if span.needs_embeddings else {}),
            }
            for span, outcome, group in zip(request.chunks, result.chunks, groups, strict=True)
        ]
        return {
            "v": VERSION,
            "time": round(now, 3),
            "model": self._model,
            "tenant": request.tenant,
            "mode": str(request.mode),
            "text": str(request.text),
            "between": max((b.start - a.stop for a, b in pairwise(request.chunks)), default=0),
            "before": request.words_before,
            "sample": self._settings.sample,
            "prefix": prefix_key(request.prefix),
            "prefix_tokens": len(request.prefix),
            "reused": result.chunk_tokens_reused,
            "computed": result.tokens_computed,
            "forward_ms": round(result.compute_ms, 3),
            "place_ms": round(result.stages_ms.get("place", 0.0), 3),
            "ttft_ms": None if ttft_ms is None else round(ttft_ms, 3),
            "vision_ms": round(result.stages_ms.get("vision", 0.0), 3),
            "tokens": len(request.token_ids),
            "chunks": chunks,
        }


class _Draw(Protocol):
    def __call__(self) -> float: ...


class _File(logging.handlers.RotatingFileHandler):
    """Whole lines in a file that is put aside when it is full; errors are the caller's, and cost the line alone."""

    def __init__(self, path: Path, settings: AccessLogSettings) -> None:
        super().__init__(
            path, maxBytes=settings.max_file_bytes, backupCount=settings.rotated_files, encoding="utf-8", delay=True
        )
        self._path, self._max_bytes = path, settings.max_bytes
        self._prune()

    def doRollover(self) -> None:
        super().doRollover()
        self._prune()

    def _prune(self) -> None:
        """Delete the oldest logs until all fit; not the one that is written here.

        One of a replica that has had nothing to write for long may be among them: it begins another.
        """
        with suppress(FileNotFoundError):  # another replica deletes just now
            files = sorted(self._path.parent.glob("access-*.jsonl*"), key=_age)
            sizes = {file: file.stat().st_size for file in files}
            total = sum(sizes.values())
            for file in files:
                if total <= self._max_bytes:
                    return
                if file != self._path:
                    total -= sizes[file]
                    file.unlink(missing_ok=True)

    def write(self, line: str) -> None:
        self._let_go_of_what_was_deleted()
        self.emit(logging.makeLogRecord({"msg": line}))

    def _let_go_of_what_was_deleted(self) -> None:
        if self.stream is not None and os.fstat(self.stream.fileno()).st_nlink == 0:
            self.stream.close()
            self.stream = None

    def handleError(self, record: logging.LogRecord) -> None:
        if self.stream is not None:
            with suppress(OSError):  # it writes what it has left
                self.stream.close()
            self.stream = None
        raise

    def _open(self) -> TextIOWrapper:
        cut_to_whole_lines(self._path)
        return open(self.baseFilename, "a", encoding=self.encoding, opener=private_opener)


def cut_to_whole_lines(path: Path) -> None:
    """Cut an unfinished last line off a file, as a full disk or a killed process leaves it."""
    with suppress(FileNotFoundError), path.open("r+b") as file:
        end = file.seek(0, os.SEEK_END)
        while end:
            start = max(0, end - _BLOCK)
            file.seek(start)
            if last := file.read(end - start).rfind(b"\n") + 1:
                end = start + last
                break
            end = start
        file.truncate(end)


def expanded(runs: Iterable[tuple[int, int]]) -> list[int]:
    """The values that `runs_of` counted."""
    return [value for value, often in runs for _ in range(often)]


def runs_of(values: Iterable[int]) -> list[tuple[int, int]]:
    """Equal values in a row as (value, how often)."""
    return [(value, sum(1 for _ in same)) for value, same in groupby(values)]


def _shape(span: ChunkSpan, token_ids: Sequence[int]) -> dict[str, Any]:
    """Fields that a forward over the chunk needs beside its stored embeddings."""
    data = {name: field.data for name, field in (span.grid or {}).items()}
    return {
        "first": span.first - span.start,
        "count": span.count,
        "ids": runs_of(token_ids[span.start : span.stop]),
        "mask": None if span.is_embed is None else runs_of(span.is_embed.int().tolist()),
        "grid": {
            name: {"dtype": str(tensor.dtype).removeprefix("torch."), "data": tensor.tolist()}
            for name, tensor in data.items()
            if tensor is not None and tensor.numel() <= _MOST_GRID_NUMBERS
        },
    }
