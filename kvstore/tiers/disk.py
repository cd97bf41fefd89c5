"""A tier in a directory, which the processes of a node share."""

from __future__ import annotations

import fcntl
import os
import stat
import uuid
from collections.abc import Iterator, Sequence
from contextlib import suppress
from io import FileIO
from pathlib import Path

import pyarrow as pa

from kvstore.errors import BlobReplaced
from kvstore.private_files import make_private_folder, private_opener
from kvstore.records.seal import read_all
from kvstore.tiers.base import QUARANTINE, Blob, Entry, Guard, Lifetime, ReadThrough, Tier, check_key

_WRITE_ATTEMPTS = 20
_CHUNK_BYTES = 1 << 19
_VIEWS_PER_CALL = os.sysconf("SC_IOV_MAX")


class DiskTier(Tier):
    """Blobs as files below `root`, which one user alone may read.

    Renames make writes atomic, so processes share a root without a common lock.

    A writer holds an advisory lock on its temporary file for as long as it lives; an unlocked temporary file
    was left by a writer that died, and is removed when a tier is opened. So the death of a process at any moment
    loses nothing that was put. What a power cut may do is the caller's choice: a `durable` tier syncs the file and its
    folders before `put` and `delete` return; another leaves that to the system, and a blob written last may then be
    missing, or shorter than it was, or zeros.
    """

    lifetime = Lifetime.NODE
    _TEMPORARY = ".partial"

    def __init__(self, root: Path | str, name: str = "disk", durable: bool = True) -> None:
        self.name = name
        self.root = Path(root).absolute()
        self.durable = durable
        self._partial = self.root / self._TEMPORARY
        with self._guarded("open"):
            make_private_folder(self._partial)
            self._sweep()

    def get(self, key: str) -> pa.Buffer | None:
        blob = self.open(key)
        if blob is None:
            return None
        if blob.read is not None:
            read_all(blob.read, 0, blob.buffer.size)
        return blob.buffer

    def open(self, key: str) -> Blob | None:
        """The blob, copied into this process' memory as it is read.

        A mapping would go on showing the file: bytes damaged there after their checksums were compared would be served,
        and reading a file that was cut short would end the process (SIGBUS).
        """
        path = self._path(key)
        with self._guarded("read", key):
            try:
                if not stat.S_ISREG(path.stat().st_mode):  # opening a pipe would wait for its writer
                    return None
                file = path.open("rb", buffering=0)
            except (FileNotFoundError, NotADirectoryError):
                return None
            size = os.fstat(file.fileno()).st_size
            if size == 0:
                return Blob(pa.py_buffer(b""))
            buffer = pa.allocate_buffer(size)
            return Blob(buffer, self._reader(file, memoryview(buffer), key))

    def put(self, key: str, buffers: Sequence[pa.Buffer]) -> None:
        path = self._path(key)
        with self._guarded("write", key):
            # Another process may sweep the temporary file in the instant before it is locked, or remove the folder
            # as empty in the instant after it is made: then write again.
            for _ in range(_WRITE_ATTEMPTS - 1):
                with suppress(FileNotFoundError, FileExistsError):
                    self._write(path, buffers)
                    return
            self._write(path, buffers)

    def delete(self, key: str) -> bool:
        path = self._path(key)
        with self._guarded("delete", key):
            try:
                path.unlink()
            except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
                return False
            self._sync_folders(path)
            # Folder names tell what a tier held; a writer that loses its folder here makes it again.
            with suppress(OSError):
                for folder in path.relative_to(self.root).parents[:-1]:
                    (self.root / folder).rmdir()
            return True

    def contains(self, key: str) -> bool:
        path = self._path(key)
        with self._guarded("look up", key):  # `is_file` raises what does not mean that the file is absent
            return path.is_file()

    def entries(self, prefix: str = "") -> Iterator[Entry]:
        folder, _, _ = prefix.rpartition("/")
        with self._guarded("list", prefix):
            yield from self._walk(self.root / folder, f"{folder}/" if folder else "", prefix)

    def touch(self, key: str) -> None:
        with suppress(OSError):
            os.utime(self._path(key))

    def quarantine(self, key: str) -> bool:
        source, target = self._path(key), self._path(QUARANTINE + key)
        with self._guarded("quarantine", key):
            make_private_folder(target.parent)
            try:
                os.replace(source, target)
            except FileNotFoundError:
                return False
            return True

    def _reader(self, file: FileIO, memory: memoryview, key: str) -> ReadThrough:
        """A reader that fills `memory` with the file's bytes.

        In chunks that stay in the processor's cache, so that hashing them costs no second pass over memory.
        """

        def read(start: int, end: int) -> Iterator[memoryview]:
            while start < end:
                with self._guarded("read", key):
                    count = os.preadv(file.fileno(), [memory[start : min(end, start + _CHUNK_BYTES)]], start)
                if count == 0:  # cut short since it was opened
                    raise BlobReplaced(f"{self.name}: {key} was cut short while it was read")
                yield memory[start : start + count]
                start += count

        return read

    def _path(self, key: str) -> Path:
        return self.root / check_key(key)

    def _write(self, path: Path, buffers: Sequence[pa.Buffer]) -> None:
        temporary = self._partial / uuid.uuid4().hex
        make_private_folder(path.parent)
        try:
            with open(temporary, "xb", buffering=0, opener=private_opener) as file:
                fcntl.flock(file, fcntl.LOCK_EX)
                _write_all(file.fileno(), [memoryview(buffer) for buffer in buffers])
                if self.durable:
                    os.fsync(file.fileno())
                os.rename(temporary, path)
            self._sync_folders(path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise

    def _sync_folders(self, path: Path) -> None:
        """Make renames and removals below the root survive a power cut, if the tier is durable."""
        if not self.durable:
            return
        for folder in path.relative_to(self.root).parents:
            with suppress(FileNotFoundError):  # another process emptied the folder and removed it
                descriptor = os.open(self.root / folder, os.O_RDONLY | os.O_DIRECTORY)
                try:
                    os.fsync(descriptor)
                finally:
                    os.close(descriptor)

    def _sweep(self) -> None:
        """Remove temporary files whose writer is dead."""
        for temporary in self._partial.iterdir():
            with suppress(FileNotFoundError, BlockingIOError), temporary.open("rb") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                temporary.unlink()

    def _walk(self, folder: Path, base: str, prefix: str) -> Iterator[Entry]:
        try:
            found = list(os.scandir(folder))
        except (FileNotFoundError, NotADirectoryError):
            return
        for item in found:
            key = base + item.name
            if item.name.startswith("."):
                continue
            if item.is_dir(follow_symlinks=False):
                if key.startswith(prefix) or prefix.startswith(f"{key}/"):
                    yield from self._walk(Path(item.path), f"{key}/", prefix)
            elif key.startswith(prefix):
                with suppress(FileNotFoundError):
                    status = item.stat()
                    yield Entry(key, status.st_size, status.st_mtime)

    def _guarded(self, action: str, key: str = "") -> Guard:
        return Guard(self.name, action, key, (OSError, pa.ArrowException))


def _write_all(descriptor: int, views: list[memoryview]) -> None:
    """Write the views one after the other, with as few calls as there may be.

    With a call for each view, which ends somewhere inside a page, the page cache takes the file up page by page
    (Linux 6, ext4): `bench store` then wrote at half the speed of the raw disk.
    """
    while views:
        written = os.writev(descriptor, views[:_VIEWS_PER_CALL])
        while views and written >= len(views[0]):
            written -= len(views.pop(0))
        if written:
            views[0] = views[0][written:]
