"""Deficits wait for the patch compiler in bounded memory."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

from serving.replicas.patch_queue import PatchQueue


def job(nbytes: int, key: str = "key") -> Any:
    return SimpleNamespace(key=key, delta=SimpleNamespace(nbytes=nbytes))


class Compiler:
    """Answers when it is told to."""

    def __init__(self) -> None:
        self.go_on, self.formed = asyncio.Event(), list[str]()

    async def compile(self, job: Any) -> None:
        await self.go_on.wait()
        if job.key == "wrong":
            raise RuntimeError("injected")
        self.formed.append(job.key)


async def until_empty(deficits: PatchQueue) -> None:
    async with asyncio.timeout(10):
        while deficits:
            await asyncio.sleep(0)


async def test_no_more_wait_than_may_by_number_and_by_bytes():
    for most, most_bytes in ((2, 1000), (10, 25)):
        compiler = Compiler()
        deficits = PatchQueue(compiler.compile, most, most_bytes)
        assert [deficits.submit(job(10, key)) for key in "abc"] == [True, True, False]
        assert (len(deficits), deficits.dropped) == (2, 1)
        compiler.go_on.set()
        await until_empty(deficits)
        deficits.submit(job(10, "d"))
        await until_empty(deficits)
        assert (compiler.formed, deficits.dropped) == (["a", "b", "d"], 1)


async def test_it_is_crowded_when_more_than_half_of_the_room_is_taken():
    for most, most_bytes in ((4, 1000), (100, 40)):
        compiler = Compiler()
        deficits, crowded = PatchQueue(compiler.compile, most, most_bytes), []
        for key in "abc":
            deficits.submit(job(10, key))
            crowded.append(deficits.is_crowded)
        assert crowded == [False, False, True]
        compiler.go_on.set()
        await until_empty(deficits)
        assert not deficits.is_crowded


async def test_one_may_wait_however_large():
    compiler = Compiler()
    deficits = PatchQueue(compiler.compile, 10, 25)
    deficits.submit(job(100, "large"))
    deficits.submit(job(1, "small"))
    compiler.go_on.set()
    await until_empty(deficits)
    assert (compiler.formed, deficits.dropped) == (["large"], 1)


async def test_one_that_cannot_be_formed_is_dropped_and_gives_its_place_back():
    compiler = Compiler()
    compiler.go_on.set()
    deficits = PatchQueue(compiler.compile, 1, 10)
    for key in ("wrong", "right"):
        deficits.submit(job(10, key))
        await until_empty(deficits)
    assert (compiler.formed, deficits.dropped) == (["right"], 1)
