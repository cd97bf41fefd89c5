"""Manifests of the offline caching job: images and videos, their order, prefix and tenant.

| manifest              | an entry is                                                       |
|-----------------------|-------------------------------------------------------------------|
| a folder              | one image or video, known by its extension, at any depth          |
| `*.jsonl`, `*.ndjson` | a line: an object with the fields below; unknown fields are errors |
| `*.parquet`           | a row; columns of other names are left alone                      |

| field               | meaning                                                                              |
|---------------------|--------------------------------------------------------------------------------------|
| path, url, bytes    | one image or video: a path (relative to the manifest, or absolute), any fsspec URL,  |
|                     | or inline (base64 in JSON)                                                           |
| image, images       | the same as one object or string; several of them: a set, in this order              |
| id                  | the entry's name in reports; default: where it stands in the manifest                |
| tenant              | whose content it is; default the job's; `dynamic-library`: everybody's references    |
| prefix              | the system prompt that requests over these images will have; default none            |
| tools               | the tools that they will have: a list as in a request, or JSON of it (in Parquet     |
|                     | always: its rows would have one another's fields); default none                      |
| patches             | `own` (this order; default), `orbit` (every order) or `none`                         |
| video               | how requests will cut its videos, as their `orbit.video` (in Parquet JSON of it)     |

Reading streams: an entry is a few strings, and only inline images are in it. A bad entry is an entry with an `error`.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import PurePosixPath
from typing import Any, Literal

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
from fsspec.core import split_protocol, url_to_fs
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from kvstore.records.keys import DYNAMIC_TENANT
from serving.frontend.video_options import VideoOptions

MEDIA_SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".gif", ".bmp", ".mp4", ".mov", ".webm", ".mkv")
LINES_SUFFIXES = (".jsonl", ".ndjson")
_IMAGE_FIELDS = ("path", "url", "bytes", "image", "images")
_JSON_FIELDS = ("tools", "video")
_FIELDS = (*_IMAGE_FIELDS, *_JSON_FIELDS, "id", "tenant", "prefix", "patches")
_PARQUET_ROWS = 8  # read at once: a row may carry an image
Patches = Literal["own", "orbit", "none"]
StorageOptions = Mapping[str, Mapping[str, Any]]


class ManifestError(ValueError):
    """The manifest as a whole cannot be used; the message names it and says why."""


@dataclass(frozen=True)
class Owners:
    """Tenants whose content a manifest may hold.

    Of entries that name none, `default`; `known` have keys, empty: all do.
    """

    default: str = "local"
    known: frozenset[str] = frozenset()

    def of(self, named: str | None) -> str:
        """The tenant of an entry that names this one.

        Raises ValueError where no key would ever reach its content.
        """
        tenant = self.default if named is None else named
        if not tenant or (self.known and tenant not in self.known | {DYNAMIC_TENANT}):
            raise ValueError(
                f"no API key is of tenant {tenant!r}: nobody could ask for this; name one of "
                f"{', '.join(sorted(self.known | {DYNAMIC_TENANT}))} in the manifest or by --tenant"
            )
        return tenant


ANYBODY = Owners()


@dataclass(frozen=True)
class ImageSource:
    """Source of an image or video: a path or URL, or its bytes."""

    location: str | None = None
    data: bytes | None = None


@dataclass(frozen=True)
class Entry:
    """One entry, ready to be worked on unless `error` says what is wrong with it."""

    number: int  # counted from 0
    name: str
    images: tuple[ImageSource, ...] = ()
    tenant: str = "local"
    prefix: str = ""
    tools: str = ""  # JSON
    patches: Patches = "own"
    video: str = ""  # JSON
    error: str | None = None


ENTRY_SCHEMA = pa.schema(
    [
        ("number", pa.int64()),
        ("name", pa.string()),
        ("images", pa.list_(pa.struct([("location", pa.string()), ("data", pa.binary())]))),
        ("tenant", pa.string()),
        ("prefix", pa.string()),
        ("tools", pa.string()),
        ("patches", pa.string()),
        ("video", pa.string()),
        ("error", pa.string()),
    ]
)


def to_table(entries: Sequence[Entry]) -> pa.Table:
    """Entries as an Arrow table of `ENTRY_SCHEMA`."""
    return pa.Table.from_pylist([asdict(entry) for entry in entries], schema=ENTRY_SCHEMA)


def from_table(table: pa.Table) -> list[Entry]:
    """The entries of a table made by `to_table`."""
    rows = table.to_pylist()
    return [Entry(**{**row, "images": tuple(ImageSource(**image) for image in row["images"])}) for row in rows]


class Manifest:
    """A manifest at a path or an fsspec URL.

    Args:
        storage_options: options of fsspec's file systems, by protocol, such as {"s3": {"endpoint_url": ...}}.
        owners: whose content it may hold. A folder's is all of one tenant.

    Raises:
        ManifestError: there is nothing, or nothing of a known kind, or a folder is of a tenant without a key.
    """

    def __init__(self, location: str, storage_options: StorageOptions | None = None, owners: Owners = ANYBODY) -> None:
        self.location, self.owners = location, owners
        self._options = storage_options or {}
        self._fs, self._path = file_system(location, self._options)
        suffix = PurePosixPath(self._path).suffix.lower()
        is_folder = self._read(lambda: self._fs.isdir(self._path))
        if not is_folder and not self._read(lambda: self._fs.exists(self._path)):
            raise ManifestError(f"{location}: there is no such manifest")
        if is_folder:
            self._rows, self._count = self._images, self._count_images
            try:
                owners.of(None)
            except ValueError as error:
                raise ManifestError(f"{location}: {error}") from error
        elif suffix in LINES_SUFFIXES:
            self._rows, self._count = self._lines, self._count_lines
        elif suffix == ".parquet":
            self._rows, self._count = self._parquet_rows, self._count_parquet
        else:
            raise ManifestError(
                f"{location}: a manifest is a folder of images and videos, or a file "
                f"{', '.join((*LINES_SUFFIXES, '.parquet'))}"
            )
        self.url = self._fs.unstrip_protocol(self._path)
        self._base = self._fs.unstrip_protocol(self._path if is_folder else self._fs._parent(self._path)).rstrip("/")

    def count(self, limit: int | None = None) -> int:
        """Number of entries, at most `limit`.

        Reads the lines of a JSONL file, else only a footer or listing.

        Raises:
            ManifestError: it cannot be read, or is empty.
        """
        count = self._read(self._count)
        if not count:
            raise ManifestError(f"{self.location}: the manifest is empty")
        return count if limit is None else min(count, limit)

    def entries(self, limit: int | None = None) -> Iterator[Entry]:
        """The entries in order, the first `limit` of them.

        Raises:
            ManifestError: it cannot be read (any further).
        """
        rows = self._rows()
        number = 0
        while limit is None or number < limit:
            row = self._read(lambda: next(rows, None))
            if row is None:
                return
            place, value = row
            yield self._entry(number, place, value)
            number += 1

    def _read(self, read: Callable[[], Any]) -> Any:
        try:
            return read()
        except ManifestError:
            raise
        except Exception as error:  # file systems raise their own client's errors, which share no base class
            raise ManifestError(f"{self.location}: cannot be read: {error}") from error

    def _entry(self, number: int, place: str, value: object) -> Entry:
        place = place.encode(errors="backslashreplace").decode()
        try:
            if isinstance(value, bytes):
                value = json.loads(value)
            if not isinstance(value, dict):
                raise ValueError(f"an entry is an object, not {type(value).__name__}")
            row = _Row.model_validate({name: field for name, field in value.items() if field is not None})
            sources = tuple(self._located(image) for image in row.sources())
            tenant, tools = self.owners.of(row.tenant), json.dumps(row.tools) if row.tools else ""
            video = row.video.model_dump_json(exclude_defaults=True) if row.video else ""
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(map(str, first["loc"]))
            return Entry(number, place, error=f"{where}: {first['msg']}" if where else first["msg"])
        except ValueError as error:  # JSON's errors too
            return Entry(number, place, error=str(error))
        name = place if row.id is None else str(row.id)
        return Entry(number, name, sources, tenant, row.prefix, tools, row.patches, video)

    def _located(self, image: ImageSource) -> ImageSource:
        """A location that any process understands: relative ones belong to the manifest's folder."""
        location = image.location
        if location is None or split_protocol(location)[0] or location.startswith(("/", "data:")):
            return image
        return ImageSource(f"{self._base}/{location}")

    # Folder

    def _image_paths(self) -> list[str]:
        found = sorted(path for path in self._fs.find(self._path) if path.lower().endswith(MEDIA_SUFFIXES))
        if not found:
            raise ManifestError(f"{self.location}: the folder holds no images or videos ({', '.join(MEDIA_SUFFIXES)})")
        return found

    def _images(self) -> Iterator[tuple[str, object]]:
        root = self._path.rstrip("/")
        for path in self._image_paths():
            yield path[len(root) + 1 :], {"path": self._fs.unstrip_protocol(path)}

    def _count_images(self) -> int:
        return len(self._image_paths())

    # JSONL

    def _lines(self) -> Iterator[tuple[str, object]]:
        name = PurePosixPath(self._path).name
        with self._fs.open(self._path, "rb") as file:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    yield f"{name}:{number}", line

    def _count_lines(self) -> int:
        return sum(1 for _ in self._lines())

    # Parquet

    def _parquet_rows(self) -> Iterator[tuple[str, object]]:
        name = PurePosixPath(self._path).name
        with self._fs.open(self._path, "rb") as file:
            parquet = pq.ParquetFile(file)
            self._check_columns(parquet.schema_arrow)
            columns = [column for column in parquet.schema_arrow.names if column in _FIELDS]
            number = 0
            for batch in parquet.iter_batches(_PARQUET_ROWS, columns=columns):
                for row in batch.to_pylist():
                    yield f"{name}:{number}", row
                    number += 1

    def _count_parquet(self) -> int:
        with self._fs.open(self._path, "rb") as file:
            parquet = pq.ParquetFile(file)
            self._check_columns(parquet.schema_arrow)
            return int(parquet.metadata.num_rows)

    def _check_columns(self, schema: pa.Schema) -> None:
        if not set(_IMAGE_FIELDS) & set(schema.names):
            raise ManifestError(
                f"{self.location}: no column names images ({', '.join(_IMAGE_FIELDS)}); "
                f"there are {', '.join(schema.names)}"
            )
        for name in _JSON_FIELDS:
            if name in schema.names and not _is_text(schema.field(name).type):
                raise ManifestError(f"{self.location}: the column {name} is {schema.field(name).type}, not JSON text")


