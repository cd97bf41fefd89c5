"""Images, and files that are texts: checked, bounded and named before a pixel is decoded."""

from __future__ import annotations

import io
import re
from collections import OrderedDict
from contextlib import suppress
from dataclasses import dataclass

from PIL import Image, UnidentifiedImageError

from kvstore.records.keys import owned_content_id
from serving.api.errors import TooLarge
from serving.api.image_headers import BadContainer, check_avif, check_container, is_tiff
from serving.api.image_limits import ImageLimits
from serving.api.pixel_budget import PixelReservation
from serving.api.pixels import DeferredImage, UnreadablePixels
from serving.api.request_budgets import ImageBudgets
from serving.documents.office import has_pages
from serving.documents.passages import as_text
from serving.documents.pdf import UnreadablePdf
from serving.frontend.errors import InvalidRequest
from serving.settings import HttpSettings

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "AVIF", "ICO")
_PDF_HEADER = re.compile(rb"%PDF-\d\.\d")  # within the first 1024 bytes, by the PDF specification
_PDF_WITHIN = 1024
_PDF_PARTS = (b"endobj", b"startxref", b"%%EOF")  # what a text that only speaks of PDFs does not have besides
# Pages as a program in ASCII: read as a text, a prompt would be their source.
_PAGES = {
    b"%PDF-": "a PDF",
    b"%FDF-": "a PDF's form",
    b"%!PS": "PostScript",
    b"\xc5\xd0\xd3\xc6": "PostScript",
    b"\x1b%-12345X": "a print job",
    b"{\\rtf": "RTF",
}
_MOST_KNOWN = 65536  # contents that have proved decodable


@dataclass(frozen=True)
class ResolvedImage:
    """An image ready for vLLM's renderer: `content` is its id, `image` may still be undecoded."""

    content: str
    image: Image.Image

    @property
    def pixels(self) -> int:
        """Number of pixels."""
        return self.image.width * self.image.height


@dataclass(frozen=True)
class ResolvedText:
    """A text document: `content` is its id."""

    content: str
    text: str


