"""The console in a real browser: a PDF goes in, a question cites its page, the next one finds it linked."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest
from client import Service
from pdf_support import pdf
from playwright.sync_api import Page, expect, sync_playwright

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")

pytestmark = [pytest.mark.service, pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed")]

MANUAL = pdf(["Chapter one", "Bolts and nuts"], ["Chapter two", "The gearbox has five speeds"], ["Index"])
ANSWER_MS = 60_000.0


@contextmanager
def console(service: Service) -> Iterator[tuple[Page, list[str]]]:
    """The console's page in headless Chromium, and what goes wrong on it."""
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        page = browser.new_page()
        wrong: list[str] = []
        page.on("pageerror", lambda error: wrong.append(str(error)))
        page.on("console", lambda message: wrong.append(message.text) if message.type == "error" else None)
        page.goto(f"{service.url}/console")
        yield page, wrong
        browser.close()


def test_a_document_is_uploaded_asked_and_its_page_shown(service: Service):
    with console(service) as (page, wrong), ThreadPoolExecutor(1) as thread:
        page.locator("#files").set_input_files({"name": "manual.pdf", "mimeType": "application/pdf", "buffer": MANUAL})
        page.get_by_role("button", name="Upload").click()
        expect(page.locator("#states")).to_have_text("manual.pdf: completed", timeout=ANSWER_MS)

        linked = []
        for question in ("How many speeds has the gearbox?", "Is there a gearbox?"):
            page.locator("#question").fill(question)
            page.locator("#count").fill("1")
            page.get_by_role("button", name="Ask").click()
            expect(page.locator("#linked")).to_contain_text("prompt tokens linked", timeout=ANSWER_MS)
            linked.append(page.locator("#linked").inner_text())
            expect(page.locator("figcaption")).to_contain_text("manual.pdf, page 2")
            assert page.locator("figure img").evaluate("image => image.decode().then(() => image.naturalWidth)") > 0
            thread.submit(service.settle).result()  # Playwright runs an event loop in this one
        assert [told.split(" of ", 1)[0] == "0" for told in linked] == [True, False], linked
        assert wrong == []


def test_what_goes_wrong_is_said_on_the_page(service: Service):
    with console(service) as (page, _):
        page.get_by_role("button", name="Ask").click()
        expect(page.locator("#answer")).to_have_text("Upload a document first.")
        broken = {"name": "broken.pdf", "mimeType": "application/pdf", "buffer": b"%PDF-1.4 no more"}
        page.locator("#files").set_input_files(broken)
        page.get_by_role("button", name="Upload").click()
        expect(page.locator("#states")).to_contain_text("broken.pdf: file: the PDF cannot be read", timeout=ANSWER_MS)
