"""Media that went wrong silently or cost too much: deep, thin and lying images, page descriptions, wrong methods."""

from __future__ import annotations

import base64
import io
import time
import zlib
from typing import Any

import httpx
import numpy as np
import pytest
from client import MAX_IMAGE_PIXELS, Service, inline, picture, text, user
from image_files import png16, png_chunk, tiff
from PIL import Image

pytestmark = pytest.mark.service

PDF = b"%PDF-1.4\n1 0 obj<</Type/Catalog/Pages 2 0 R>>endobj\ntrailer<</Root 1 0 R>>\n%%EOF\n"
CHECKS = np.where((np.indices((112, 112)) // 14).sum(0) % 2, 40, 200).astype(np.uint8)  # grey, 8 squares a side


def saved(pixels: np.ndarray, kind: str = "PNG", **options: Any) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, kind, **options)
    return buffer.getvalue()


def first_token(service: Service, data: bytes) -> list[tuple[str, float]]:
    """The most likely first tokens, by which pictures are told apart."""
    answer = service.chat(user(inline(data), "What is it?"), "off", max_tokens=1, logprobs=True, top_logprobs=5)
    return [(one["token"], one["logprob"]) for one in answer["choices"][0]["logprobs"]["content"][0]["top_logprobs"]]


def file_part(data: bytes, name: str = "a.pdf") -> dict[str, Any]:
    url = f"data:application/octet-stream;base64,{base64.b64encode(data).decode()}"
    return {"type": "file", "file": {"filename": name, "file_data": url}}


def refused(service: Service, *parts: Any) -> tuple[int, str]:
    answer = service.post(service.body(user(*parts)))
    assert answer.json()["error"]["code"] == answer.status_code
    return answer.status_code, answer.json()["error"]["message"]


DEEP = CHECKS.astype(np.uint16) * 257


@pytest.mark.parametrize(
    "data",
    [
        png16(DEEP[..., None]),
        png16(np.stack([DEEP] * 3, -1)),
        png16(np.stack([DEEP, DEEP, DEEP, np.full_like(DEEP, 65535)], -1)),
        tiff(DEEP[..., None], 1, order=">"),
        tiff(65535 - DEEP[..., None], 0),
        saved(CHECKS.astype(np.int32) * 257, "TIFF"),
        saved((CHECKS / 255).astype(np.float32), "TIFF", compression="tiff_deflate"),
    ],
    ids=["png-grey", "png-rgb", "png-rgba", "tiff-grey", "tiff-white-is-zero", "tiff-int32", "tiff-float"],
)
def test_a_deep_picture_is_answered_as_its_8_bit_version(service: Service, data: bytes):
    plain = first_token(service, saved(CHECKS))
    assert plain != first_token(service, saved(np.full_like(CHECKS, 255))), "white is told apart"
    assert first_token(service, data) == plain
    assert first_token(service, data) == plain, "repeated"


def test_tiff_avif_and_ico_are_read(service: Service):
    plain = first_token(service, saved(CHECKS))
    assert first_token(service, saved(CHECKS, "TIFF")) == plain
    assert first_token(service, saved(CHECKS, "ICO", sizes=[(112, 112)])) == plain
    assert service.chat(user(inline(saved(CHECKS, "AVIF")), "What is it?"), max_tokens=1)["choices"]


def test_pixels_that_are_no_numbers_are_refused(service: Service):
    status, message = refused(service, inline(tiff(np.full((28, 28, 1), np.nan, np.float32), 1)), "?")
    assert (status, "not finite numbers" in message) == (400, True), message


@pytest.mark.parametrize(("width", "height"), [(1, 20_000), (MAX_IMAGE_PIXELS, 1), (3, 601)])
def test_a_thin_image_is_refused_by_name_and_number_before_it_is_decoded(service: Service, width: int, height: int):
    # its pixels are missing, so that decoding would be told as something else
    header = png_chunk(b"IHDR", width.to_bytes(4, "big") + height.to_bytes(4, "big") + bytes([8, 2, 0, 0, 0]))
    data = b"\x89PNG\r\n\x1a\n" + header + png_chunk(b"IDAT", zlib.compress(b"")) + png_chunk(b"IEND", b"")
    began = time.monotonic()
    status, message = refused(service, text("Look:"), inline(data))
    assert status == 400
    assert "messages[0].content[1]" in message
    assert f"{width}x{height}" in message
    assert "aspect ratio must be smaller than 200" in message
    assert time.monotonic() - began < 5
    upload = httpx.post(
        service.url + "/v1/files", data={"purpose": "vision"}, files={"file": ("a.png", data)}, timeout=60
    )
    assert (upload.status_code, "aspect ratio" in upload.text) == (400, True)


def test_an_image_that_is_hardly_thin_enough_is_answered(service: Service):
    assert service.chat(user(picture(901, width=4, height=800), "?"), max_tokens=1)["choices"]


@pytest.mark.parametrize("data", [PDF, b"\n\n" + PDF])
def test_a_pdf_without_pages_is_refused_wherever_it_comes(service: Service, data: bytes):
    for part in (file_part(data), inline(data)):
        status, message = refused(service, part, "Summarise")
        assert status == 400
        assert "messages[0].content[0]" in message
        assert "PDF" in message
    for purpose in ("user_data", "vision"):
        upload = httpx.post(
            service.url + "/v1/files", data={"purpose": purpose}, files={"file": ("a.pdf", data)}, timeout=60
        )
        assert (upload.status_code, "PDF" in upload.text) == (400, True)


@pytest.mark.parametrize("data", [b"%!PS-Adobe-3.0\nshowpage", rb"{\rtf1 words}"])
def test_a_page_description_is_refused_wherever_it_comes(service: Service, data: bytes):
    for part in (file_part(data, "a.txt"), inline(data)):
        status, message = refused(service, part, "Summarise")
        assert status == 400
        assert "messages[0].content[0]" in message
        assert "render its pages as images" in message
    for purpose in ("user_data", "vision"):
        upload = httpx.post(
            service.url + "/v1/files", data={"purpose": purpose}, files={"file": ("a.txt", data)}, timeout=60
        )
        assert (upload.status_code, "render its pages as images" in upload.text) == (400, True)
    words = file_part(b"A PDF begins with %PDF-1.4.", "a.txt")
    assert service.chat(user(words, "Summarise"), max_tokens=1)["choices"]


def test_openapi_tells_errors_and_keys(service: Service):
    document = httpx.get(service.url + "/openapi.json").json()
    chat = document["paths"]["/v1/chat/completions"]["post"]["responses"]
    assert {"400", "401", "404", "413", "429", "503"} <= set(chat)
    assert "403" in document["paths"]["/v1/vector_stores"]["post"]["responses"]
    assert [scheme["scheme"] for scheme in document["components"]["securitySchemes"].values()] == ["bearer"]


@pytest.mark.parametrize("path", ["/health", "/metrics", "/v1/models", "/v1/orbit/operating_points"])
def test_head_is_answered_where_get_is(service: Service, path: str):
    answer = httpx.head(service.url + path, timeout=60)
    assert (answer.status_code, answer.content) == (200, b"")


def test_a_wrong_method_is_told_the_right_one(service: Service):
    answer = httpx.get(service.url + "/v1/chat/completions")
    assert (answer.status_code, answer.headers["Allow"]) == (405, "POST")
    assert answer.json()["error"]["code"] == 405
    assert httpx.delete(service.url + "/v1/files").headers["Allow"] == "GET, HEAD, POST"


def test_the_service_still_answers(service: Service):
    assert service.chat(user(picture(902), "Still there?"), max_tokens=2)["usage"]["completion_tokens"] == 2