class ImageOpener:
    """Opener of one deployment's images. Thread-safe.

    Args:
        settings: bounds of one image or text.
        secret: salt of content ids.
        limits: the model's own on images; None: it has none, or they are not known.
        takes_texts: whether files may be texts.
    """

    def __init__(self, settings: HttpSettings, secret: bytes, limits: ImageLimits | None, takes_texts: bool) -> None:
        self._settings, self._secret, self._limits, self._takes_texts = settings, secret, limits, takes_texts
        self._decoded: OrderedDict[str, None] = OrderedDict()  # content ids that have proved decodable

    def has_decoded(self, content: str) -> bool:
        """True for a content that has proved decodable."""
        return content in self._decoded

    def identify_file(
        self, data: bytes, owner: str, where: str, images: ImageBudgets | None = None
    ) -> ResolvedImage | ResolvedText:
        """Check a file, an image by its header alone or UTF-8 text, and name it for its owner.

        Raises:
            InvalidRequest: neither. TooLarge: more bytes or pixels than allowed.
        """
        refuse_pages(data, where)
        text = None if not self._takes_texts else as_text(data)
        if text is None:
            return self.identify(data, owner, where, images, or_text=self._takes_texts)
        if len(data) > self._settings.max_document_bytes:
            limit = self._settings.max_document_bytes
            raise TooLarge(f"{where}: the document has {len(data)} bytes, at most {limit} are allowed")
        return ResolvedText(owned_content_id(data, owner, self._secret), text)

    def identify(
        self, data: bytes, owner: str, where: str, images: ImageBudgets | None = None, or_text: bool = False
    ) -> ResolvedImage:
        """Check an image by its header alone, and name it for its owner, a tenant or DYNAMIC_TENANT.

        Its pixels and tokens count against the request's.

        `or_text`: whether text would have done as well.

        Raises:
            InvalidRequest: not an image. TooLarge: more bytes or pixels than allowed.
        """
        limits = self._settings
        if not data:
            raise InvalidRequest(f"{where}: the image is empty (0 bytes)", parameter=where)
        refuse_pages(data, where)
        if len(data) > limits.max_image_bytes:
            raise TooLarge(f"{where}: the image has {len(data)} bytes, at most {limits.max_image_bytes} are allowed")
        try:
            check_container(data, limits.max_image_pixels)
            image = Image.open(io.BytesIO(data), formats=FORMATS)
            if image.format == "AVIF":
                check_avif(data, image.width * image.height)
        except Image.DecompressionBombError as error:
            raise TooLarge(
                f"{where}: the image has more pixels than the {limits.max_image_pixels} that are allowed"
            ) from error
        except BadContainer as error:
            raise InvalidRequest(f"{where}: the image cannot be read: {error}", parameter=where) from error
        except (UnidentifiedImageError, OSError, ValueError) as error:
            if is_tiff(data):
                wanted = "a TIFF in a form that is not read; save it with 8 or 16 bits a channel, or as PNG"
            else:
                known = f"an image in a known format ({', '.join(FORMATS)})"
                wanted = f"neither {known} nor a text file" if or_text else f"not {known}"
            raise InvalidRequest(f"{where}: {wanted}", parameter=where) from error
        if image.width * image.height > limits.max_image_pixels:
            raise TooLarge(
                f"{where}: the image has {image.width}x{image.height} pixels, "
                f"at most {limits.max_image_pixels} are allowed"
            )
        tokens = 0 if self._limits is None else self._limits.check(image.width, image.height, where)
        if images is not None:
            images.pixels.take(image.width * image.height, where)
            images.tokens.take(tokens, where)
        return ResolvedImage(owned_content_id(data, owner, self._secret), DeferredImage(image))

    def decode(self, found: ResolvedImage, where: str, share: PixelReservation | None = None) -> ResolvedImage:
        """Decode an image for vLLM; it holds its share of the pixel budget.

        Without one it is left as it is, if its content has proved decodable.

        Raises:
            InvalidRequest: broken.
        """
        content, image = found.content, found.image
        if share is None and content in self._decoded:
            with suppress(KeyError):  # another thread may have let go of it just now
                self._decoded.move_to_end(content)
            return found
        try:
            image.load()
        except (UnreadablePixels, UnreadablePdf) as error:
            raise InvalidRequest(f"{where}: {error}", parameter=where) from error
        except Exception as error:  # whatever decoding raises is the image's fault, and Pillow raises many things
            raise InvalidRequest(f"{where}: the image is truncated or broken: {error}", parameter=where) from error
        if share is not None:
            share.held_by(image)
        self._decoded[content] = None
        if len(self._decoded) > _MOST_KNOWN:
            self._decoded.popitem(last=False)
        return found


def refuse_misnamed(name: object, data: bytes, where: str) -> None:
    """Raise InvalidRequest for a file that is named as a PDF, and has no pages."""
    if isinstance(name, str) and name.lower().endswith(".pdf") and not has_pages(data):
        raise InvalidRequest(f"{where}: it is named {name!r}, but its bytes are no PDF", parameter=where)


def refuse_pages(data: bytes, where: str) -> None:
    """Raise InvalidRequest for a PDF or another page description, however much of it is text.

    A PDF's header may stand behind other bytes; there it takes more of a PDF than the header alone.
    """
    start = data[:_PDF_WITHIN].removeprefix(b"\xef\xbb\xbf").lstrip()
    kind = next((kind for magic, kind in _PAGES.items() if start.startswith(magic)), None)
    if kind is None and _PDF_HEADER.search(data[: _PDF_WITHIN + 8]) and any(part in data for part in _PDF_PARTS):
        kind = "a PDF"
    if kind is not None:
        raise InvalidRequest(
            f"{where}: {kind}, which is not read yet; render its pages as images (such as PNG), or send its text",
            parameter=where,
        )
