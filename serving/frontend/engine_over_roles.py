"""The part of vLLM's engine protocol that says nothing of prompts."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from vllm.engine.protocol import EngineClient
from vllm.exceptions import VLLMValidationError
from vllm.tasks import SupportedTask

from serving.frontend.roles import Roles


def _unsupported(name: str) -> Any:
    async def method(self: EngineClient, *arguments: Any, **options: Any) -> Any:
        raise VLLMValidationError(f"{name} is not available: the engines belong to the decode and prefill roles")

    return method


# What vLLM's protocol asks of an engine that owns its weights and cache; ours are spread over replicas.
_NotOurs: Any = type(EngineClient)(
    "_NotOurs",
    (EngineClient,),
    {
        name: _unsupported(name)
        for name in [
            "encode",
            "start_profile",
            "stop_profile",
            "reset_encoder_cache",
            "reset_prefix_cache",
            "sleep",
            "wake_up",
            "release_kv_cache_memory",
            "is_sleeping",
            "add_lora",
            "pause_generation",
            "resume_generation",
            "is_paused",
        ]
    },
)


class EngineOverRoles(_NotOurs):
    """Health, statistics and caches of an engine whose parts are roles."""

    _roles: Roles

    @property
    def roles(self) -> Roles:
        """The roles behind this client."""
        return self._roles

    async def get_supported_tasks(self) -> tuple[SupportedTask, ...]:
        """Tasks of this engine: it generates text."""
        return ("generate",)

    # No engine of its own could die: what fails is a role, and `check_health` tells of that.
    is_running, is_stopped, errored = True, False, False

    @property
    def dead_error(self) -> BaseException:
        """Nothing asks for it while `errored` is False."""
        return RuntimeError("the engine is running")

    async def check_health(self) -> None:
        """Raise RoleUnavailable when a role has no healthy replica."""
        await self._roles.check_health()

    async def abort(self, request_id: str | Iterable[str]) -> None:
        """Do nothing: requests end when their output stream is closed."""

    async def notify_kv_transfer_request_rejected(
        self, request_id: str, kv_transfer_params: dict[str, Any], *, data_parallel_rank: int | None = None
    ) -> None:
        """Do nothing: clients do not choose transfers here."""

    async def is_tracing_enabled(self) -> bool:
        return False

    async def do_log_stats(self) -> None:
        """Do nothing: workers report their own statistics."""

    async def reset_mm_cache(self) -> None:
        """Forget processed images."""
        await self.renderer.clear_mm_cache_async()

    def shutdown(self, timeout: float | None = None) -> None:
        """Stop the renderer's threads."""
        self.renderer.shutdown()
