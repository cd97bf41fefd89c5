"""Images on their way in: bounded before they are decoded, named by content, fetched from public addresses only."""

from __future__ import annotations

import asyncio
import base64
import gc
import gzip
import http.server
import io
import socket
import struct
import threading
import time
import zlib
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from image_files import png16, tiff
from PIL import Image, PngImagePlugin
from vllm.multimodal.image import convert_image_mode, normalize_image

from kvstore.records.keys import is_shared
from kvstore.settings import FileSettings
from kvstore.uploads.files import FileStore
from kvstore.uploads.vector_stores import VectorStores
from serving.api import fetching, pixels
from serving.api.errors import NotFound, TooLarge
from serving.api.fetching import pinned
from serving.api.image_limits import ImageLimits
from serving.api.images import ResolvedText
from serving.api.media import MediaResolver
from serving.api.pixel_budget import give_back
from serving.frontend.errors import InvalidRequest
from serving.settings import HttpSettings


def png(width: int = 8, height: int = 8, colour: str = "red", mode: str = "RGB", kind: str = "PNG") -> bytes:
    buffer = io.BytesIO()
    Image.new(mode, (width, height), colour if mode == "RGB" else 1).save(buffer, kind)
    return buffer.getvalue()


def data_url(data: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(data).decode()}"


@pytest.fixture
def files(tmp_path: Path) -> FileStore:
    return FileStore(str(tmp_path), FileSettings())


def resolver(files: FileStore, **limits) -> MediaResolver:
    return MediaResolver(HttpSettings(**limits), files, VectorStores(files))


def ask(*parts) -> list[dict]:
    return [{"role": "user", "content": list(parts)}]


def image_part(url: str) -> dict:
    return {"type": "image_url", "image_url": {"url": url}}


async def test_an_image_becomes_a_named_part_in_place(files: FileStore):
    messages = ask({"type": "text", "text": "a"}, image_part(data_url(png())), {"type": "text", "text": "b"})
    (message,) = await resolver(files).resolve_messages(messages, "local")
    kinds = [part["type"] for part in message["content"]]
    assert kinds == ["text", "image_pil", "text"]
    assert message["content"][1]["image_pil"].size == (8, 8)
    assert messages[0]["content"][1]["type"] == "image_url", "the caller's messages stay as they were"


async def test_the_name_is_the_contents_and_the_tenants(files: FileStore):
    media_of = resolver(files)
    names = [
        media_of.open(data, tenant, "x").content
        for data, tenant in [(png(), "one"), (png(), "one"), (png(), "two"), (png(colour="blue"), "one")]
    ]
    assert names[0] == names[1]
    assert len(set(names)) == 3


async def test_a_repeated_image_is_not_decoded_again(files: FileStore, monkeypatch: pytest.MonkeyPatch):
    media_of = resolver(files)
    media_of.open(png(), "local", "x")
    monkeypatch.setattr(pixels, "convert_image_mode", pytest.fail)
    media_of.open(png(), "local", "x")


async def test_a_repeated_image_that_is_processed_no_more_is_decoded_within_the_budget(files: FileStore):
    processed: set[str] = set()
    settings = HttpSettings(max_decoded_pixels=1000)
    images = MediaResolver(settings, files, VectorStores(files), is_processed=processed.__contains__)
    for times in (1, 2):
        (message,) = await images.resolve_messages(ask(image_part(data_url(png()))), "local")
        assert images._budget.held == 64, times
        processed.add(message["content"][0]["uuid"]) if times == 2 else None
        give_back(message["content"][0]["image_pil"])
        await asyncio.sleep(0.01)
    await images.resolve_messages(ask(image_part(data_url(png()))), "local")
    assert images._budget.held == 0


