"""Forward over runs: the vLLM worker extension behind the linker.

A *run* is a contiguous stretch of one sequence that has to be computed; what lies between runs is KV that already
sits in the sequence's blocks. Every run becomes one row of the attention batch, all rows of a sequence share its block
table, and a row's sequence length is its run's end. Each layer writes the keys and values of all runs before it
attends, so one forward gives exactly what a full prefill would, with no kernel change.

| primitive              | what it does                                                            |
|------------------------|-------------------------------------------------------------------------|
| `answer`               | calls one of the others: what it gives, or the error that it raised     |
| `timed`                | calls one of the others, and times it on the device                     |
| `take_times`           | what timed calls took on the device                                     |
| `describe`             | shapes, block size, rotary frequencies: plain values                    |
| `learn_pages`          | takes this rank's share of the layout, finds how a block stores a token |
| `forward_runs`         | one forward over several sequences' runs, all layers or the first       |
| `attend_first`         | the first layer's KV of runs, and how some tokens attend there          |
| `first_attention_gap`  | how far that is from the attention that the layer itself computes       |
| `write_kv`             | a linked chunk into blocks, through the backend's own update op         |
| `copy_kv`              | blocks' KV into other blocks, its keys turned by so many positions      |
| `place`                | the same for canonical KV and patches, by one kernel on a device        |
| `on_device`            | which stored KV the device has copies of                                |
| `free_ended`           | device memory of stored KV that host memory has dropped                 |
| `finish_writes`        | waits until what was written is there for others to read                |
| `read_kv`              | a chunk's KV out of blocks, through the learned page layout             |
| `compact`              | a sequence's KV into other blocks, in fewer entries                     |
| `take_importance`      | what forwards observed of a link's tokens, by which `compact` goes      |
| `give_importance`      | other such numbers, for `compact` to go by                              |
| `set_lazy`             | layers that share visual queries and keys from now on                   |
| `encode`               | pixels to embeddings                                                    |
| `multimodal_positions` | M-RoPE positions of a prompt                                            |
| `poll_handoffs`        | leases that decode engines have read, or still wait for                 |
| `pull_kv`              | a decode engine's KV into blocks, by vLLM's own NIXL connector          |
| `poll_pulls`           | such pulls that have ended                                              |

Checked on vLLM 0.32.0. What knows vLLM's internals is in this folder: this file, `attention_layers`, `engine`,
`graphs`, `compactor`, `lazy_attention`, `transfers`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from functools import cached_property, partial
from typing import Any, Protocol

import torch
from torch import Tensor
from vllm.distributed import get_tensor_model_parallel_rank, get_tensor_model_parallel_world_size
from vllm.forward_context import set_forward_context
from vllm.multimodal.inputs import MultiModalKwargsItem
from vllm.multimodal.utils import group_and_batch_mm_kwargs
from vllm.v1.attention.backend import CommonAttentionMetadata

from infra.cpu import openmp
from kvstore.operator.device_kernel import Placement
from kvstore.operator.layout import Layout
from prefill_workers.compaction.plan import CompactionPlan
from prefill_workers.engine.attention import attended, paid_to
from prefill_workers.engine.attention_layers import AttentionLayers, UnsupportedEngine
from prefill_workers.engine.batch import Attending, Observing, Rows, RunBatch
from prefill_workers.engine.compactor import Compactor
from prefill_workers.engine.device_timer import DeviceTimer
from prefill_workers.engine.graphs import captured_as, in_static_buffers
from prefill_workers.engine.kv_blocks import KVBlocks
from prefill_workers.engine.lazy_attention import LazyAttention
from prefill_workers.engine.rank_errors import Failure, portable
from prefill_workers.engine.transfers import HandOffs

logger = logging.getLogger(__name__)


class LayerSource(Protocol):
    """KV of a chunk that comes in layer by layer (`link.layerwise_load.LayerwiseLoad`)."""

    @property
    def slots(self) -> Tensor:
        """Slots [tokens] int64 of the chunk's KV."""

    def layer(self, index: int, deadline: float) -> Tensor | None:
        """Rows [tokens, features] of a layer, waited for; None if it is not there at `deadline`."""

    def stored(self, index: int, deadline: float) -> Placement | None:
        """`layer` before it is relocated and patched: KV [1, tokens, features], in host memory."""


