"""The roles that the front end calls, as protocols."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Collection, Mapping, Sequence
from typing import Any, Protocol

from vllm.multimodal.inputs import MultiModalKwargsItem
from vllm.outputs import RequestOutput
from vllm.sampling_params import SamplingParams

from prefill_workers.background.patch_precompiler import CompileStats
from prefill_workers.fidelity.monitor import PointStatus
from prefill_workers.modes import OperatingPoint
from prefill_workers.protocol import (
    LeaseState,
    LinkRequest,
    LinkResult,
    LoadBearing,
    PrefetchRequest,
    SessionInfo,
    SessionStats,
)

ByReplica = Mapping[str, Sequence[PointStatus]]


class FidelityRoles(Protocol):
    """Roles behind the fidelity routes. Raise RoleUnavailable when a replica does not answer."""

    async def fidelity(self) -> ByReplica:
        """Measurements of every prefill replica, by its name."""

    async def allow(self, point: OperatingPoint) -> int:
        """Allow an operating point; returns on how many prefill replicas it was disabled."""


class CompilingRoles(Protocol):
    """Prefill role, as far as it compiles ahead."""

    async def compiled(self) -> Mapping[str, CompileStats]:
        """Compile statistics by prefill replica. Raises RoleUnavailable when one does not answer."""


class SessionRoles(Protocol):
    """Prefill role, as far as it keeps sessions.

    Raise RoleUnavailable when a replica does not answer.
    """

    async def sessions(self, tenant: str) -> Sequence[SessionInfo]:
        """A tenant's sessions, as each prefill replica that has served them knows them."""

    async def session(self, tenant: str, session: str) -> Sequence[SessionInfo]:
        """One session of a tenant, as each replica, or else the library, knows it."""

    async def delete_session(self, tenant: str, session: str) -> bool:
        """Delete a session and its records; False if there was none.

        Raises StoreError if a tier cannot be reached.
        """

    async def session_stats(self) -> Mapping[str, SessionStats]:
        """Statistics of sessions by prefill replica."""


class LoadBearingRoles(Protocol):
    """Prefill role, as far as it measures load-bearing chunks."""

    async def load_bearing(self, tenant: str, request_id: str) -> Sequence[LoadBearing]:
        """Measurements of a tenant's request, of each prefill replica that has linked it.

        Raises RoleUnavailable when one does not answer.
        """


class Roles(FidelityRoles, CompilingRoles, SessionRoles, LoadBearingRoles, Protocol):
    """All other roles, as the ingress calls them.

    | primitive  | role           | raises                                                    |
    |------------|----------------|-----------------------------------------------------------|
    | `prefetch` | prefill worker | nothing: best effort                                      |
    | `encode`   | vision encoder | RoleUnavailable                                           |
    | `link`     | prefill worker | PixelsNeeded, Overloaded, PromptTooLarge, RoleUnavailable |
    | `generate` | decode worker  | VLLMClientError (request too large), RoleUnavailable      |
    | `renew`    | prefill worker | nothing: unknown if nobody tells                          |
    | `keep_answer` | prefill worker | nothing: best effort                                   |
    | `abandon`  | decode worker  | nothing: best effort, leases end by time-out              |
    | `fidelity`, `allow`, `compiled` | prefill workers, all of them | RoleUnavailable |
    | `sessions`, `session`, `delete_session`, `session_stats` | prefill workers, all of them | RoleUnavailable |
    | `load_bearing` | prefill workers, all of them | RoleUnavailable |
    """

    async def prefetch(self, request: PrefetchRequest) -> Collection[str]:
        """Start loading for a prompt on its way; returns the images of which nothing is stored."""

    async def encode(self, items: Sequence[tuple[str, MultiModalKwargsItem]]) -> Sequence[Any]:
        """Embeddings of each processed image, in whatever form `link` of the same object accepts.

        Without vision encoders the images themselves: prefill workers encode what they link.
        """

    async def link(self, request: LinkRequest, indices: Sequence[int], embeddings: Sequence[Any]) -> LinkResult:
        """Link a request; `embeddings` (from `encode`) belong to the chunks at `indices`."""

    def generate(
        self, token_ids: list[int], transfer: dict[str, Any], params: SamplingParams, request_id: str, **options: Any
    ) -> AsyncGenerator[RequestOutput, None]:
        """Stream a decode engine's outputs for a linked prompt."""

    async def renew(self, lease: str) -> LeaseState:
        """Renew the lease on linked KV. Returns what the worker knows of it."""

    async def keep_answer(self, lease: str, token_ids: Sequence[int], offer: Mapping[str, Any] | None = None) -> None:
        """Let the worker that linked a prompt keep its answer's KV, which a decode worker may offer."""

    async def abandon(self, transfer: dict[str, Any], readers: int) -> None:
        """Let the prefill worker free the linked KV's blocks, which will not be read."""

    async def check_health(self) -> None:
        """Raise RoleUnavailable when a role has no healthy replica."""