@pytest.mark.parametrize(
    ("mode", "kind"),
    [("L", "PNG"), ("P", "GIF"), ("RGBA", "PNG"), ("RGB", "JPEG"), ("1", "BMP"),
     ("RGB", "TIFF"), ("I;16", "TIFF"), ("F", "TIFF"), ("CMYK", "TIFF"), ("RGBA", "AVIF"), ("RGBA", "ICO")],
)  # fmt: skip
async def test_every_format_comes_out_as_rgb(files: FileStore, mode: str, kind: str):
    found = resolver(files).open(png(mode=mode, kind=kind), "local", "x")
    assert found.image.convert("RGB").size == (8, 8)


@pytest.mark.parametrize(
    ("data", "error", "words"),
    [
        (b"", InvalidRequest, "empty"),
        (b"GIF89a", InvalidRequest, "not an image|truncated"),
        (b"<svg/>", InvalidRequest, r"not an image in a known format \([A-Z, ]*\)(?! nor)"),
        (png(64, 64)[:80], InvalidRequest, "truncated or broken"),
        (png(40, 40), TooLarge, "40x40 pixels, at most 1000"),
        (b"x" * 5000, TooLarge, "5000 bytes, at most 4096"),
    ],
    ids=["empty", "stub", "svg", "truncated", "pixels", "bytes"],
)
def test_bad_images_say_what_is_wrong(files: FileStore, data: bytes, error: type[Exception], words: str):
    with pytest.raises(error, match=words):
        resolver(files, max_image_pixels=1000 if b"PNG" in data[:4] and len(data) != 80 else 10_000,
                 max_image_bytes=4096).open(data, "local", "messages[0].content[0]")  # fmt: skip


def test_whatever_decoding_an_image_raises_is_said_in_words(files: FileStore):
    kind, whole = b"iCCP", png()  # Pillow raises IndexError at an empty one behind the pixels
    empty = struct.pack(">I", 0) + kind + struct.pack(">I", zlib.crc32(kind))
    with pytest.raises(InvalidRequest, match="truncated or broken"):
        resolver(files).open(whole[:-12] + empty + whole[-12:], "local", "messages[0].content[0]")


async def test_the_pixels_of_a_request_are_bounded_together(files: FileStore, monkeypatch: pytest.MonkeyPatch):
    limited = resolver(files, max_request_pixels=25_000)
    parts = [image_part(data_url(png(100, 100, colour))) for colour in ("red", "green", "blue", "white", "black")]
    await limited.resolve_messages(ask(*parts[:2]), "local")
    loaded: list[Any] = []
    monkeypatch.setattr("serving.api.pixels.convert_image_mode", lambda image, mode: loaded.append(image) or image)
    with pytest.raises(TooLarge, match=r"more than 25000 pixels in all"):
        await limited.resolve_messages(ask(*parts[2:]), "local")
    assert len(loaded) <= 2, "only what fits is decoded"


async def test_what_is_decoded_of_all_requests_is_bounded_together(files: FileStore):
    images = resolver(files, max_decoded_pixels=25_000)
    red, green, blue = (image_part(data_url(png(100, 100, colour))) for colour in ("red", "green", "blue"))
    first = await images.resolve_messages(ask(red, green, red), "local")
    assert images._budget.held == 20_000, "the one that comes twice is decoded once"
    waiting = asyncio.create_task(images.resolve_messages(ask(blue), "local"))
    await asyncio.sleep(0.05)
    assert not waiting.done()
    decodes_nothing = images.resolve_messages(ask(red), "local")
    again = await asyncio.wait_for(decodes_nothing, 5)  # and waits for nobody
    del first
    gc.collect()
    (message,) = await asyncio.wait_for(waiting, 10)
    assert images._budget.held == 10_000
    broken = image_part(data_url(png(90, 100)[:-40]))
    with pytest.raises(InvalidRequest, match="truncated"):
        await images.resolve_messages(ask(broken), "local")
    await asyncio.sleep(0.01)
    assert images._budget.held == 10_000, "what fails holds nothing"
    for _ in range(2):  # the second time there is nothing to give
        give_back(message["content"][0]["image_pil"])
    await asyncio.sleep(0.01)
    assert images._budget.held == 0
    assert again


