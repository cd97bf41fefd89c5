"""The prefill engine: vLLM's executor with our worker extension.

vLLM loads the model, sizes and registers the KV pool and runs the kernels; only `self_check` uses its scheduler.
Everything afterwards goes through `worker_extension.WorkerExtension`, on blocks that `block_pool.BlockPool` owns.

Checked on vLLM 0.32.0; `worker_extension` names the other files that know its internals.
"""

from __future__ import annotations

import math
import os
from collections.abc import Container, Iterator, Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from vllm import LLM, SamplingParams
from vllm.config import CompilationMode
from vllm.multimodal.inputs import MultiModalFeatureSpec, MultiModalKwargsItem, PlaceholderRange

from infra.cpu import openmp
from infra.gpu import uses_gpu
from infra.nixl_handshake import shake_hands
from infra.vllm_arguments import hand_off_arguments, shared_tensors
from infra.vllm_env import BLOCK_SIZE, NIXL_HOST
from infra.vllm_plugin import NIXL_PORT
from kvstore.operator.device_kernel import Placement
from kvstore.operator.layout import Layout
from kvstore.operator.rotary import RotaryScheme
from kvstore.records.keys import embedding_key
from prefill_workers.compaction.plan import CompactionPlan
from prefill_workers.engine.attention_layers import UnsupportedEngine
from prefill_workers.engine.batch import Attending, Observing, RunBatch, assemble
from prefill_workers.engine.device_timer import DeviceSpan
from prefill_workers.engine.fingerprint import fingerprint, precision
from prefill_workers.engine.image_batches import Pixels, handfuls
from prefill_workers.engine.lazy_attention import leaders_of
from prefill_workers.engine.rank_calls import RankCalls
from prefill_workers.engine.spec import EngineSpec
from prefill_workers.engine.transfer_notes import EndedPulls, ReadNotes
from prefill_workers.engine.worker_extension import LayerSource
from prefill_workers.model_card import measured
from prefill_workers.sequence import LinkSequence, Run

_PIXELS_OF_TOKEN = 3 * 28 * 28  # numbers of an image behind one of its tokens: four patches of 14 x 14, as most have


def engine_arguments(spec: EngineSpec) -> dict[str, Any]:
    """vLLM's arguments of a prefill or vision engine."""
    return {
        **spec.arguments(),
        **_graphs(spec),
        **shared_tensors(spec.tensor_parallel_size),
        "max_num_seqs": 2,  # vLLM's own scheduler only serves the self-check
        "max_num_batched_tokens": max(spec.max_batch_tokens, 2048),
        "worker_extension_cls": "prefill_workers.engine.worker_extension.WorkerExtension",
        **(hand_off_arguments() if spec.hand_off else {}),
        **({"mm_encoder_only": True} if spec.encoder_only else {}),
    }


def _graphs(spec: EngineSpec) -> dict[str, Any]:
    """Arguments that have vLLM capture forwards of these lengths as CUDA graphs between their attentions.

    The kernels are those of eager forwards: what else runs, of longer forwards or while KV comes in, is as fast and
    rounds as these do.
    """
    if not spec.buckets or spec.encoder_only or not uses_gpu():
        return {"enforce_eager": True}
    return {
        "enforce_eager": False,
        "compilation_config": {
            "mode": CompilationMode.VLLM_COMPILE,
            "backend": "eager",
            "custom_ops": ["all"],
            "cudagraph_mode": "PIECEWISE",
            "cudagraph_capture_sizes": list(spec.buckets),
        },
    }


def layout_of(facts: Mapping[str, Any]) -> Layout:
    """The layout of the model that a worker described."""
    rotary = RotaryScheme(tuple(facts["inverse_frequencies"]), facts["rotary_style"])
    if facts["family"] == "mla":
        return Layout.mla(facts["layers"], facts["latent"], facts["k_pe"], rotary)
    return Layout.gqa(facts["layers"], facts["kv_heads"], facts["head_size"], rotary)