def _is_text(kind: pa.DataType) -> bool:
    inner = kind.value_type if pa.types.is_dictionary(kind) else kind
    return any(test(inner) for test in (pa.types.is_string, pa.types.is_large_string, pa.types.is_null))


def file_system(location: str, storage_options: StorageOptions) -> tuple[fsspec.AbstractFileSystem, str]:
    """The file system of a path or URL with its protocol's options, and the path inside it.

    Raises:
        ManifestError: the protocol is unknown, or its package is missing.
    """
    protocol = split_protocol(location)[0] or "file"
    try:
        return url_to_fs(location, **storage_options.get(protocol, {}))
    except (ImportError, ValueError) as error:
        raise ManifestError(f"{location}: {error}") from error


class _Image(BaseModel):
    """An image inside a row. Where bytes are given, a path is only their name."""

    model_config = ConfigDict(extra="forbid")

    path: str | None = None
    url: str | None = None
    data: bytes | None = Field(None, alias="bytes")

    @field_validator("path", "url", "id", "tenant", "prefix", mode="before", check_fields=False)
    @classmethod
    def _is_unicode(cls, text: object) -> object:
        if isinstance(text, str):
            text.encode()  # raises ValueError for a lone surrogate, which JSON and file names can hold
        return text

    @field_validator("data", mode="before")
    @classmethod
    def _from_base64(cls, data: object) -> object:
        return base64.b64decode(data, validate=True) if isinstance(data, str) else data

    def source(self) -> ImageSource:
        """Source of the image; raises ValueError unless it is named in one way."""
        if self.data is not None:
            return ImageSource(data=self.data)
        named = [location for location in (self.path, self.url) if location]
        if len(named) != 1:
            raise ValueError("an image has a path, a url or bytes" + (", not several" if named else ""))
        return ImageSource(named[0])