async def test_a_file_of_another_tenant_does_not_exist(files: FileStore):
    made = files.create("one", "a.png", "vision", png(), None)
    part = {"type": "file", "file": {"file_id": made.id}}
    await resolver(files).resolve_messages(ask(part), "one")
    with pytest.raises(NotFound, match=made.id):
        await resolver(files).resolve_messages(ask(part), "two")


async def test_a_reference_is_everybodys_and_an_upload_of_the_same_bytes_its_tenants(files: FileStore):
    made, own = (files.create(tenant, "a.png", "vision", png(), None) for tenant in ("one", "two"))
    store = VectorStores(files).create("pages")
    VectorStores(files).add(store.id, "one", {made.id: {}})

    async def name(file_id: str, tenant: str) -> str:
        part = {"type": "file", "file": {"file_id": file_id}}
        (message,) = await resolver(files).resolve_messages(ask(part), tenant)
        return message["content"][0]["uuid"]

    shared = await name(made.id, "one")
    assert shared == await name(made.id, "two") == await name(made.id, "three")
    assert is_shared(shared)
    assert await name(own.id, "two") == own.content != shared
    VectorStores(files).remove(store.id, made.id)
    assert await name(made.id, "one") == made.content
    with pytest.raises(NotFound, match=made.id):
        await name(made.id, "two")


