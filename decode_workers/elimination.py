"""Fixed-point elimination in a stock decode engine, per request (elastic_cache.md 3.3).

Hooks that vLLM 0.32 has for others to use; none of its files is changed:

| hook                                 | here                                                                    |
|--------------------------------------|-------------------------------------------------------------------------|
| `register_backend` over `CPU_ATTN`   | the CPU platform asks for no CUSTOM backend; names and kernels stay     |
| `AttentionBackend.customize_spec`    | KV specs of a kind of their own, as R-SWA has one                       |
| `KVCacheSpecRegistry.register`       | a manager that frees blocks of the gap; the scheduler calls it          |
| `kv_connector_module_path`           | the stock connector, which tells the manager which requests have windows |
| `worker_cls` (`cpu_worker`)          | hands the model runner to the metadata builder                          |

Keys are rotated when they are stored, and a decode step attends to all that its block table names: so the builder
leaves the gap's blocks out of it, and no kernel knows. A request without a window goes the way it would go without all
of this. vLLM sends sampling parameters to its workers, and the window with them (`infra.kv_window`).

Importing this registers all, in an engine core by the connector and in its ranks by the worker.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend
from vllm.v1.attention.backends.mla.cpu_mla import CPUMLABackend
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend
from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager
from vllm.v1.kv_cache_interface import FullAttentionSpec, MLAAttentionSpec
from vllm.v1.kv_cache_spec_registry import KVCacheSpecRegistry

from decode_workers.hand_back import HandBackConnector
from infra.kv_window import gap, window_of

_windows: dict[str, int] = {}  # of requests in this engine core that have one
_runner: Any = None  # of this rank


@dataclasses.dataclass(frozen=True, kw_only=True)
class EliminatingSpec(FullAttentionSpec):
    """KV of which a request may drop blocks behind its prompt."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class EliminatingMLASpec(MLAAttentionSpec):
    """Latents of which a request may drop blocks behind its prompt."""


class EliminatingManager(FullAttentionManager):
    """Block manager that frees the gap of requests with a window."""

    def remove_skipped_blocks(
        self, request_id: str, processed_computed_tokens: int, num_prompt_tokens: int | None = None
    ) -> None:
        """See vLLM's manager.

        Processed tokens are at most those that the builder counts: it leaves out no less.
        """
        window = _windows.get(request_id)
        if window is not None and num_prompt_tokens is not None:
            blocks = gap(num_prompt_tokens, processed_computed_tokens, window, self.block_size)
            self._remove_blocks_in_range(request_id, *blocks)


class EliminatingConnector(HandBackConnector):
    """NIXL connector whose scheduler half notes requests' windows while they last."""

    def on_new_request(self, request: Any) -> None:
        """See vLLM's connector; called before a request's first blocks are allocated."""
        if (window := window_of(request.kv_transfer_params)) is not None:
            _windows[request.request_id] = window
        super().on_new_request(request)

    def request_finished(self, request: Any, block_ids: Any) -> Any:
        """See vLLM's connector; called for aborted requests, too."""
        _windows.pop(request.request_id, None)
        return super().request_finished(request, block_ids)

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> Any:
        """See `request_finished`."""
        _windows.pop(request.request_id, None)
        return super().request_finished_all_groups(request, block_ids)


def serve(runner: Any) -> None:
    """Have metadata builders of this process read requests from a model runner."""
    global _runner
    _runner = runner


def without_gaps(
    tables: Tensor, seq_lens: Tensor, query_lens: Tensor, prompts: Tensor, windows: Tensor, block_size: int
) -> tuple[Tensor, Tensor]:
    """Block tables [rows, blocks] and lengths [rows] without gaps (see `kv_window.gap`).

    Of decode rows: others attend to all.

    Args:
        windows: [rows], -1 where there is none. As `query_lens` and `prompts` of the dtype of `seq_lens`.
    """
    first = (prompts + block_size - 1) // block_size
    stop = torch.maximum(prompts, seq_lens - query_lens - windows) // block_size
    gaps = torch.where((query_lens == 1) & (windows >= 0), (stop - first).clamp_min(0), 0)
    if not bool(gaps.any()):
        return tables, seq_lens
    at = torch.arange(tables.shape[1])[None]
    source = (at + torch.where(at >= first[:, None], gaps[:, None], 0)).clamp_max(tables.shape[1] - 1)
    return tables.gather(1, source.long()), (seq_lens - gaps * block_size).to(seq_lens.dtype)


def _window(state: Any) -> int:
    """Window of a request on a rank; -1: none."""
    extra = (state.sampling_params and state.sampling_params.extra_args) or {}
    window = window_of(extra.get("kv_transfer_params"))
    return -1 if window is None else window


class _Eliminating:
    """Metadata builder that leaves dropped blocks out of decode rows."""

    kv_cache_spec: Any

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> Any:
        """See vLLM's builder."""
        common, count = common_attn_metadata, common_attn_metadata.num_reqs
        states = [_runner.requests[name] for name in _runner.input_batch.req_ids[:count]] if _runner else []
        windows = [_window(state) for state in states]
        if len(windows) == count and max(windows, default=-1) >= 0:  # a dummy run has no requests
            lens = common.seq_lens[:count]
            prompts = torch.tensor([state.num_prompt_tokens for state in states], dtype=lens.dtype)
            queries = common.query_start_loc.diff()[:count].to(lens.dtype)
            size = self.kv_cache_spec.block_size
            given = common.block_table_tensor[:count], lens, queries, prompts, torch.tensor(windows, dtype=lens.dtype)
            tables, lens = without_gaps(*given, size)
            common = dataclasses.replace(
                common,
                block_table_tensor=tables.contiguous(),
                seq_lens=lens.contiguous(),
                max_seq_len=int(lens.max()),
            )
        return super().build(common_prefix_len, common, fast_build)  # type: ignore[misc]


def _eliminating(backend: Any, plain: type, kind: type) -> Any:
    """An attention backend like another, whose layers' KV has a spec of `kind` where it had a `plain` one."""
    builder = type("EliminatingBuilder", (_Eliminating, backend.get_builder_cls()), {})

    class Eliminating(backend):
        """Backend of both names, for handshakes to find it equal."""

        @staticmethod
        def get_builder_cls() -> Any:
            return builder

        @classmethod
        def customize_spec(cls, spec: Any) -> Any:
            if type(spec) is not plain:
                return spec
            return kind(**{field.name: getattr(spec, field.name) for field in dataclasses.fields(plain)})

    return Eliminating


CPUEliminatingBackend = _eliminating(CPUAttentionBackend, FullAttentionSpec, EliminatingSpec)
CPUMLAEliminatingBackend = _eliminating(CPUMLABackend, MLAAttentionSpec, EliminatingMLASpec)

KVCacheSpecRegistry._ensure_registered()  # fills an empty registry alone: ours come second
KVCacheSpecRegistry.register(EliminatingSpec, EliminatingManager, FullAttentionSpec)
KVCacheSpecRegistry.register(EliminatingMLASpec, EliminatingManager, FullAttentionSpec)
register_backend(AttentionBackendEnum.CPU_ATTN, f"{__name__}.CPUEliminatingBackend")
register_backend(AttentionBackendEnum.CPU_MLA, f"{__name__}.CPUMLAEliminatingBackend")
