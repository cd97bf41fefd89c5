"""PDFs of text for tests and benchmarks, written by hand."""

from __future__ import annotations

from collections.abc import Sequence


def pdf(*pages: Sequence[str], size: str = "612 792", turned: int = 0) -> bytes:
    """A PDF with these lines of text on its pages, from 92 points below their upper edge on.

    `turned`: degrees clockwise by which its pages are shown.
    """
    top = float(size.split()[1]) - 92
    objects = [b"<< /Type /Catalog /Pages 2 0 R >>", b"", b"<< /Type /Font /Subtype /Type1 /BaseFont /Helvetica >>"]
    kids = []
    for lines in pages:
        drawn = f"BT /F1 14 Tf 72 {top:g} Td 20 TL " + " ".join(f"({_escaped(line)}) Tj T*" for line in lines) + " ET"
        objects.append(f"<< /Length {len(drawn)} >>\nstream\n{drawn}\nendstream".encode())
        kids.append(len(objects) + 1)
        objects.append(
            f"<< /Type /Page /Parent 2 0 R /Rotate {turned} /MediaBox [0 0 {size}] /Contents {len(objects)} 0 R "
            "/Resources << /Font << /F1 3 0 R >> >> >>".encode()
        )
    listed = " ".join(f"{kid} 0 R" for kid in kids)
    objects[1] = f"<< /Type /Pages /Kids [{listed}] /Count {len(kids)} >>".encode()
    out, places = b"%PDF-1.4\n", []
    for number, body in enumerate(objects, 1):
        places.append(len(out))
        out += f"{number} 0 obj\n".encode() + body + b"\nendobj\n"
    table = "".join(f"{place:010d} 00000 n \n" for place in places)
    end = (
        f"xref\n0 {len(objects) + 1}\n0000000000 65535 f \n{table}trailer\n<< /Size {len(objects) + 1} /Root 1 0 R >>\n"
    )
    return out + f"{end}startxref\n{len(out)}\n%%EOF\n".encode()


def _escaped(line: str) -> str:
    return line.translate({ord(letter): f"\\{letter}" for letter in "\\()"})