async def test_a_data_url_is_measured_before_it_is_decoded(files: FileStore, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(base64, "b64decode", pytest.fail)
    with pytest.raises(TooLarge):
        await resolver(files, max_image_bytes=100).resolve_messages(ask(image_part(data_url(b"x" * 5000))), "local")


async def test_an_inline_file_may_be_as_large_as_an_uploaded_one(files: FileStore):

    async def mark_soon(content: str, text: str) -> str:
        return f"[{len(text)}]"

    documents: Any = SimpleNamespace(mark_soon=mark_soon)
    settings = HttpSettings(max_image_bytes=100, max_document_bytes=5000, max_images_per_request=2)
    limited = MediaResolver(settings, files, VectorStores(files), documents)
    text, larger, blob = (
        {"type": "file", "file": {"file_data": f"data:;base64,{base64.b64encode(data).decode()}"}}
        for data in (b"x" * 5000, b"x" * 5001, b"\0")
    )
    (message,) = await limited.resolve_messages(ask(text), "local")
    assert [part["text"] for part in message["content"]] == ["[5000]"]
    with pytest.raises(TooLarge, match="5001 bytes, at most 5000"):
        await limited.resolve_messages(ask(larger), "local")
    with pytest.raises(InvalidRequest, match=r"neither an image in a known format .* nor a text file"):
        await limited.resolve_messages(ask(blob), "local")
    with pytest.raises(InvalidRequest, match="more than 2 images and documents"):
        await limited.resolve_messages(ask(text, text, text), "local")


async def test_a_text_uploaded_as_an_image_is_told_where_it_belongs(files: FileStore):
    documents: Any = SimpleNamespace()
    takes_text = MediaResolver(HttpSettings(), files, VectorStores(files), documents)
    with pytest.raises(InvalidRequest, match="purpose 'vision' is for images; upload it as 'user_data'"):
        await takes_text.open_for("vision", b"words", "local", "file")
    assert (await takes_text.open_for("user_data", b"words", "local", "file")).text == "words"
    assert (await takes_text.open_for("vision", png(), "local", "file")).content
    with pytest.raises(InvalidRequest, match="not an image"):
        await resolver(files).open_for("vision", b"words", "local", "file")


async def test_the_first_picture_of_several_is_taken(files: FileStore):
    for kind in ("GIF", "TIFF", "AVIF"):
        buffer = io.BytesIO()
        pages = [Image.new("RGB", (40, 40), colour) for colour in ("red", "lime")]
        pages[0].save(buffer, kind, save_all=True, append_images=pages[1:])
        found = resolver(files).open(buffer.getvalue(), "local", "x").image
        assert found.getpixel((20, 20))[0] > 200, kind


@pytest.mark.parametrize("lazily", [False, True])
async def test_a_deep_image_is_scaled_whenever_it_is_decoded(files: FileStore, lazily: bool):
    half = png16(np.full((8, 8, 1), 128 * 257, np.uint16))
    images = resolver(files)
    if lazily:
        images.open(half, "local", "x")
    (message,) = await images.resolve_messages(ask(image_part(data_url(half))), "local")
    as_vllm_reads_it = convert_image_mode(normalize_image(message["content"][0]["image_pil"]), "RGB")
    assert as_vllm_reads_it.getpixel((0, 0)) == (128, 128, 128)


def test_a_lying_container_is_refused_before_it_is_decoded(files: FileStore, monkeypatch: pytest.MonkeyPatch):
    picture = png(300, 300)
    directory = struct.pack("<HHH", 0, 1, 1) + struct.pack("<BBBBHHII", 8, 8, 0, 0, 1, 32, len(picture), 22)
    monkeypatch.setattr(PngImagePlugin.PngImageFile, "load", pytest.fail)
    with pytest.raises(InvalidRequest, match="part: the image cannot be read: its directory says 8x8 pixels"):
        resolver(files).open(directory + picture, "local", "part")
    avif = bytearray(png(600, 500, kind="AVIF"))
    said = avif.find(b"ispe") + 8
    avif[said : said + 8] = struct.pack(">II", 16, 16)
    with pytest.raises(InvalidRequest, match="its header says 256 pixels, the frames in it have 300000"):
        resolver(files).open(bytes(avif), "local", "part")


def test_a_tiff_that_pillow_does_not_read_is_said_to_be_one(files: FileStore):
    with pytest.raises(InvalidRequest, match="a TIFF in a form that is not read"):
        resolver(files).open(tiff(np.zeros((2, 2, 1), np.float64), 1), "local", "x")


def test_pixels_that_are_no_numbers_are_refused(files: FileStore):
    with pytest.raises(InvalidRequest, match="part: the image has pixels that are not finite numbers"):
        resolver(files).open(tiff(np.full((2, 2, 1), np.nan, np.float32), 1), "local", "part")


async def test_an_image_beyond_the_models_limits_is_refused_before_it_is_decoded(
    files: FileStore, monkeypatch: pytest.MonkeyPatch
):
    def tokens(width: int, height: int) -> int:
        if max(width, height) > 200 * min(width, height):
            raise ValueError(f"aspect ratio {max(width, height) // min(width, height)}")
        return width * height

    limits = ImageLimits(tokens, None, 1, 100, 1_000_000)
    limited = MediaResolver(HttpSettings(), files, VectorStores(files), limits=limits)
    await limited.resolve_messages(ask(image_part(data_url(png(8, 8)))), "local")
    monkeypatch.setattr(pixels, "decode", pytest.fail)
    with pytest.raises(InvalidRequest, match=r"content\[0\]: the model's processor .* 1x300 pixels: aspect ratio 300"):
        await limited.resolve_messages(ask(image_part(data_url(png(1, 300)))), "local")
    with pytest.raises(InvalidRequest, match="10x11 pixels takes 110 tokens; the longest prompt has at most 100"):
        await limited.open_for("vision", png(10, 11), "local", "file")
    parts = [image_part(data_url(png(7, 7, colour))) for colour in ("red", "green", "blue")]
    with pytest.raises(InvalidRequest, match="images take more than 100 tokens, the most that a prompt can hold"):
        await limited.resolve_messages(ask(*parts), "local")


PDF = b"%PDF-1.4\n1 0 obj<</Type/Catalog/Pages 2 0 R>>endobj\ntrailer<</Root 1 0 R>>\n%%EOF\n"


@pytest.mark.parametrize(
    ("data", "kind"),
    [
        (PDF, "a PDF"),
        (b"%PDF-1.7\nwhatever follows", "a PDF"),
        (b"%PDF-1.7\n%\xe2\xe3\xcf\xd3\n\0\xff", "a PDF"),
        (b"\xef\xbb\xbf\n" + PDF, "a PDF"),
        (b"From: a scanner\r\n\r\n" + PDF, "a PDF"),
        (b"x" * 1020 + PDF, "a PDF"),
        (b"%FDF-1.2\n1 0 obj<<>>endobj", "a PDF's form"),
        (b"%!PS-Adobe-3.0\n72 72 moveto (words) show", "PostScript"),
        (b"\xc5\xd0\xd3\xc6\x20\0\0\0", "PostScript"),
        (b"\x1b%-12345X@PJL JOB\n", "a print job"),
        (rb"{\rtf1\ansi words}", "RTF"),
    ],
)
async def test_a_page_description_is_no_text(files: FileStore, data: bytes, kind: str):
    documents: Any = SimpleNamespace()
    takes_text = MediaResolver(HttpSettings(), files, VectorStores(files), documents)
    words = f"{kind}, which is not read yet; render its pages as images"
    stored = files.create("local", "a.txt", "user_data", data)  # as one may have been before it was refused
    inline = {"type": "file", "file": {"file_data": data_url(data)}}
    for part in (inline, {"type": "file", "file": {"file_id": stored.id}}, image_part(data_url(data))):
        with pytest.raises(InvalidRequest, match=words):
            await takes_text.resolve_messages(ask(part), "local")
    for purpose in ("vision", "user_data"):
        with pytest.raises(InvalidRequest, match=words):
            await takes_text.open_for(purpose, data, "local", "file")


@pytest.mark.parametrize("words", [b"A PDF begins with %PDF-1.4, and ends with its trailer.", b"{ rtf }", b"%! comment",
                                   b"x" * 1100 + PDF])  # fmt: skip
async def test_words_about_page_descriptions_are_text(files: FileStore, words: bytes):
    documents: Any = SimpleNamespace()
    takes_text = MediaResolver(HttpSettings(), files, VectorStores(files), documents)
    assert isinstance(await takes_text.open_for("user_data", words, "local", "file"), ResolvedText)


# -- fetching ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "host",
    ["127.0.0.1", "localhost", "10.0.0.1", "192.168.1.1", "169.254.169.254", "[::1]", "[fd00::1]", "0.0.0.0",
     "[::ffff:127.0.0.1]", "2130706433", "100.64.0.1", "[::ffff:100.64.0.1]", "[64:ff9b::a9fe:a9fe]", "[fec0::1]",
     "[2002:a9fe:a9fe::1]", "[::169.254.169.254]", "[ff0e::1]", "224.0.0.1"],
)  # fmt: skip
async def test_private_addresses_are_refused_however_they_are_written(host: str):
    with pytest.raises(InvalidRequest, match=r"not a public address|unknown host"):
        await pinned(f"http://{host}/a.png", "x")


