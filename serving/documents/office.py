"""Office files as PDFs, by LibreOffice in a bounded group of processes.

| kind       | is told by                                                                    |
|------------|-------------------------------------------------------------------------------|
| docx, pptx | a zip whose directory has `word/document.xml`, `ppt/presentation.xml`         |
| odt, odp   | a zip whose first file, `mimetype`, is OpenDocument's                         |
| html       | a text that begins with `<!doctype html` or `<html`, but for blanks, comments |

A conversion has a profile of its own, in which macros, active content and links to other files are off, no network
where the kernel grants namespaces, and bounds on time, address space and the size of files. LibreOffice's launcher
starts further processes: all of them end with their group.
"""

from __future__ import annotations

import logging
import os
import re
import shutil
import signal
import subprocess
import tempfile
import threading
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path

from kvstore.uploads.renditions import Renditions
from serving.documents.pdf import UnreadablePdf, is_pdf
from serving.documents.settings import DocumentSettings

logger = logging.getLogger(__name__)

_END = b"PK\x05\x06"  # a zip's last record: of 22 bytes, and a comment of up to 65,535
_WITHIN = 22 + 0xFFFF
_LARGEST_DIRECTORY = 1 << 20  # bytes
_ENTRIES = (
    ("docx", re.compile(rb"word/document\d*\.xml")),  # the number is Word Online's
    ("pptx", re.compile(rb"ppt/presentation\d*\.xml")),
)
_NAME_AT = 30  # bytes of a zip's first record before the name of its file
_MIMETYPES = (
    ("odt", b"mimetypeapplication/vnd.oasis.opendocument.text"),
    ("odp", b"mimetypeapplication/vnd.oasis.opendocument.presentation"),
)
_HTML = re.compile(
    rb"(?:\xef\xbb\xbf)?(?:\s++|<\?xml[^>]*+>|(?><!--.*?-->))*+<(?:!doctype\s+html|html)\b", re.DOTALL | re.IGNORECASE
)
_HTML_WITHIN = 4096
_AS_TEXT = ("--infilter=HTML (StarWriter)",)  # else it is laid out as a web page, whose first page is an empty one
# What a file may not have LibreOffice do: run its macros, or read other files and addresses.
_PROFILE = """<?xml version="1.0" encoding="UTF-8"?>
<oor:items xmlns:oor="http://openoffice.org/2001/registry">
<item oor:path="/org.openoffice.Office.Common/Security/Scripting">
<prop oor:name="MacroSecurityLevel" oor:op="fuse"><value>3</value></prop>
<prop oor:name="DisableMacrosExecution" oor:op="fuse"><value>true</value></prop>
<prop oor:name="DisableActiveContent" oor:op="fuse"><value>true</value></prop>
<prop oor:name="BlockUntrustedRefererLinks" oor:op="fuse"><value>true</value></prop>
</item>
<item oor:path="/org.openoffice.Office.Writer/Content/Update">
<prop oor:name="Link" oor:op="fuse"><value>2</value></prop>
</item>
</oor:items>
"""
AT_ONCE = 2  # conversions of this process; further ones wait
_TURNS = threading.Semaphore(AT_ONCE)
# Limits stand before LibreOffice runs: a shell sets them for itself, and becomes it.
_BOUNDED = 'ulimit -c 0; ulimit -v "$1"; ulimit -t "$2"; ulimit -f "$3"; shift 3; exec "$@"'


def kind_of(data: bytes) -> str | None:
    """Kind of an office file by its content; None of others, PDFs and plain texts included."""
    if data.startswith(b"PK\x03\x04"):
        name = data[_NAME_AT : _NAME_AT + 64]
        of_mimetype = (kind for kind, mimetype in _MIMETYPES if name.startswith(mimetype))
        directory = _directory(data)
        return next(of_mimetype, None) or next((kind for kind, entry in _ENTRIES if entry.search(directory)), None)
    return "html" if _HTML.match(data[:_HTML_WITHIN]) else None


