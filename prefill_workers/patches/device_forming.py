"""Forming of patches in a prefill worker's process, on its GPU.

No deficit leaves the process.
"""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor

from prefill_workers.patches.patch_compiler import PatchCompiler, PatchJob


class DeviceForming:
    """A patch compiler with a thread of its own, beside the one that drives the engine.

    On a GPU it computes on a stream of its own, so that forwards do not stand behind it; of all streams' priorities
    that is the lowest.
    """

    def __init__(self, compiler: PatchCompiler) -> None:
        self._compiler = compiler
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="form")

    async def compile(self, job: PatchJob) -> None:
        """Form and store one patch, after those that were given before."""
        await asyncio.get_running_loop().run_in_executor(self._thread, self._compiler.compile, job)

    def forget(self, content: str, tenant: str) -> None:
        """Delete what is formed of deleted content's deficits that wait already; returns at once."""
        self._thread.submit(self._compiler.library.delete_content, content, tenant)

    def close(self) -> None:
        """Form no more; ends with the patch at hand."""
        self._thread.shutdown(cancel_futures=True)
