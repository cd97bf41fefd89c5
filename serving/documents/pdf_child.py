"""Reader of one PDF in a process of its own: pdfium is C++ and PDFs come from anybody.

Standard input is a line of JSON, then the PDF: `bytes` (of it), `site` (where pypdfium2 lies), `max_pages`,
`max_pixels`, `dpi`, `pages` (from 0; null: all), `text` and `pixels` (whether they are wanted). Standard output is one
JSON line for the document ({"pages": count} or {"error": why, "code": code}), then for each page one JSON line ("page",
"width" and "height" in pixels, "text", "lines", "bytes", or "error"), followed by so many bytes of RGB. `bounded_child`
limits the process. It imports nothing of this project, so that it starts in a tenth of a second.
"""

from __future__ import annotations

import json
import math
import re
import sys
from typing import Any

_LARGEST_SIDE = 200 * 72  # points: PDF 1.7's largest page
_MOST_TEXT = 1 << 20  # characters of a page
_ENCRYPTED = 4  # FPDF_ERR_PASSWORD
_SPACES = re.compile(r"[^\S\n]+")


def main() -> None:
    """Read the job and the PDF, write what was asked for."""
    job = json.loads(sys.stdin.buffer.readline())
    sys.path.append(job["site"])
    import pypdfium2

    data = sys.stdin.buffer.read(job["bytes"])
    try:
        document = pypdfium2.PdfDocument(data)
    except pypdfium2.PdfiumError as error:
        if getattr(error, "err_code", None) == _ENCRYPTED:
            _say({"error": "the PDF is encrypted; send it without a password", "code": "encrypted_file"})
        else:
            _say({"error": "the PDF cannot be read: it is broken, or no PDF", "code": "invalid_file"})
        return
    count = len(document)
    if count == 0:
        _say({"error": "the PDF has no pages", "code": "empty_file"})
        return
    if count > job["max_pages"]:
        _say({"error": f"the PDF has {count} pages, at most {job['max_pages']} are allowed", "code": "too_many_pages"})
        return
    _say({"pages": count})
    wanted = range(count) if job["pages"] is None else job["pages"]
    for number in wanted:
        if 0 <= number < count:
            _write_page(document, number, job)


def _write_page(document: Any, number: int, job: dict[str, Any]) -> None:
    import pypdfium2

    try:
        page = document[number]
        width, height = page.get_size()
        if not (0 < width <= _LARGEST_SIDE and 0 < height <= _LARGEST_SIDE):
            raise ValueError(f"its size is {width:g} x {height:g} points")
        scale = job["dpi"] / 72
        shape = math.ceil(width * scale), math.ceil(height * scale)
        if shape[0] * shape[1] > job["max_pixels"]:
            raise ValueError(f"it would have {shape[0]}x{shape[1]} pixels, at most {job['max_pixels']} are allowed")
        found: dict[str, Any] = {"page": number, "width": shape[0], "height": shape[1]}
        if job["text"]:
            found["text"], found["lines"] = _text(page)
        pixels = _pixels(page, scale, shape) if job["pixels"] else b""
    except (ValueError, pypdfium2.PdfiumError) as error:
        _say({"page": number, "error": str(error) or "it cannot be read", "code": "invalid_page"})
        return
    _say(found | {"bytes": len(pixels)})
    sys.stdout.buffer.write(pixels)


def _pixels(page: Any, scale: float, shape: tuple[int, int]) -> bytes:
    """RGB of a page, row by row without padding."""
    bitmap = page.render(scale=scale, rev_byteorder=True, force_bitmap_format=2)  # FPDFBitmap_BGR
    if (bitmap.width, bitmap.height) != shape:
        raise ValueError(f"it was drawn with {bitmap.width}x{bitmap.height} pixels, not {shape[0]}x{shape[1]}")
    data, row = bytes(bitmap.buffer), bitmap.width * 3
    return b"".join(data[at : at + row] for at in range(0, bitmap.height * bitmap.stride, bitmap.stride))


def _text(page: Any) -> tuple[str, list[list[float]]]:
    """A page's text, and by line its characters and rectangle, in shares of the page as it is drawn."""
    layer = page.get_textpage()
    turned, whole = page.get_rotation(), page.get_bbox()
    pieces: list[str] = []
    lines: list[list[float]] = []
    baseline: tuple[float, float] | None = None
    total = 0
    for i in range(layer.count_rects()):
        x0, y0, x1, y1 = layer.get_rect(i)
        text = _SPACES.sub(" ", layer.get_text_bounded(x0, y0, x1, y1).replace("\r\n", "\n")).strip()
        if not text:
            continue
        total += len(text) + 1
        if total > _MOST_TEXT:
            break
        shares = _as_drawn((x0, y0, x1, y1), whole, turned)
        middle = (shares[1] + shares[3]) / 2
        box = [round(min(max(share, 0.0), 1.0), 4) for share in shares]
        if baseline is not None and baseline[0] <= middle <= baseline[1]:  # more of the same line
            last = lines[-1]
            pieces[-1] = pieces[-1][:-1] + " " + text + "\n"
            last[1:] = [min(last[1], box[0]), min(last[2], box[1]), max(last[3], box[2]), max(last[4], box[3])]
        else:
            pieces.append(text + "\n")
            lines.append([0, *box])
            baseline = shares[1], shares[3]
        lines[-1][0] = len(pieces[-1])
    return "".join(pieces), lines


def _as_drawn(rect: tuple[float, ...], whole: tuple[float, ...], turned: int) -> tuple[float, float, float, float]:
    """A rectangle of a page, whose origin is at its lower left, in shares from the upper left once it is turned."""
    x0, y0, x1, y1 = rect
    left, bottom, right, top = whole
    x0, x1 = (x0 - left) / (right - left), (x1 - left) / (right - left)
    y0, y1 = (y0 - bottom) / (top - bottom), (y1 - bottom) / (top - bottom)
    if turned == 90:  # clockwise
        return y0, x0, y1, x1
    if turned == 180:
        return 1 - x1, y0, 1 - x0, y1
    if turned == 270:
        return 1 - y1, 1 - x1, 1 - y0, 1 - x0
    return x0, 1 - y1, x1, 1 - y0


def _say(line: dict[str, Any]) -> None:
    sys.stdout.buffer.write(json.dumps(line).encode() + b"\n")
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