def has_pages(data: bytes) -> bool:
    """True for a PDF, and for a file that is converted to one."""
    return is_pdf(data) or kind_of(data) is not None


def converter() -> str | None:
    """Path of LibreOffice's command; None where it is not installed."""
    return shutil.which("soffice") or shutil.which("libreoffice")


def as_pdf(
    data: bytes, settings: DocumentSettings, kept: Renditions | None = None, content: str = "", owner: str = ""
) -> bytes:
    """A file that has pages as a PDF: as it is, as it was converted before, or converted now.

    Args:
        kept: where PDFs of stored files are, by content id and owner; None: the file is not stored.

    Raises:
        UnreadablePdf: as `to_pdf`.
    """
    kind = None if is_pdf(data) else kind_of(data)
    if kind is None:
        return data
    if kept is not None and (known := kept.get(content, owner)) is not None:
        return known
    pdf = to_pdf(data, kind, settings)
    if kept is not None:
        kept.put(content, owner, pdf)
    return pdf


def to_pdf(data: bytes, kind: str, settings: DocumentSettings) -> bytes:
    """Convert an office file; blocks for seconds.

    Raises:
        UnreadablePdf: LibreOffice is not installed, or makes no PDF of it within the bounds.
    """
    if (command := converter()) is None:
        raise UnreadablePdf(
            f"a {kind} file is read through LibreOffice, which is not installed here (there is no `soffice`); send it "
            "as PDF, or its text",
            "unsupported_file",
        )
    with tempfile.TemporaryDirectory(prefix="orbitserve-office-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        profile = folder / "profile"
        (profile / "user").mkdir(parents=True)
        (profile / "user" / "registrymodifications.xcu").write_text(_PROFILE)
        (folder / f"file.{kind}").write_bytes(data)
        asked = [
            *(command, f"-env:UserInstallation={profile.as_uri()}", "--headless", "--norestore", "--nolockcheck"),
            *(_AS_TEXT if kind == "html" else ()),
            *("--convert-to", "pdf", "--outdir", str(folder), str(folder / f"file.{kind}")),
        ]
        with _TURNS:
            _run(asked, folder, kind, settings)
        pdf = b""
        with suppress(OSError):
            pdf = (folder / "file.pdf").read_bytes()
    if not is_pdf(pdf):
        raise UnreadablePdf(
            f"LibreOffice makes no PDF of the {kind} file: it is broken, encrypted, or takes more than "
            f"{settings.office_memory_bytes} bytes of memory",
            "invalid_file",
        )
    return pdf


def _directory(data: bytes) -> bytes:
    """Central directory of a zip; empty if there is none, or a huge one."""
    end = data.rfind(_END, max(0, len(data) - _WITHIN))
    size = int.from_bytes(data[end + 12 : end + 16], "little")
    return data[end - size : end] if 0 < size <= min(end, _LARGEST_DIRECTORY) else b""


def _run(command: Sequence[str], folder: Path, kind: str, settings: DocumentSettings) -> None:
    """Run LibreOffice until it ends; raises UnreadablePdf if it takes too long."""
    seconds = settings.office_timeout_s
    limits = settings.office_memory_bytes >> 10, max(1, int(seconds)), settings.max_pdf_bytes >> 9  # as ulimit counts
    process = subprocess.Popen(
        ["/bin/sh", "-c", _BOUNDED, "sh", *map(str, limits), *_without_network(), *command],
        cwd=folder,
        env={"PATH": os.environ.get("PATH", os.defpath), "HOME": str(folder), "LANG": "C.UTF-8"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        raise UnreadablePdf(f"converting the {kind} file took longer than {seconds:g} s", "unreadable_file") from None
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@cache
def _without_network() -> tuple[str, ...]:
    """Command before another that takes its network away; () where the kernel grants no namespace."""
    alone = ("unshare", "--user", "--map-current-user", "--net", "--")
    with suppress(OSError):
        if subprocess.run([*alone, "true"], capture_output=True, check=False).returncode == 0:
            return alone
    logger.warning("office files are converted with the host's network: `unshare --user --net` does not work here")
    return ()
