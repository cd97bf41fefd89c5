"""Patch compiler replicas: deficits to patches, off the request path."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from serving.config import OrbitServeConfig
from serving.replicas.process import enter

if TYPE_CHECKING:
    from prefill_workers.patches.patch_compiler import PatchJob


class PatchCompiler:
    """Compiler role: deficits to stored patches. Of all roles the one that gives way on CPUs."""

    def __init__(self, config: OrbitServeConfig) -> None:
        enter(config.patch)
        from kvstore.deletions import Deletions

        self._settings = config
        self._compilers: dict[str, Any] = {}
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="compile")
        self._deletions = Deletions(config.library.deletion_grace_s)  # also before the first library is open
        self._queued = 0

    async def compile(self, job: PatchJob) -> None:
        """Form and store one patch."""
        self._queued += 1
        try:
            await asyncio.get_running_loop().run_in_executor(self._thread, self._compile, job)
        finally:
            self._queued -= 1

    def _compile(self, job: PatchJob) -> None:
        from kvstore.library import Library
        from prefill_workers.patches.patch_compiler import PatchCompiler as Compiler
        from prefill_workers.patches.patch_compiler import load_form

        compiler = self._compilers.get(job.fingerprint)
        if compiler is None:
            library = Library(self._settings.library, job.fingerprint, deletions=self._deletions)
            settings = self._settings.patch
            device = "cuda" if settings.num_gpus else "cpu"
            try:
                compiler = Compiler(library, load_form(settings, library), settings.pool_basis, device)
            except BaseException:
                library.close()
                raise
            self._compilers[job.fingerprint] = compiler
        compiler.compile(job)

    async def forget(self, content: str, tenant: str) -> None:
        """Drop deleted content from this process.

        From its memory, from what it has not written yet, and from what is formed of deficits that wait already.
        """
        self._deletions.note(content, tenant)
        self._thread.submit(self._delete, content, tenant)
        await asyncio.to_thread(self._delete, content, tenant)

    def _delete(self, content: str, tenant: str) -> None:
        for compiler in list(self._compilers.values()):
            compiler.library.delete_content(content, tenant)

    async def flush(self) -> int:
        """Wait until everything queued is stored; returns how many patches were formed."""
        while self._queued:
            await asyncio.sleep(0.01)
        for compiler in self._compilers.values():
            await asyncio.to_thread(compiler.library.flush)
        return sum(compiler.formed for compiler in self._compilers.values())

    def __del__(self) -> None:
        for compiler in getattr(self, "_compilers", {}).values():
            compiler.library.close()