class _Row(_Image):
    """An entry as it is written down."""

    image: str | _Image | None = None
    images: list[str | _Image] | None = Field(None, min_length=1)
    id: str | int | None = None
    tenant: str | None = Field(None, min_length=1)
    prefix: str = ""
    tools: list[dict[str, Any]] = Field(default_factory=list)
    patches: Patches = "own"
    video: VideoOptions | None = None

    @field_validator("video", mode="before")
    @classmethod
    def _of_video(cls, video: object) -> object:
        return json.loads(video or "null") if isinstance(video, str) else video

    @field_validator("tools", mode="before")
    @classmethod
    def _from_json(cls, tools: object) -> object:
        found = json.loads(tools or "[]") if isinstance(tools, str) else tools
        json.dumps(found, ensure_ascii=False).encode()  # raises ValueError for a lone surrogate
        return found

    def sources(self) -> list[ImageSource]:
        """The images in order. Raises ValueError unless they are given in one way."""
        own = any(value is not None for value in (self.path, self.url, self.data))
        if own + (self.image is not None) + (self.images is not None) > 1:
            raise ValueError("give one of path, url, bytes, image and images")
        if own or not (self.image or self.images):
            return [self.source()]
        listed = self.images or [self.image or ""]
        return [_Image(path=image).source() if isinstance(image, str) else image.source() for image in listed]