@pytest.mark.parametrize("host", ["93.184.215.14", "[2606:2800:21f:cb07:6820:80da:af6b:8b2c]", "[64:ff9b::5db8:d70e]"])
async def test_public_addresses_are_aimed_at(host: str):
    target, _, _ = await pinned(f"http://{host}/a.png", "x")
    assert target == f"http://{host}:80/a.png"


async def test_a_request_goes_to_the_address_that_was_checked(monkeypatch: pytest.MonkeyPatch):
    answers = iter([["93.184.215.14"], ["127.0.0.1"]])  # a name that changes its mind

    async def getaddrinfo(self, host, port, **options):
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, port)) for address in next(answers)]

    monkeypatch.setattr("asyncio.base_events.BaseEventLoop.getaddrinfo", getaddrinfo)
    target, headers, extensions = await pinned("https://pictures.example/a.png?x=1", "x")
    assert target == "https://93.184.215.14:443/a.png?x=1"
    assert headers == {"Host": "pictures.example"}
    assert extensions == {"sni_hostname": "pictures.example"}


async def test_one_private_address_among_public_ones_is_enough_to_refuse(monkeypatch: pytest.MonkeyPatch):
    async def getaddrinfo(self, host, port, **options):
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (a, port)) for a in ("93.184.215.14", "10.1.2.3")]

    monkeypatch.setattr("asyncio.base_events.BaseEventLoop.getaddrinfo", getaddrinfo)
    with pytest.raises(InvalidRequest, match="not a public address"):
        await pinned("http://pictures.example/a.png", "x")