class WorkerExtension(HandOffs):
    """Methods added to vLLM's worker (`worker_extension_cls`), called by `collective_rpc`."""

    model_runner: Any

    def answer(self, method: str, *arguments: Any) -> Any:
        """A method's result, or a `Failure`; raises nothing.

        vLLM's executor of several ranks stops at the first that raises, and takes what the others answered for their
        answers to the next call.
        """
        try:
            return getattr(self, method)(*arguments)
        except Exception as error:
            if get_tensor_model_parallel_world_size() == 1:
                return Failure(error)
            logger.exception("%s failed on rank %d", method, get_tensor_model_parallel_rank())
            return Failure(portable(error))

    def timed(self, number: int, method: str, *arguments: Any) -> Any:
        """A method's result; `take_times` will tell under this number what it took on the device."""
        with self._timer.span(number):
            return getattr(self, method)(*arguments)

    def take_times(self) -> dict[int, float]:
        """Seconds of timed calls that have ended on the device since this was last asked, by number."""
        return self._timer.take()

    def describe(self) -> dict[str, Any]:
        """Plain values that fix the model's layout; equal on every rank.

        Raises:
            UnsupportedEngine: layers that keep KV in different ways, a rotary embedding that is no plain rotation, a
                quantised cache of an unknown kind, images whose tokens attend to later ones, or blocks that the backend
                cuts up.
        """
        runner, spec = self.model_runner, self._attention.group.kv_cache_spec
        model = runner.vllm_config.model_config
        if model.is_mm_prefix_lm:
            raise UnsupportedEngine("an image's tokens attend to the later ones of it: no run of them stands alone")
        if self._attention.group.kernel_block_size is not None:
            raise UnsupportedEngine(
                f"prefill.block_size: {spec.block_size}: {self._attention.backend} keeps blocks of "
                f"{self._attention.group.kernel_block_size} tokens; use that"
            )
        rotary, first = self._attention.rotary(), self._attention.layer(0)
        facts = {
            "family": "mla" if model.use_mla else "gqa",
            "layers": len(self._attention.names),
            "block_size": spec.block_size,
            "blocks": self._attention.cache(0).shape[0],
            "dtype": str(model.dtype).removeprefix("torch."),
            "quantum": 0.0 if self._attention.quantised is None else torch.finfo(self._attention.quantised).eps,
            "inverse_frequencies": self._attention.inverse_frequencies(rotary),
            "rotary_style": "neox" if rotary.is_neox_style else "interleaved",
            "uses_mrope": bool(model.uses_mrope),
            "tells_attention": self._attention.can_tell_attention,
            "not_compactable": self._compactor.refusal,
            "times_on_device": self._device.type == "cuda",
        }
        if model.use_mla:
            return facts | {"latent": first.kv_lora_rank, "k_pe": first.qk_rope_head_dim}
        return facts | {"kv_heads": model.get_total_num_kv_heads(), "head_size": spec.head_size}

    @torch.inference_mode()
    def learn_pages(self, layout: Layout, block: int, device_bytes: int = 0) -> bool:
        """See `KVBlocks.learn`."""
        rank, ranks = get_tensor_model_parallel_rank(), get_tensor_model_parallel_world_size()
        places = self._kv.learn(layout, block, rank, ranks, device_bytes)
        self._compactor.layout = replace(layout, segments=tuple(self._attention.segments))
        return places

    @torch.inference_mode()
    def forward_runs(
        self,
        batch: RunBatch,
        logits: Sequence[int] = (),
        arriving: Sequence[LayerSource] = (),
        deadline: float = 0.0,
        layers: int | None = None,
        shallow: tuple[RunBatch, int] | None = None,
        observed: Sequence[Observing] = (),
    ) -> Tensor | None:
        """Compute and store the KV of every token in `batch`.

        Args:
            logits: rows whose logits are wanted; only with all layers.
            layers: how many layers run, the first; None: all of them.
            arriving: KV that is stored meanwhile, each layer of it before that layer attends. A layer that is not there
                at `deadline` is left out; its source knows.
            shallow: the same tokens as other rows in other slots, and in how many layers, the first, they are these.
            observed: tokens whose attention tells `compact` what is important.

        Returns:
            Logits [len(logits), vocabulary] fp32 of these rows' last tokens; None without such rows, and on other
            ranks than the first.
        """
        runner = self.model_runner
        ends = None if logits else layers or len(self._attention.names)
        is_hooked = bool(arriving or observed or shallow or self._lazy.leaders)
        captured = None if is_hooked or ends is not None else captured_as(runner, len(batch.slots))
        with self._writing(arriving, deadline), self._compactor.observing(observed):
            hidden = self._walk(batch, ends, shallow, captured=captured)
        scores = None
        if logits:
            (last,) = self._kv.sent(batch.rows.lengths.cumsum(0)[list(logits)] - 1)
            scores = runner.model.compute_logits(hidden[last])  # by all ranks
        if scores is None or get_tensor_model_parallel_rank() != 0:
            self.finish_writes()
            return None
        return scores.float().cpu()

    def _walk(
        self,
        batch: RunBatch,
        ends: int | None,
        shallow: tuple[RunBatch, int] | None = None,
        queries: Callable[[Tensor], object] = lambda _: None,
        captured: Mapping[str, Any] | None = None,
    ) -> Any:
        """One forward of the model.

        `ends`: see `_ending_behind`, as for `queries`; None: it goes to its end. `captured`: see `captured_as`; None:
        it is computed eagerly, so that hooks and what replaces modules' methods are heeded.
        """
        self._consider_others()
        runner, names = self.model_runner, self._attention.names
        first_slots, positions = self._kv.sent(batch.slots, batch.positions)
        slots = dict.fromkeys(names, first_slots)
        metadata = dict.fromkeys(names, self._metadata(self._attention.builder, batch, slots[names[0]]))
        if shallow is not None:
            other, depth = shallow
            slots |= dict.fromkeys(names[:depth], self._kv.sent(other.slots)[0])
            described = self._metadata(self._attention.other_builder, other, slots[names[0]])
            metadata |= dict.fromkeys(names[:depth], described)
        context = set_forward_context(
            metadata,
            runner.vllm_config,
            num_tokens=len(batch.slots),
            slot_mapping=slots,
            **({"skip_compiled": True} if captured is None else captured),
        )
        ending = nullcontext() if ends is None else self._ending_behind(ends, slots[names[ends - 1]], queries)
        with self._leaving_nothing(), context, ending, self._lazy.sharing(batch.is_embedding):
            embeddings = self._embed(batch)
            if captured is not None:
                positions, embeddings = in_static_buffers(runner, positions, embeddings)
            return runner.model(
                input_ids=None, positions=positions, intermediate_tensors=None, inputs_embeds=embeddings
            )

    @contextmanager
    def _leaving_nothing(self) -> Iterator[None]:
        """Clear, after a failed forward, model state left beside the embeddings.

        Qwen3-VL keeps deepstack features in buffers that only the end of its forward clears.
        """
        try:
            yield
        except BaseException:
            model = self.model_runner.get_model()
            if buffers := getattr(model, "deepstack_input_embeds", None):
                for buffer in buffers:
                    buffer.zero_()
                model.deepstack_input_embeds_num_tokens = 0
            raise

    @torch.inference_mode()
    def attend_first(self, batch: RunBatch, asked: Sequence[Attending]) -> list[Tensor]:
        """Compute the first layer's KV of every token in `batch`; attention of those `asked`.

        The keys of all tokens before them must be stored. There is no attention in it, and no feed-forward network.

        Returns:
            `attention_shares` over this rank's heads, [2, others, tokens] fp32, of each that is asked.
        """
        seen: list[Tensor] = []
        self._walk(batch, 1, queries=seen.append)
        (queries,) = seen
        found = []
        for one in asked:
            keys, _ = self._first_kv(one.blocks, one.first + len(one.tokens))
            mine = queries[one.tokens.start : one.tokens.stop]
            found.append(paid_to(one.others, mine, keys, one.first, self._attention.scale).cpu())
        return found

    @torch.inference_mode()
    def first_attention_gap(self, batch: RunBatch) -> float:
        """Relative gap of the first layer's attention to that of its queries and stored KV.

        `batch`: one sequence from its first token on, in one run. Its KV is stored meanwhile, of two layers.
        """
        seen: list[tuple[Tensor, Tensor]] = []
        hook = self._attention.layer(0).register_forward_hook(lambda _, given, output: seen.append((given[0], output)))
        try:
            self._walk(batch, 2)
        finally:
            hook.remove()
        ((queries, output),) = seen
        size = self._attention.block_size
        keys, values = self._first_kv((batch.slots[::size] // size).tolist(), len(batch.slots))
        told, output = attended(queries, keys, values, self._attention.scale), output.float().flatten(1)
        return float((told - output).abs().max() / output.abs().max())

    def _first_kv(self, blocks: Sequence[int], count: int) -> tuple[Tensor, Tensor]:
        """First layer's keys and values of a sequence's start, each [count, heads, width] fp32."""
        (rows,) = self._kv.stored(blocks, 0, count, [0])
        keys, values = rows.float().split([segment.features for segment in self._attention.segments], dim=-1)
        return tuple(
            part.unflatten(1, (segment.heads, segment.width))
            for part, segment in zip((keys, values), self._attention.segments, strict=True)
        )

    def _metadata(self, builder: Any, batch: RunBatch, slots: Tensor) -> Any:
        """The attention backend's description of a batch, whose slots are on the device."""
        rows = self._rows(batch)
        start = torch.zeros(len(rows.lengths) + 1, dtype=torch.int32)
        torch.cumsum(rows.lengths, 0, dtype=torch.int32, out=start[1:])
        starts, ends, tables, index = self._kv.sent(start, rows.ends, rows.block_tables, batch.index)
        common = CommonAttentionMetadata(
            query_start_loc=starts,
            query_start_loc_cpu=start,
            seq_lens=ends,
            num_reqs=len(rows.ends),
            num_actual_tokens=len(batch.index),
            max_query_len=int(rows.lengths.max()),
            max_seq_len=int(rows.ends.max()),
            block_table_tensor=tables,
            slot_mapping=slots,
            causal=True,
            positions=index,
            seq_lens_cpu_upper_bound=rows.ends,
            is_prefilling=torch.zeros(len(rows.ends), dtype=torch.bool),
        )
        return builder.build(0, common)

    @contextmanager
    def _ending_behind(
        self, layers: int, slots: Tensor, queries: Callable[[Tensor], object] = lambda _: None
    ) -> Iterator[None]:
        """Cut the model behind its first `layers` layers: only KV is wanted, no logits.

        That layer's queries, [tokens, local features] and rotated, are given to `queries`, but for MLA.

        vLLM's models walk `layers[start_layer:end_layer]`, which is how they are split into pipelines. Leaving the
        forward by an exception instead would leave behind what models hand their layers (Qwen3-VL's deepstack features)
        for the next forward to find. What the last layer makes of its KV goes nowhere: its feed-forward network is left
        out, and, but for MLA, its attention, in whose place the KV is stored in the tokens' `slots`.
        """
        walker, whole = self._attention.walker, self._attention.walker.end_layer
        end = walker.start_layer + layers
        decoders = getattr(walker, "layers", None)  # few models have another name for them, or for what is in them
        network = None if decoders is None else getattr(decoders[end - 1], "mlp", None)
        latent = self._attention.is_latent  # its attention's output has another shape
        attention = None if latent else self._attention.layer(layers - 1)

        def store(query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> Tensor:
            self._attention.update(layers - 1, torch.cat([key.flatten(1), value.flatten(1)], dim=-1), slots)
            queries(query.flatten(1))
            return query

        try:
            walker.end_layer = end
            if network is not None:
                network.forward = lambda hidden, *_, **__: hidden
            if attention is not None:
                attention.forward = store
            yield
        finally:
            walker.end_layer = whole
            for module in (network, attention):
                if module is not None:
                    del module.forward

    @contextmanager
    def _writing(self, arriving: Sequence[LayerSource], deadline: float) -> Iterator[None]:
        """Before each layer attends, its KV of what is `arriving` is written."""
        if not arriving:
            yield
            return
        writer, slots = self._kv.writer, [chunk.slots for chunk in arriving]
        if writer is None:
            slots = self._kv.sent(*slots)
        layers = range(len(self._attention.names))
        reached: list[int] = []

        def write(layer: int) -> None:
            reached.append(layer)
            if writer is not None:
                stored = [chunk.stored(layer, deadline) for chunk in arriving]
                writer.write_layer(layer, [chunk for chunk in stored if chunk is not None])
                return
            found = [(chunk.layer(layer, deadline), place) for chunk, place in zip(arriving, slots, strict=True)]
            there = [(rows, place) for rows, place in found if rows is not None]
            if there:
                (rows,) = self._kv.sent(torch.cat([rows for rows, _ in there]))
                self._attention.update(layer, rows, torch.cat([place for _, place in there]))

        with ExitStack() as hooks:
            for layer in layers:
                hook = self._attention.layer(layer).register_forward_pre_hook(lambda *_, layer=layer: write(layer))
                hooks.callback(hook.remove)
            yield
        if reached != list(layers):
            raise UnsupportedEngine(f"layers ran as {reached}: KV cannot be written while it comes in")

    def _rows(self, batch: RunBatch) -> Rows:
        """The attention batch: a row per run.

        CPU_MLA's prefill does not see paged context: there, a row per token.

        `infra.cpu.latent` computes the rows of a sequence together.
        """
        if self._attention.backend != "CPU_MLA":
            return batch.rows
        tokens = len(batch.index)
        tables = batch.rows.block_tables.repeat_interleave(batch.rows.lengths, dim=0)
        return Rows(torch.ones(tokens, dtype=torch.int32), (batch.index + 1).int(), tables)

    def _consider_others(self) -> None:
        if self._device.type == "cpu":
            openmp.consider_others()

    def _embed(self, batch: RunBatch) -> Tensor:
        model = self.model_runner.model
        if batch.embeddings is None:
            return model.embed_input_ids(*self._kv.sent(batch.token_ids))
        ids, embeddings = self._kv.sent(batch.token_ids, batch.embeddings)
        # The model's own merge: it also takes deepstack features apart (Qwen3-VL) and hands them to the layers. With a
        # mask on the device it would wait, to know how many tokens there are.
        return model.embed_input_ids(ids, multimodal_embeddings=[embeddings], is_multimodal=batch.is_embedding)

    @torch.inference_mode()
    def write_kv(self, kv: Tensor, slots: Tensor) -> None:
        """See `KVBlocks.write`."""
        self._kv.write(kv, slots)

    @torch.inference_mode()
    def copy_kv(self, sources: Sequence[int], targets: Sequence[int], tokens: int, shift: int) -> None:
        """See `KVBlocks.copy`."""
        self._kv.copy(sources, targets, tokens, shift)

    @torch.inference_mode()
    def place(self, chunks: Sequence[Placement]) -> None:
        """See `KVBlocks.place`."""
        self._kv.place(chunks)

    def free_ended(self) -> None:
        """Free the device's copies of stored KV that host memory has dropped."""
        self._kv.free_ended()

    def on_device(self, chunks: Sequence[Tensor]) -> tuple[int, list[bool]] | None:
        """See `KVBlocks.on_device`; from any thread."""
        return self._kv.on_device(chunks)

    @torch.inference_mode()
    def read_kv(self, blocks: Sequence[int], first: int, count: int, layers: Sequence[int] | None = None) -> Tensor:
        """See `KVBlocks.read`."""
        return self._kv.read(blocks, first, count, layers)

    def finish_writes(self) -> None:
        """Wait for the device, so that readers on any stream see what was written."""
        if self._device.type != "cpu":  # not for patches, which form on a stream of their own
            torch.accelerator.current_stream(self._device).synchronize()

    @torch.inference_mode()
    def compact(self, link: str, blocks: Sequence[int], plan: CompactionPlan, slots: Tensor) -> None:
        """Store a sequence's KV in fewer entries (see `Compactor`)."""
        self._compactor.compact(link, blocks, plan, slots.to(self._device, non_blocking=True))
        self.finish_writes()

    def take_importance(self, link: str) -> Tensor | None:
        """Take the importance [layers, tokens] fp32 that forwards have observed of `link`."""
        scores = self._compactor.take(link)
        return None if scores is None else scores.cpu()

    def give_importance(self, link: str, scores: Tensor) -> None:
        """Have `compact` of `link` go by these [layers, tokens]."""
        self._compactor.give(link, scores.to(self._device))

    def set_lazy(self, leaders: Mapping[int, int], shares_all: bool = False) -> None:
        """Have forwards share visual queries and keys from now on; see `LazyAttention`."""
        self._lazy.leaders, self._lazy.shares_all = dict(leaders), shares_all

    @torch.inference_mode()
    def encode(self, items: Sequence[tuple[str, MultiModalKwargsItem]]) -> list[Tensor]:
        """Embeddings [tokens, hidden] of each (modality, processed item), in order."""
        self._consider_others()
        model = self.model_runner.model
        embeddings: list[Tensor] = []
        for _, _, kwargs in group_and_batch_mm_kwargs(list(items), device=self._device):
            # each by itself: those of one call are views of one tensor, which every copy of them would bring along
            embeddings += [e.to("cpu", copy=True) for e in model.embed_multimodal(**kwargs)]
        return embeddings

    def multimodal_positions(self, token_ids: list[int], features: list[Any]) -> tuple[Tensor, int]:
        """M-RoPE positions [3, n] of a prompt, and the offset of later indices."""
        positions, delta = self.model_runner.model.get_mrope_input_positions(token_ids, features)
        return positions, int(delta)

    @cached_property
    def _timer(self) -> DeviceTimer:
        """Times of calls on a CUDA device."""
        return DeviceTimer(partial(torch.cuda.Event, enable_timing=True))

    @cached_property
    def _attention(self) -> AttentionLayers:
        return AttentionLayers(self.model_runner)

    @cached_property
    def _kv(self) -> KVBlocks:
        """KV in and out of this rank's blocks."""
        return KVBlocks(self._attention, self._device, self.model_runner.vllm_config.model_config.dtype)

    @cached_property
    def _lazy(self) -> LazyAttention:
        """Lazy layers of forwards."""
        return LazyAttention(self._attention.layers)

    @cached_property
    def _compactor(self) -> Compactor:
        """Reduction of sequences' KV."""
        mine, dtype = self._attention, self.model_runner.vllm_config.model_config.dtype
        return Compactor(mine.layers, self._kv.stored, mine.update, dtype, latent=mine.is_latent)

    @property
    def _device(self) -> torch.device:
        return self.model_runner.device
