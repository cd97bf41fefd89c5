"""Forward over runs: the vLLM worker extension behind the linker.

A *run* is a contiguous stretch of one sequence that has to be computed; what lies between runs is KV that already
sits in the sequence's blocks. Every run becomes one row of the attention batch, all rows of a sequence share its block
table, and a row's sequence length is its run's end. Each layer writes the keys and values of all runs before it
attends, so one forward gives exactly what a full prefill would, with no kernel change.

| primitive          | what it does                                                        |
|--------------------|---------------------------------------------------------------------|
| `describe`         | shapes, block size, rotary frequencies: plain values                 |
| `learn_pages`      | finds how the attention backend stores a token inside a block        |
| `forward_runs`     | one forward over the runs of several sequences                       |
| `write_kv`         | a linked chunk into blocks, through the backend's own update op      |
| `read_kv`          | a chunk's KV out of blocks, through the learned page layout          |
| `encode`           | pixels to embeddings                                                 |
| `poll_handoffs`    | leases that decode engines have read, or still wait for              |

Checked on vLLM 0.32.0. Together with `engine.py` this is the only file that knows vLLM's internals.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group
from vllm.forward_context import set_forward_context
from vllm.multimodal.inputs import MultiModalKwargsItem
from vllm.multimodal.utils import group_and_batch_mm_kwargs
from vllm.v1.attention.backend import CommonAttentionMetadata

from prefill_workers.sequence import LinkSequence, Run

_DIGIT = 128  # the largest power of two whose integers below it are exact in bfloat16 with room to spare


@dataclass(frozen=True)
class RunBatch:
    """One forward: the tokens of all rows, concatenated. `t` tokens, `r` rows."""

    token_ids: Tensor  # [t] int32
    positions: Tensor  # [t] or [3, t] int64
    slots: Tensor  # [t] int64, where each token's KV goes
    index: Tensor  # [t] int64, index of each token in its own sequence
    row_lengths: Tensor  # [r] int32, tokens of each run
    row_ends: Tensor  # [r] int32, index behind each run's last token
    block_tables: Tensor  # [r, blocks] int32
    is_embedding: Tensor  # [t] bool
    embeddings: Tensor | None  # [is_embedding.sum(), hidden]


def assemble(work: Sequence[tuple[LinkSequence, Sequence[Run]]], block_size: int) -> RunBatch:
    """Concatenate the runs of several sequences into one batch."""
    lengths = torch.tensor([run.stop - run.start for _, runs in work for run in runs], dtype=torch.int32)
    ends = torch.tensor([run.stop for _, runs in work for run in runs], dtype=torch.int32)
    widest = max(len(sequence.blocks) for sequence, _ in work)
    tables = torch.zeros(len(lengths), widest, dtype=torch.int32)
    parts: dict[str, list[Tensor]] = {name: [] for name in ("ids", "positions", "slots", "index", "mask", "embeddings")}
    row = 0
    for sequence, runs in work:
        table = torch.tensor(sequence.blocks, dtype=torch.int32)
        tables[row : row + len(runs), : len(table)] = table
        row += len(runs)
        index = torch.cat([torch.arange(run.start, run.stop) for run in runs])
        parts["ids"].append(sequence.token_ids[index])
        parts["positions"].append(sequence.positions[..., index])
        parts["slots"].append(table[index // block_size].long() * block_size + index % block_size)
        parts["index"].append(index)
        rows, mask = sequence.embedding_rows(index)
        parts["mask"].append(mask)
        if rows is not None:
            parts["embeddings"].append(rows)
    return RunBatch(
        token_ids=torch.cat(parts["ids"]),
        positions=torch.cat(parts["positions"], dim=-1),
        slots=torch.cat(parts["slots"]),
        index=torch.cat(parts["index"]),
        row_lengths=lengths,
        row_ends=ends,
        block_tables=tables,
        is_embedding=torch.cat(parts["mask"]),
        embeddings=torch.cat(parts["embeddings"]) if parts["embeddings"] else None,
    )


class RunsExtension:
    """Methods that vLLM adds to its worker (`worker_extension_cls`); `collective_rpc` calls them on every rank."""

    model_runner: Any
    _pages: Tensor | None = None  # [block_size * features] element of a block that holds feature f of token t

    def describe(self) -> dict[str, Any]:
        """Plain values that fix the family's layout and this rank's share of it."""
        runner, group = self.model_runner, self._group
        spec = group.kv_cache_spec
        rotary = self._rotary()
        return {
            "layers": len(group.layer_names),
            "kv_heads": spec.num_kv_heads,
            "head_size": spec.head_size,
            "block_size": spec.block_size,
            "blocks": self._cache(0).shape[0],
            "dtype": str(spec.dtype).removeprefix("torch."),
            "inverse_frequencies": self._inverse_frequencies(rotary),
            "rotary_style": "neox" if rotary.is_neox_style else "interleaved",
            "uses_mrope": bool(runner.uses_mrope),
            "mla": bool(runner.vllm_config.model_config.use_mla),
        }

    @torch.inference_mode()
    def learn_pages(self, block: int) -> None:
        """Find where the attention backend keeps feature f of token t inside a block.

        Backends differ (the CPU kernel transposes keys inside a block, and differently for each dtype), so the layout
        is not assumed but read off: known integers are written through the backend's own update op and looked for.
        A dtype holds only small integers exactly, hence one pass per digit.

        Raises:
            RuntimeError: the backend's writes cannot be inverted (for example a quantised cache).
        """
        spec = self._group.kv_cache_spec
        size, features = spec.block_size, 2 * spec.num_kv_heads * spec.head_size
        code = torch.arange(size * features).view(size, features)
        slots = (torch.arange(size) + block * size).to(self._device)
        found = torch.zeros(size * features, dtype=torch.long)
        scale = 1
        while scale < size * features:
            digit = (code // scale % _DIGIT).to(spec.dtype)
            self._update(0, digit.to(self._device), slots)
            page = self._cache(0)[block].flatten().float().cpu().round().long()
            if page.numel() != size * features:
                raise RuntimeError(f"a block holds {page.numel()} elements, expected {size * features}")
            found += page * scale
            scale *= _DIGIT
        if not torch.equal(found.sort().values, torch.arange(size * features)):
            raise RuntimeError("the attention backend's page layout could not be read back; is the KV cache quantised?")
        self._pages = found.argsort().to(self._device)

    @torch.inference_mode()
    def forward_runs(self, batch: RunBatch, logits: bool = False) -> Tensor | None:
        """Compute and store the KV of every token in `batch`.

        Returns:
            Logits [rows, vocabulary] fp32 of each row's last token if asked for, else None.
        """
        runner, group = self.model_runner, self._group
        to = self._device
        embeds = self._embed(batch)
        start = torch.zeros(len(batch.row_lengths) + 1, dtype=torch.int32)
        torch.cumsum(batch.row_lengths, 0, dtype=torch.int32, out=start[1:])
        slots = batch.slots.to(to, non_blocking=True)
        metadata = group.get_metadata_builder().build(
            0,
            CommonAttentionMetadata(
                query_start_loc=start.to(to, non_blocking=True),
                query_start_loc_cpu=start,
                seq_lens=batch.row_ends.to(to, non_blocking=True),
                num_reqs=len(batch.row_ends),
                num_actual_tokens=len(batch.slots),
                max_query_len=int(batch.row_lengths.max()),
                max_seq_len=int(batch.row_ends.max()),
                block_table_tensor=batch.block_tables.to(to, non_blocking=True),
                slot_mapping=slots,
                causal=True,
                positions=batch.index.to(to, non_blocking=True),
                seq_lens_cpu_upper_bound=batch.row_ends,
                is_prefilling=torch.zeros(len(batch.row_ends), dtype=torch.bool),
            ),
        )
        with set_forward_context(
            dict.fromkeys(group.layer_names, metadata),
            runner.vllm_config,
            num_tokens=len(batch.slots),
            slot_mapping=dict.fromkeys(group.layer_names, slots),
        ):
            hidden = runner.model(
                input_ids=None,
                positions=batch.positions.to(to, non_blocking=True),
                intermediate_tensors=None,
                inputs_embeds=embeds,
            )
        if not logits:
            return None
        last = start[1:].long() - 1
        return runner.model.compute_logits(hidden[last.to(to)]).float().cpu()

    def _embed(self, batch: RunBatch) -> Tensor:
        model = self.model_runner.model
        ids = batch.token_ids.to(self._device, non_blocking=True)
        if batch.embeddings is None:
            return model.embed_input_ids(ids)
        # the model's own merge: it also takes deepstack features apart (Qwen3-VL) and hands them to the layers
        return model.embed_input_ids(
            ids,
            multimodal_embeddings=[batch.embeddings.to(self._device, non_blocking=True)],
            is_multimodal=batch.is_embedding.to(self._device, non_blocking=True),
        )

    @torch.inference_mode()
    def write_kv(self, kv: Tensor, slots: Tensor) -> None:
        """Store `kv` [layers, tokens, features] in the tokens' slots, through the backend's own update op."""
        slots = slots.to(self._device, non_blocking=True)
        for layer, rows in enumerate(kv.to(self._device, non_blocking=True).unbind(0)):
            self._update(layer, rows, slots)

    @torch.inference_mode()
    def read_kv(self, blocks: Sequence[int], first: int, count: int) -> Tensor:
        """KV of `count` tokens that begin `first` tokens into `blocks`: [layers, count, features], keys as stored."""
        if self._pages is None:
            raise RuntimeError("learn_pages has not run")
        spec = self._group.kv_cache_spec
        size, features = spec.block_size, 2 * spec.num_kv_heads * spec.head_size
        used = torch.tensor(blocks, device=self._device)[first // size : -(-(first + count) // size)]
        skip = first % size
        layers = len(self._group.layer_names)
        out = torch.empty(layers, count, features, dtype=spec.dtype)
        for layer in range(layers):
            pages = self._cache(layer)[used].flatten(1).index_select(1, self._pages)
            out[layer] = pages.view(-1, features)[skip : skip + count]
        return out

    @torch.inference_mode()
    def encode(self, items: Sequence[tuple[str, MultiModalKwargsItem]]) -> list[Tensor]:
        """Embeddings [tokens, hidden] of each (modality, processed item), in order."""
        model = self.model_runner.model
        embeddings: list[Tensor] = []
        for _, _, kwargs in group_and_batch_mm_kwargs(list(items), device=self._device):
            embeddings += [e.cpu() for e in model.embed_multimodal(**kwargs)]
        return embeddings

    def multimodal_positions(self, token_ids: list[int], features: list[Any]) -> tuple[Tensor, int]:
        """M-RoPE positions [3, n] of a prompt and what must be added to an index to continue behind it."""
        positions, delta = self.model_runner.model.get_mrope_input_positions(token_ids, features)
        return positions, int(delta)

    def poll_handoffs(self) -> tuple[list[str], list[str]]:
        """What decode engines have said: ids of leases they finished reading (one entry per reader), and still want."""
        if not has_kv_transfer_group():
            return [], []
        notes = get_kv_transfer_group().connector_worker.nixl_wrapper.get_new_notifs()
        read: list[str] = []
        wanted: list[str] = []
        for message in (note.decode() for arrived in notes.values() for note in arrived):
            if message.startswith("HB:"):
                wanted += message[3:].split(",")
            else:
                read.append(message.rsplit(":", 1)[0])
        return read, wanted

    # -- vLLM's inside ------------------------------------------------------------------------------------------------

    @property
    def _group(self) -> Any:
        (group,) = self.model_runner.attn_groups[0]
        return group

    @property
    def _device(self) -> torch.device:
        return self.model_runner.device

    def _layer(self, layer: int) -> Any:
        context = self.model_runner.vllm_config.compilation_config.static_forward_context
        return context[self._group.layer_names[layer]]

    def _cache(self, layer: int) -> Tensor:
        return self._layer(layer).kv_cache

    def _update(self, layer: int, kv: Tensor, slots: Tensor) -> None:
        attention = self._layer(layer)
        keys, values = kv.chunk(2, dim=-1)
        shape = (len(kv), -1, self._group.kv_cache_spec.head_size)
        attention.impl.do_kv_cache_update(
            attention, keys.reshape(shape), values.reshape(shape), self._cache(layer), slots
        )

    def _rotary(self) -> Any:
        blocks = tuple(name.rsplit(".", 1)[0] + "." for name in self._group.layer_names)
        named = self.model_runner.model.named_modules(remove_duplicate=False)
        modules = [m for name, m in named if name.startswith(blocks) and hasattr(m, "cos_sin_cache")]
        kinds = {(m.base, m.rotary_dim, type(m).__name__) for m in modules}
        if len(kinds) != 1:
            raise RuntimeError(f"expected one rotary embedding for all layers, found {sorted(map(str, kinds))}")
        return modules[0]

    @staticmethod
    def _inverse_frequencies(rotary: Any) -> list[float]:
        """The engine's own fp32 frequencies; scaled variants are refused until their relocation is proved exact.

        Recomputed in fp64 they would differ in the last bits, which a shift of thousands of positions magnifies.
        """
        if getattr(rotary, "scaling_factor", None) not in (None, 1, 1.0):
            raise RuntimeError(f"rotary scaling of {type(rotary).__name__} is not supported: relocation is unproved")
        return rotary._compute_inv_freq(rotary.base).double().tolist()