def check_hand_off(layout: Layout, prefill_ranks: int, decode_ranks: int) -> None:
    """Check that a decode engine of so many ranks can notify every rank of a prefill engine.

    Of ranks that hold the same KV heads vLLM reads from one, and leaves the others without a word (but for MLA).

    Raises:
        UnsupportedEngine: it cannot.
    """
    heads = layout.segments[0].heads
    if not _notifies_all(layout, decode_ranks, prefill_ranks):
        raise UnsupportedEngine(
            f"prefill.tensor_parallel_size: {prefill_ranks} ranks hold copies of {heads} KV heads, and "
            f"decode.tensor_parallel_size: {decode_ranks} would read from some of them only; use at most {heads} for "
            f"prefill, or at least {prefill_ranks} for decode"
        )


def may_read_answers(layout: Layout, prefill_ranks: int, decode_ranks: int) -> bool:
    """True if a prefill engine can notify every rank of a decode engine.

    See `check_hand_off`, for the other direction.
    """
    return _notifies_all(layout, prefill_ranks, decode_ranks)


def _notifies_all(layout: Layout, readers: int, read: int) -> bool:
    return layout.family == "mla" or readers >= read or read <= layout.segments[0].heads


class PrefillEngine:
    """One model on one worker group.

    One thread drives it (see `scheduler.prefill_loop.PrefillLoop`); any may ask for `positions`.
    """

    def __init__(self, spec: EngineSpec) -> None:
        self.spec = spec
        self._llm = LLM(**engine_arguments(spec))
        self._calls = RankCalls(self._llm, spec.tensor_parallel_size)
        self.forward_span: DeviceSpan | None = None  # of the latest forward; None: on a CPU, whose clock tells
        self.tokens_forwarded = 0  # by forwards through all layers
        config = self._llm.llm_engine.vllm_config
        self.config = config
        self.max_model_len: int = config.model_config.max_model_len
        self.fingerprint = fingerprint(Path(spec.model), spec.load_format)
        if spec.encoder_only:
            return
        facts = self._call("describe")
        self.block_size: int = facts["block_size"]
        self.num_blocks: int = facts["blocks"]
        self.dtype: torch.dtype = getattr(torch, facts["dtype"])
        self.uses_mrope: bool = facts["uses_mrope"]
        self.tells_attention: bool = facts["tells_attention"]  # whether `attend_first` can be asked
        self.not_compactable: str | None = facts["not_compactable"]  # why `compact` must not be asked
        self._calls.times_on_device = facts["times_on_device"]
        self.quantum: float = facts["quantum"]  # relative step of KV kept in fewer bits; else 0
        self._is_lazy = False
        self.layout = layout_of(facts)
        self._ranks = [self.layout.share(rank, spec.tensor_parallel_size) for rank in range(spec.tensor_parallel_size)]
        self._notes = ReadNotes(spec.tensor_parallel_size)
        self._pulls = EndedPulls(spec.tensor_parallel_size)
        self.places_on_device: bool = all(
            self._call_all("learn_pages", self.layout, self.num_blocks - 1, spec.device_bytes)
        )
        card = measured(Path(spec.model))
        if card is not None and card.lazy_blocks:
            self.set_lazy(card.lazy_blocks)

    @property
    def precision(self) -> str:
        """See `fingerprint.precision`."""
        return precision(self._dtype_name, self.config.cache_config.cache_dtype)

    def embedding_key(self, content: str) -> str:
        """Key of a chunk's vision embeddings in this model's dtype."""
        return embedding_key(self.fingerprint, content, self._dtype_name)

    @property
    def _dtype_name(self) -> str:
        return str(self.dtype).removeprefix("torch.")

    @property
    def is_silent(self) -> bool:
        """True once a rank does not answer any more, for good."""
        return self._calls.silent

    @property
    def has_quantised_kv(self) -> bool:
        """True if the pages hold KV in fewer bits than it is read in."""
        return self.quantum > 0

    @property
    def _buckets(self) -> Sequence[int]:
        """Lengths of whole forwards; none while layers share keys, which hooks do, that graphs know nothing of."""
        return () if self._is_lazy else self.spec.buckets

    # -- primitives ---------------------------------------------------------------------------------------------------

    def forward(
        self,
        work: Sequence[tuple[LinkSequence, Sequence[Run]]],
        arriving: Sequence[LayerSource] = (),
        deadline: float = 0.0,
        ends: Sequence[int] = (),
        observed: Sequence[Observing] = (),
    ) -> Tensor | None:
        """Run one forward over several sequences: compute and store the KV of their tokens.

        Args:
            arriving: KV to be written by the same forward, each layer before it is attended to; only if
                `accepts_layerwise_kv`. `deadline` (monotonic seconds) is until when the forward waits for layers.
            ends: sequences (indices into `work`, ascending) whose next token is asked for.
            observed: tokens whose attention `compact` goes by.

        Returns:
            Logits [len(ends), vocabulary] fp32 of the last tokens computed of these; None if there are none.
        """
        rows = [row - 1 for row in accumulate(len(runs) for _, runs in work)]
        last = [rows[i] for i in ends]
        extra: tuple[Any, ...] = (arriving, deadline) if arriving else ()
        if observed:
            extra = (arriving, deadline, None, None, observed)
        batch = assemble(work, self.block_size)
        if self._calls.times_on_device and self.layout.family == "mla" and not observed:
            batch, last = batch.short_first(last)
        if ends and not (arriving or observed):
            batch = batch.padded(self._buckets)
        self.tokens_forwarded += len(batch.index)
        logits, self.forward_span = self._calls.timed("forward_runs", batch, last, *extra, tokens=len(batch.index))
        self._calls.note_times()
        return logits

    def forward_first(self, work: Sequence[tuple[LinkSequence, Sequence[Run]]], layers: int) -> None:
        """`forward` through the first `layers` layers only: the others' KV stays what it was."""
        self._call("forward_runs", assemble(work, self.block_size), (), (), 0.0, layers)

    def attend_first(
        self, work: Sequence[tuple[LinkSequence, Sequence[Run]]], asked: Sequence[Attending]
    ) -> list[Tensor]:
        """Compute the first layer's KV of the runs; attention of the tokens `asked` there.

        Returns:
            `attention_shares` over all heads, [2, others, tokens] fp32, of each that is asked.
        """
        ranks = self._call_all("attend_first", assemble(work, self.block_size), asked)
        return [torch.stack(parts).sum(0) for parts in zip(*ranks, strict=True)]

    def first_attention_gap(self, batch: RunBatch) -> float:
        """Relative gap of the first layer's attention to that of its queries and stored KV.

        Of the worst rank. `batch`: one sequence from its first token on, in one run. Its KV is stored meanwhile, of two
        layers.
        """
        return max(self._call_all("first_attention_gap", batch))

    def vllm_logprobs(self, token_ids: list[int], count: int) -> dict[int, float]:
        """Log-probabilities of the `count` likeliest next tokens, by vLLM's own scheduler.

        To be asked before anything is served.
        """
        sampling = SamplingParams(max_tokens=1, temperature=0, logprobs=count, detokenize=False)
        (answer,) = self._llm.generate([{"prompt_token_ids": token_ids}], sampling, use_tqdm=False)
        return {token: entry.logprob for token, entry in answer.outputs[0].logprobs[0].items()}

    @property
    def accepts_layerwise_kv(self) -> bool:
        """True if a forward can write KV that is still loading: if it runs in this process."""
        return self.spec.tensor_parallel_size == 1

    def logits(
        self,
        work: Sequence[tuple[LinkSequence, Sequence[Run]]],
        arriving: Sequence[LayerSource] = (),
        first: tuple[Sequence[tuple[LinkSequence, Sequence[Run]]], int] | None = None,
    ) -> Tensor:
        """`forward`, and the logits [runs, vocabulary] fp32 of each run's last token.

        For the self-check, tests and benchmarks.

        Args:
            first: in so many layers, the first, the same tokens in the same order are runs of these sequences instead.
        """
        shallow = None if first is None else (assemble(first[0], self.block_size), first[1])
        batch = assemble(work, self.block_size)
        self.tokens_forwarded += len(batch.index)
        if not arriving and shallow is None:
            batch = batch.padded(self._buckets)
        rows = range(len(batch.rows.lengths))
        return self._call("forward_runs", batch, rows, arriving, math.inf, None, shallow)

    def slots(self, blocks: Sequence[int], start: int, stop: int) -> Tensor:
        """Cache slots [stop - start] of the tokens `start` up to `stop` of a sequence."""
        index = torch.arange(start, stop)
        return torch.tensor(blocks)[index // self.block_size] * self.block_size + index % self.block_size

    def write_kv(self, kv: Tensor, slots: Tensor) -> DeviceSpan | None:
        """Store KV [layers, tokens, features] in `slots` [tokens].

        Returns: its time on a device, known once a forward or `finish_writes` has ended.
        """
        return self._calls.timed("write_kv", kv, slots)[1]

    def copy_kv(self, sources: Sequence[int], targets: Sequence[int], tokens: int, shift: int) -> DeviceSpan | None:
        """Copy the KV of the first `tokens` tokens in blocks `sources` to blocks `targets`.

        Keys are turned by `shift` positions. Returns: as `write_kv`.
        """
        return self._calls.timed("copy_kv", list(sources), list(targets), tokens, shift)[1]

    def place(self, chunks: Sequence[Placement]) -> DeviceSpan | None:
        """Relocate, patch and write stored chunks in one launch; only if it `places_on_device`.

        Their KV and patches are in host memory; those of objects that live on may stay on the device too.

        Returns: as `write_kv`.
        """
        if self.spec.tensor_parallel_size > 1:  # what lies in one piece they share, all else is pickled for each
            chunks = [one._replace(kv=one.kv.contiguous()) for one in chunks]
        return self._calls.timed("place", chunks)[1]

    def on_device(self, chunks: Sequence[Tensor]) -> tuple[int, list[bool]] | None:
        """Version of a GPU's copies of stored KV, and which of these it has; from any thread.

        None where none are kept.
        """
        return self._call("on_device", chunks) if self.places_on_device and self.accepts_layerwise_kv else None

    def free_ended(self) -> None:
        """Free a GPU's copies of stored KV that this process' memory has dropped."""
        if self.places_on_device and self.accepts_layerwise_kv:
            self._call("free_ended")

    def finish_writes(self) -> None:
        """Wait until what was written is there for others to read; a forward waits by itself."""
        self._call("finish_writes")
        self._calls.note_times()

    def read_kv(self, blocks: Sequence[int], start: int, count: int, layers: Sequence[int] | None = None) -> Tensor:
        """KV [layers, count, features] of `count` tokens from index `start` of `blocks`' sequence.

        Of the layers named, or of all.
        """
        parts = self._call_all("read_kv", list(blocks), start, count, layers)
        if len(parts) == 1:
            return parts[0]
        whole = torch.empty(*parts[0].shape[:2], self.layout.features, dtype=parts[0].dtype)
        for features, part in zip(self._ranks, parts, strict=True):
            whole[..., features] = part
        return whole

    def compact(self, link: str, blocks: Sequence[int], plan: CompactionPlan, into: Sequence[int]) -> None:
        """Store the KV of `blocks`' sequence in other blocks, in fewer entries, as planned.

        What is important was observed by forwards under the name of `link`; else the last tokens count as that.
        """
        self._call("compact", link, list(blocks), plan, self.slots(into, 0, plan.kept))

    def take_importance(self, link: str) -> Tensor | None:
        """Take the importance [layers, tokens] that forwards have observed under a name."""
        return self._call("take_importance", link)

    def give_importance(self, link: str, scores: Tensor) -> None:
        """Have `compact` go by other importance [layers, tokens]; for measurements."""
        self._call("give_importance", link, scores)

    def set_lazy(self, blocks: Sequence[Sequence[int]], *, shares_all: bool = False) -> None:
        """Have forwards share visual queries and keys within blocks of layers (q_cache.md eq. 7).

        `shares_all`: those of all tokens (eq. 5), which no decode engine could go on from; for measurements.

        Raises:
            UnsupportedEngine: keys and values are one latent, or a layer does not exist.
        """
        if blocks and self.layout.family == "mla":
            raise UnsupportedEngine(
                "lazy_blocks: latent attention keeps keys and values as one latent, which every layer needs for its "
                "values: sharing keys would save nothing"
            )
        if any(layer >= self.layout.layers for block in blocks for layer in block):
            raise UnsupportedEngine(f"lazy_blocks: {list(blocks)} in a model of {self.layout.layers} layers")
        self._call("set_lazy", leaders_of(blocks), shares_all)
        self._is_lazy = bool(blocks)

    def stored_bytes(self, tokens: int) -> int:
        """Bytes that so many tokens' KV takes in the pages of all ranks."""
        cached = torch.int8 if self.has_quantised_kv else self.dtype
        return tokens * self.layout.bytes_per_token(cached)

    def handfuls(self, items: Sequence[Pixels]) -> Iterator[list[Pixels]]:
        """Images in groups for the vision tower, in order, each within a forward's tokens."""
        return handfuls(items, self.spec.max_batch_tokens * _PIXELS_OF_TOKEN)

    def encode(self, items: Sequence[Pixels]) -> list[Tensor]:
        """Embeddings [tokens, hidden] of each image, a handful at a time.

        Often for another thread than the one that computes next: it keeps no threads of OpenMP.
        """
        embeddings = [rows for group in self.handfuls(items) for rows in self._call("encode", group)]
        openmp.release()
        return embeddings

    def poll_handoffs(self, held: Container[str]) -> tuple[list[str], list[str]]:
        """Leases in `held` read by decode engines since the last call (one entry per reader).

        And ids of leases that they wait for.
        """
        return self._notes.take(self._call_all("poll_handoffs"), held)

    def pull_kv(self, name: str, blocks: Sequence[int], offer: Mapping[str, Any]) -> bool:
        """Begin to read KV that a decode engine offers; without blocks, tell it that nobody will.

        `poll_pulls` says under this name that it has ended. False if a handshake comes first.

        Args:
            offer: the decode engine's `kv_transfer_params`, with as many blocks.
        """
        return all(self._call_all("pull_kv", name, list(blocks), dict(offer)))

    def poll_pulls(self) -> tuple[list[str], list[str]]:
        """Names of pulls that have ended on all ranks since the last call: well, and not."""
        return self._pulls.take(self._call_all("poll_pulls"))

    def positions(
        self, token_ids: Sequence[int], items: Sequence[tuple[str, MultiModalKwargsItem, int, int]] = ()
    ) -> tuple[Tensor, int]:
        """Positions of a prompt as the model counts them, and how far the last one lags its index.

        Args:
            items: (modality, item with its grid fields, first placeholder, placeholder count), in prompt order.

        Returns:
            positions [n] or [3, n] int64 and `lag` >= 0: `positions + lag` end on the last token's index.
        """
        if not self.uses_mrope:
            return torch.arange(len(token_ids)), 0
        features = [
            MultiModalFeatureSpec(
                data=item, modality=modality, identifier="", mm_position=PlaceholderRange(offset=offset, length=length)
            )
            for modality, item, offset, length in items
        ]
        positions, delta = self._call("multimodal_positions", list(token_ids), features)
        return positions.long(), -delta

    def transfer_parameters(self, lease: str, blocks: Sequence[int], tokens: int) -> dict[str, Any]:
        """`kv_transfer_params` for a stock decode engine to pull these blocks over NIXL.

        {} without hand-off.
        """
        transfer = self.config.kv_transfer_config
        if transfer is None:
            return {}
        return {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_block_ids": (list(blocks),),
            BLOCK_SIZE: self.block_size,
            "remote_engine_id": transfer.engine_id,
            "remote_request_id": lease,
            "remote_host": os.environ[NIXL_HOST],
            "remote_port": int(os.environ[NIXL_PORT]),
            "tp_size": self.spec.tensor_parallel_size,
            "dcp_size": 1,
            "pp_size": 1,
            "remote_num_tokens": tokens,
            "remote_blocks_expiry_time": None,
            "transfer_mode": "pull",
            "remote_prefill_cached_tokens": 0,
        }

    async def check_handshake(self, seconds: float) -> None:
        """Ask for the metadata of a hand-off as decode engines do; from any thread's event loop.

        Raises:
            TimeoutError: no answer came in time.
        """
        if self.config.kv_transfer_config is not None:
            await shake_hands(os.environ[NIXL_HOST], int(os.environ[NIXL_PORT]), seconds)

    def shutdown(self) -> None:
        """Stop vLLM's executor and free the KV pool."""
        self._llm.llm_engine.engine_core.shutdown()

    def _call(self, method: str, *arguments: Any) -> Any:
        return self._call_all(method, *arguments)[0]

    def _call_all(self, method: str, *arguments: Any) -> list[Any]:
        return self._calls.all(method, *arguments)