@pytest.fixture
def web(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A web server on this machine that `pinned` lets through, as if its address were public."""

    class Pictures(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if self.path.startswith("/loop"):
                self.send_response(302)
                self.send_header("Location", "/loop")
                self.end_headers()
                return
            if self.path == "/inside":
                self.send_response(302)
                self.send_header("Location", "http://10.0.0.1/a.png")
                self.end_headers()
                return
            if self.path in ("/nowhere", "/broken"):
                self.send_response(304 if self.path == "/nowhere" else 302)
                if self.path == "/broken":
                    self.send_header("Location", "http://host:port/")
                self.end_headers()
                return
            if self.path in ("/bomb", "/identity"):
                self.send_response(200 if self.headers["Accept-Encoding"] == "identity" else 406)
                self.send_header("Content-Encoding", "gzip, gzip" if self.path == "/bomb" else "identity")
                self.end_headers()
                self.wfile.write(gzip.compress(gzip.compress(bytes(1 << 24))) if self.path == "/bomb" else png())
                return
            if self.path == "/dripping":
                self.send_response(200)
                self.end_headers()
                with suppress(OSError):
                    for _ in range(50):
                        self.wfile.write(b"x")
                        time.sleep(0.1)
                return
            known = {"/a.png": png(), "/big": b"x" * 100_000}
            self.send_response(200 if self.path in known else 404)
            self.end_headers()
            self.wfile.write(known.get(self.path, b""))

        def log_message(self, *arguments: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Pictures)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    own = f"127.0.0.1:{server.server_port}"

    async def lenient(url: str, where: str):
        if own in url:
            return url, {}, {}
        return await pinned(url, where)

    monkeypatch.setattr(fetching, "pinned", lenient)
    yield f"http://{own}"
    server.shutdown()


async def test_an_image_is_fetched_where_that_is_allowed(files: FileStore, web: str):
    allowed = resolver(files, allow_http_images=True)
    for path in ("/a.png", "/identity"):
        (message,) = await allowed.resolve_messages(ask(image_part(web + path)), "local")
        assert message["content"][0]["image_pil"].size == (8, 8)
    from_here = resolver(files, allow_http_images=True, allowed_media_domains=["127.0.0.1"])
    await from_here.resolve_messages(ask(image_part(f"{web}/a.png")), "local")
    elsewhere = resolver(files, allow_http_images=True, allowed_media_domains=["Pictures.Example"])
    with pytest.raises(InvalidRequest, match=r"'127.0.0.1' is not among the hosts .* from: pictures.example \("):
        await elsewhere.resolve_messages(ask(image_part(f"{web}/a.png")), "local")
    with pytest.raises(InvalidRequest, match="not allowed"):
        await resolver(files).resolve_messages(ask(image_part(f"{web}/a.png")), "local")


@pytest.mark.parametrize(
    ("path", "error", "words", "timeout_s"),
    [
        ("/none", InvalidRequest, "404", 30),
        ("/big", TooLarge, "larger than 4096", 30),
        ("/loop", InvalidRequest, "redirects", 30),
        ("/inside", InvalidRequest, "not a public address", 30),
        ("/nowhere", InvalidRequest, "304", 30),
        ("/broken", InvalidRequest, "could not be fetched", 30),
        ("/bomb", InvalidRequest, r"came encoded \(gzip, gzip\)", 30),
        ("/dripping", InvalidRequest, "not fetched within 0.5 s", 0.5),
    ],
)
async def test_a_fetch_that_goes_wrong_says_how(
    files: FileStore, web: str, path: str, error: type[Exception], words: str, timeout_s: float
):
    allowed = resolver(files, allow_http_images=True, max_image_bytes=4096, http_image_timeout_s=timeout_s)
    with pytest.raises(error, match=words):
        await allowed.resolve_messages(ask(image_part(web + path)), "local")


async def test_a_redirect_leads_to_allowed_hosts_only(files: FileStore, web: str):
    only = resolver(files, allow_http_images=True, allowed_media_domains=["127.0.0.1"])
    with pytest.raises(InvalidRequest, match=r"content\[0\]: '10.0.0.1' is not among the hosts"):
        await only.resolve_messages(ask(image_part(web + "/inside")), "local")


@pytest.mark.parametrize("url", ["http://pictures.example.evil.example/", "http://pictures.example@evil.example/",
                                 "http://evil.example/pictures.example", "http://sub.pictures.example/"])  # fmt: skip
async def test_an_allowed_host_is_the_urls_own_and_whole(files: FileStore, url: str):
    only = resolver(files, allow_http_images=True, allowed_media_domains=["pictures.example"])
    with pytest.raises(InvalidRequest, match="is not among the hosts"):
        await only.resolve_messages(ask(image_part(url)), "local")


async def test_an_allowed_host_may_be_written_in_any_case(files: FileStore):
    only = resolver(files, allow_http_images=True, allowed_media_domains=["localhost"])
    with pytest.raises(InvalidRequest, match=r"not a public address|unknown host"):  # allowed so far
        await only.resolve_messages(ask(image_part("http://LOCALHOST./a.png")), "local")


@pytest.mark.parametrize("domain", ["https://pictures.example", "pictures.example/a", "a.example:80 ", "", "*.example"])
def test_an_allowed_host_is_a_name_alone(domain: str):
    with pytest.raises(ValueError, match="not a host's name"):
        HttpSettings(allowed_media_domains=[domain])


@pytest.mark.parametrize("host", ["[bad", "host:99999", "host:x"])
async def test_what_is_no_url_is_refused(host: str):
    with pytest.raises(InvalidRequest, match="not a URL"):
        await pinned(f"http://{host}/a.png", "x")


async def test_an_image_is_turned_alike_whenever_it_comes(files: FileStore):
    buffer, exif = io.BytesIO(), Image.Exif()
    exif[0x0112] = 6  # to be turned by a quarter
    Image.new("RGBA", (20, 10), (1, 2, 3, 128)).save(buffer, "PNG", exif=exif)
    images = resolver(files)
    first, second = (images.open(buffer.getvalue(), "local", "x").image for _ in range(2))
    assert normalize_image(first).size == normalize_image(second).size == (10, 20)


async def test_the_parts_of_a_request_are_fetched_beside_one_another(files: FileStore, monkeypatch: pytest.MonkeyPatch):
    together = threading.Barrier(4, timeout=10)
    content = files.content
    monkeypatch.setattr(files, "content", lambda *which: together.wait() >= 0 and content(*which))
    colours = ("red", "green", "blue", "black")
    uploads = [files.create("local", "a.png", "vision", png(colour=colour)) for colour in colours]
    parts = [{"type": "file", "file": {"file_id": upload.id}} for upload in uploads]
    (message,) = await resolver(files).resolve_messages(ask(*parts), "local")
    assert [part["uuid"] for part in message["content"]] == [upload.content for upload in uploads]


async def test_documents_beyond_the_longest_prompt_are_refused_before_they_are_read(files: FileStore):
    marked: list[str] = []

    async def mark_soon(content: str, text: str) -> str:
        marked.append(text)
        return "[mark]"

    documents: Any = SimpleNamespace(mark_soon=mark_soon)
    bounded = MediaResolver(HttpSettings(), files, VectorStores(files), documents, max_characters=9)
    names = [files.create("local", "page.txt", "user_data", text).id for text in (b"four", b"fives", b"!")]
    parts = [{"type": "file", "file": {"file_id": name}} for name in names]
    (message,) = await bounded.resolve_messages(ask(*parts[:2]), "local")
    assert [part["text"] for part in message["content"]] == ["[mark]", "[mark]"]
    with pytest.raises(TooLarge, match="more than 9 characters"):
        await bounded.resolve_messages(ask(*parts), "local")
    assert len(marked) <= 4, "the one that is too much is not tokenised"
