"""Office files for tests, written by hand, and a stand-in for LibreOffice's command."""

from __future__ import annotations

import io
import zipfile
from collections.abc import Sequence
from pathlib import Path
from xml.sax.saxutils import escape

_WORD = "http://schemas.openxmlformats.org/wordprocessingml/2006/main"
_PACKAGE = "http://schemas.openxmlformats.org/package/2006"
_OFFICE = "http://schemas.openxmlformats.org/officeDocument/2006/relationships"
_ODF = "urn:oasis:names:tc:opendocument:xmlns"
_HEAD = '<?xml version="1.0" encoding="UTF-8" standalone="yes"?>\n'


def docx(*lines: str) -> bytes:
    """A Word file with these paragraphs."""
    body = "".join(f"<w:p><w:r><w:t>{escape(line)}</w:t></w:r></w:p>" for line in lines)
    main = "application/vnd.openxmlformats-officedocument.wordprocessingml.document.main+xml"
    return zipped(
        {
            "[Content_Types].xml": f'{_HEAD}<Types xmlns="{_PACKAGE}/content-types">'
            '<Default Extension="rels" ContentType="application/vnd.openxmlformats-package.relationships+xml"/>'
            f'<Override PartName="/word/document.xml" ContentType="{main}"/></Types>',
            "_rels/.rels": f'{_HEAD}<Relationships xmlns="{_PACKAGE}/relationships">'
            f'<Relationship Id="r1" Type="{_OFFICE}/officeDocument" Target="word/document.xml"/></Relationships>',
            "word/document.xml": f'{_HEAD}<w:document xmlns:w="{_WORD}"><w:body>{body}</w:body></w:document>',
        }
    )


def odt(*lines: str, image: str | None = None) -> bytes:
    """An OpenDocument text with these paragraphs, and a picture that is read from the address `image`."""
    body = "".join(f"<text:p>{escape(line)}</text:p>" for line in lines)
    if image is not None:
        place = 'text:anchor-type="as-char" svg:width="2cm" svg:height="2cm"'
        linked = f'<draw:image xlink:href="{image}" xlink:type="simple"/>'
        body += f"<text:p><draw:frame {place}>{linked}</draw:frame></text:p>"
    return _open_document("text", f"<office:text>{body}</office:text>")


def odp(*slides: str) -> bytes:
    """An OpenDocument presentation with a text frame on each slide."""
    place = 'svg:x="2cm" svg:y="2cm" svg:width="20cm" svg:height="4cm"'
    pages = "".join(
        f'<draw:page draw:name="{i}" draw:master-page-name="m"><draw:frame {place}><draw:text-box>'
        f"<text:p>{escape(words)}</text:p></draw:text-box></draw:frame></draw:page>"
        for i, words in enumerate(slides)
    )
    return _open_document("presentation", f"<office:presentation>{pages}</office:presentation>")


def _open_document(kind: str, body: str) -> bytes:
    names = ("office", "text", "table", "style", "drawing:draw", "svg-compatible:svg")
    spaces = " ".join(f'xmlns:{name.split(":")[-1]}="{_ODF}:{name.split(":")[0]}:1.0"' for name in names)
    mimetype = f"application/vnd.oasis.opendocument.{kind}"
    content = (
        f'{_HEAD}<office:document-content {spaces} xmlns:xlink="http://www.w3.org/1999/xlink" office:version="1.3">'
        f"<office:body>{body}</office:body></office:document-content>"
    )
    manifest = (
        f'{_HEAD}<manifest:manifest xmlns:manifest="{_ODF}:manifest:1.0" manifest:version="1.3">'
        f'<manifest:file-entry manifest:full-path="/" manifest:media-type="{mimetype}"/>'
        '<manifest:file-entry manifest:full-path="content.xml" manifest:media-type="text/xml"/></manifest:manifest>'
    )
    return zipped({"mimetype": mimetype, "content.xml": content, "META-INF/manifest.xml": manifest})


def zipped(files: dict[str, str]) -> bytes:
    """A zip of texts by name; `mimetype` is not compressed, as OpenDocument wants it."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, text in files.items():
            archive.writestr(name, text, zipfile.ZIP_STORED if name == "mimetype" else None)
    return buffer.getvalue()


def stand_in(folder: Path, script: Sequence[str]) -> Path:
    """A folder with a shell script called `soffice`, in which $OUT is the PDF that it should make and $IN its file."""
    folder.mkdir(exist_ok=True)
    command = folder / "soffice"
    head = ("#!/bin/sh", 'for IN; do :; done; OUT="${IN%.*}.pdf"')
    command.write_text("\n".join([*head, *script]) + "\n")
    command.chmod(0o755)
    return folder
