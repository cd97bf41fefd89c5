"""`python tests/integration/hand_off.py`: one engine against two, case by case.

Reads cases from standard input, each a line of JSON: [family, dtype, prefill ranks, decode ranks], and true where
compacted KV is wanted as well. For each it links a
prompt on a prefill engine and decodes it on a stock, text-only engine in another process, over NIXL; writes what that
engine answers and what one multimodal engine does, as a line of JSON. One process can hold one NIXL engine at a time.

vLLM spawns an engine's core and ranks, each of which would take 9 s of CPU to import vLLM again: here they are forked
from a server that has done so. It also collects garbage five times while it builds an engine: what was imported is kept
out of that.
"""

from __future__ import annotations

import asyncio
import gc
import json
import multiprocessing
import os
import sys
import tempfile
import traceback
from dataclasses import replace
from functools import partial
from itertools import count
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path
from typing import Any

import torch

from infra.checkpoints import checkpoint_path
from infra.families import FAMILIES, Family
from infra.hand_back import asking
from infra.ports import free_port
from infra.vllm_env import vllm_environment

TOKENS = 8
SECONDS = 300  # a process that has to answer within them and does not is stuck


class Forked(ForkServerProcess):
    """Has the environment that its parent has when it starts it, as a spawned process does."""

    def start(self) -> None:
        self._environment = dict(os.environ)
        super().start()

    def run(self) -> None:
        os.environ.clear()
        os.environ.update(self._environment)
        gc.freeze()
        fork_instead_of_spawning()
        super().run()


class Forking(ForkServerContext):
    Process = Forked


def enter_vllm() -> None:
    """A new port for NIXL; one thread per engine, because two of them and their ranks share the cores."""
    os.environ.update(vllm_environment(kv_cache_gib=1, threads=1, nixl_host="127.0.0.1", nixl_port=free_port()))


def fork_instead_of_spawning() -> None:
    """Whatever this process spawns from now on."""
    context = Forking()
    context.set_forkserver_preload(["vllm.v1.engine.core", "vllm.v1.worker.cpu_model_runner"])
    multiprocessing.get_context = lambda method=None: context


class Decoding:
    """The other process: for each case a stock engine, which comes up while this process builds its own."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._asked, self._answers = context.Queue(), context.Queue()
        self._process = context.Process(target=decode, args=(self._asked, self._answers))
        self._process.start()

    def begin(self, name: str, dtype: str, ranks: int) -> None:
        self._asked.put((name, dtype, ranks))

    def ask(self, token_ids: list[int], transfer: dict[str, Any], tokens: int = TOKENS) -> dict[str, Any]:
        self._asked.put((token_ids, transfer, tokens))
        return self._answers.get(timeout=SECONDS)

    def end_hand_back(self, name: str) -> bool:
        """An answer's KV has been read. True if vLLM has freed it by then."""
        self._asked.put(name)
        return self._answers.get(timeout=SECONDS)

    def end(self) -> None:
        """The case, or, between two, the process."""
        self._asked.put(None)

    def close(self) -> None:
        self.end()
        self._process.join(SECONDS)

    def kill(self) -> None:
        self._process.kill()


def block_size(family: Family) -> int | None:
    return 32 if family.layout == "gqa" else None


def answer(output: Any) -> dict[str, Any]:
    """Token ids, their log-probabilities, and by how much each leads the next best one."""
    chosen = zip(output.token_ids, output.logprobs, strict=True)
    ranked = (sorted((entry.logprob for entry in top.values()), reverse=True) for top in output.logprobs)
    return {
        "tokens": list(output.token_ids),
        "logprobs": [entry[token].logprob for token, entry in chosen],
        "leads": [best - second for best, second, *_ in ranked],
    }


def decode(asked: Any, answers: Any) -> None:
    """Per case a stock engine, which is given token ids until it is told None."""
    enter_vllm()
    fork_instead_of_spawning()
    forkserver.ensure_running()  # imports while this process does
    from vllm import SamplingParams

    from infra import hand_back

    hand_back.HELD_SECONDS = SECONDS  # other tests' engines share the cores
    from decode_workers.engine import DecodeEngine, NonFiniteLogits
    from decode_workers.spec import DecodeSpec

    numbers = count()  # what is said of one that has failed may come late

    async def one(engine: DecodeEngine, token_ids: list[int], transfer: dict[str, Any], tokens: int) -> dict[str, Any]:
        params = SamplingParams(max_tokens=tokens, temperature=0, logprobs=2, detokenize=False, ignore_eos=True)
        try:
            async for output in engine.generate(token_ids, transfer, params, f"request-{next(numbers)}"):
                last = output
        except NonFiniteLogits as error:
            return {"error": str(error)}
        return {**answer(last.outputs[0]), "offer": last.kv_transfer_params}

    async def freed(engine: DecodeEngine, name: str) -> bool:
        engine.end_hand_back(name)
        async with asyncio.timeout(SECONDS):
            while engine.stats().blocks_reserved:
                await asyncio.sleep(0.01)
        return await engine.all_blocks_free()

    async def case(name: str, dtype: str, ranks: int) -> None:
        family = FAMILIES[name]
        engine = DecodeEngine(
            DecodeSpec(
                model=str(checkpoint_path(family.checkpoint)),
                dtype=dtype,
                max_model_len=2048,
                block_size=block_size(family),
                trust_remote_code=family.trust_remote_code,
                tensor_parallel_size=ranks,
            )
        )
        while (prompt := await asyncio.to_thread(asked.get)) is not None:
            answers.put(await (freed(engine, prompt) if isinstance(prompt, str) else one(engine, *prompt)))
        engine.shutdown()

    while (begun := asked.get()) is not None:
        enter_vllm()
        asyncio.run(case(*begun))


def spoil(engine: Any, blocks: Any) -> None:
    """Write NaN over the KV of a sequence's second token."""
    kv = torch.full((engine.layout.layers, 1, engine.layout.features), torch.nan, dtype=engine.dtype)
    engine.write_kv(kv, engine.slots(blocks, 1, 2))
    engine.finish_writes()


def compacted(rig: Any, parts: list[Any], decoding: Decoding) -> list[dict[str, Any]]:
    """Answers of the decode engine behind compacted KV and with windows, and of torch over the same entries."""
    from torch_reference import TorchModel, evicted, merged

    from infra.kv_window import gap
    from prefill_workers.compaction.plan import placeholder_ids
    from prefill_workers.protocol import Compaction, CompactionPolicy, Sampling
    from prefill_workers.sequence import Run

    model, found = TorchModel(rig.family), []
    evict, merge = CompactionPolicy.EVICT, CompactionPolicy.MERGE
    for policy, budget, window, begun, steps in [
        (evict, 0.4, None, False, TOKENS),
        (evict, 0.4, 4, True, 48),
        *([(merge, 0.6, None, True, TOKENS)] if rig.family.image else []),
        (evict, 1.0, 4, False, 80),
    ]:
        asked = Compaction(budget, policy, window)
        plan = rig.plan(parts, "exact", compaction=asked, sampling=Sampling() if begun else None)
        result = rig.loop.submit(plan).result(60)
        sequence, n, kept = plan.sequence, len(plan.sequence), result.kv.kept
        first = [result.first_token] if begun else []
        given = [*placeholder_ids(sequence.token_ids.tolist(), kept), *first]
        said = decoding.ask(given, result.transfer, steps)

        whole, chunks = model.prompt(sequence), plan.request.chunks
        if kept == n:
            entries = whole.kv
        elif policy is evict:
            entries = evicted(whole, kept, min(n - chunks[-1].stop, int(-(-budget * n // 1)) // 2), 32)
        else:
            entries = merged(whole, kept, [Run(chunk.first, chunk.first + chunk.count) for chunk in chunks], 32)
        if not begun:  # the last token is computed again
            entries = [(keys[:, :, :-1], values[:, :, :-1]) for keys, values in entries]
        token, position = (first or sequence.token_ids[-1:].tolist())[0], n - 1 + begun
        axes = 3 if sequence.positions.dim() == 2 else 1

        def seen(count: int, window: int | None = window, given: int = len(given)) -> Any:
            at = torch.arange(count)
            if window is None:
                return at
            start, stop = (rig.engine.block_size * block for block in gap(given, count, window, rig.engine.block_size))
            return at[(at < start) | (at >= stop)]

        ids, logprobs = model.decode(entries, token, position, steps, axes, seen)
        chosen = range(steps), said["tokens"]
        mistakes = {"shift": model.decode(entries, token, position + 1, steps, axes, seen)}
        if window is not None:
            mistakes["window"] = model.decode(entries, token, position, steps, axes)
        mistaken = {}
        for name, (wrong, other) in mistakes.items():
            alike = next((i for i, (a, b) in enumerate(zip(ids, wrong, strict=True)) if a != b), steps - 1) + 1
            mistaken[name] = float((other[:alike] - logprobs[:alike]).abs().max())
        found.append(
            {
                "case": [policy, budget, window, begun],
                "kept": [kept, n],
                "tokens": [said["tokens"], ids],
                "off": float((torch.tensor(said["logprobs"]) - logprobs[chosen]).abs().max()),
                "mistaken": mistaken,
                "seen": [len(seen(len(given) + steps - 2)), len(given) + steps - 2],
            }
        )
        rig.settle()
    return found


def handed_back(rig: Any, parts: list[Any], decoding: Decoding) -> dict[str, Any]:
    """An answer, read back from the decode engine, beside what a forward over all of it computes."""
    from prefill_workers.protocol import Sampling
    from prefill_workers.sequence import LinkSequence, Run

    engine, plan = rig.engine, rig.plan(parts, "exact", sampling=Sampling())
    result = rig.loop.submit(plan).result(60)
    ids = plan.sequence.token_ids.tolist()
    said = decoding.ask([*ids, result.first_token], asking(result.transfer), 5 * TOKENS)
    told = [result.first_token, *said["tokens"]]
    assert rig.loop.keep_answer(result.lease, told, said["offer"]).result(60)
    freed = decoding.end_hand_back(said["offer"]["remote_request_id"])
    rig.settle()
    whole = [*ids, *told]
    _, match = rig.linker.prefixes.look_up(replace(plan.request, token_ids=[*whole, 1]), plan.frame)
    found = engine.read_kv([one.block for one in match.blocks], 0, match.tokens)
    lease, positions = rig.loop._pool.allocate(len(whole)), plan.sequence.positions
    index = torch.arange(len(ids), len(whole)).expand(*positions.shape[:-1], -1)
    tokens, at = torch.tensor(whole, dtype=torch.int32), torch.cat([positions, index], -1)
    engine.forward([(LinkSequence(tokens, at, lease.blocks, plan.sequence.embedded), [Run(0, len(whole))])])
    expected = engine.read_kv(lease.blocks, 0, match.tokens)
    rig.loop._pool.abandon(lease.id)
    answers = rig.loop.stats().compiled.answers
    return {
        "tokens": [len(ids), len(whole), match.tokens],
        "pulled": answers.pulled,
        "computed": answers.tokens,
        "off": float((found - expected).abs().max()),
        "freed": freed,
        "leases": rig.loop.stats().leases,
    }


def prefill(name: str, dtype: str, ranks: int, decoding: Decoding, compacts: bool = False) -> dict[str, Any]:
    """Link a prompt twice, let it be decoded, and report that beside what this engine answers by itself."""
    from rig import Clip, Page, Rig, tiny_engine, vllm_prompt
    from vllm import SamplingParams

    from prefill_workers.protocol import Sampling

    family = FAMILIES[name]
    enter_vllm()
    gc.freeze()
    engine = tiny_engine(dtype, family, hand_off=True, tensor_parallel_size=ranks)
    with tempfile.TemporaryDirectory() as directory:
        rig = Rig(engine, Path(directory), family=family)
        first, second = (1, Clip(2, frames=12) if family.video else 2) if family.image else (Page(1), Page(2))
        parts = ["See ", first, " and ", second, " and then say what follows."]
        spare = -len(rig.plan(parts).sequence) % engine.block_size
        full = [*parts[:-1], parts[-1] + "." * spare]  # fills its last block: a first token needs another one
        prompts = {"parts": parts, "full": full}
        params = SamplingParams(max_tokens=TOKENS, temperature=0, logprobs=2, detokenize=False, ignore_eos=True)
        expected = {}
        for kind, prompt in prompts.items():
            whole, _ = vllm_prompt(prompt, rig.documents, family)
            expected[kind] = answer(engine._llm.generate([whole], params, use_tqdm=False)[0].outputs[0])

        report: dict[str, Any] = {"expected": expected, "linked": []}
        # computed in context, then patched at full rank; then with a first token, and with room for one that is
        # not given to the decode engine, as where a prompt ends with a patched chunk and no forward ends the link
        cases = [
            ("parts", None, False),
            ("parts", None, False),
            ("full", Sampling(), True),
            ("full", Sampling(), False),
        ]
        for kind, sampling, begun in cases:
            plan = rig.plan(prompts[kind], sampling=sampling)
            result = rig.loop.submit(plan).result(60)
            points = [str(outcome.operating_point) for outcome in result.chunks]
            token_ids = plan.sequence.token_ids.tolist()
            first = [result.first_token] if begun else []
            said = decoding.ask([*token_ids, *first], result.transfer)
            report["linked"].append(
                {"prompt": kind, "length": len(token_ids), "points": points, "first": first, **said}
            )
            rig.settle()
        report["spoiled"] = []
        for spoils in (True, False):
            plan = rig.plan(parts)
            result = rig.loop.submit(plan).result(60)
            if spoils:
                rig.loop.call(partial(spoil, engine, plan.sequence.blocks)).result(60)
            report["spoiled"].append(decoding.ask(plan.sequence.token_ids.tolist(), result.transfer))
            rig.settle()
        report["compacted"] = compacted(rig, parts, decoding) if compacts else []
        rig.wait_until_free()
        report["leases"], report["block_size"] = rig.loop.stats().leases, engine.block_size
        report["attention"] = rig.attended(parts).flatten().tolist() if engine.tells_attention else None
        rig.close()
        rig = Rig(engine, Path(directory) / "again", family=family, keeps_prefixes=True, learns=False)
        report["handed_back"] = handed_back(rig, parts, decoding)
        decoding.end()
        rig.close()
    engine.shutdown()
    return report


def main() -> None:
    decoding = Decoding()
    enter_vllm()
    fork_instead_of_spawning()
    try:
        for line in sys.stdin:
            name, dtype, prefill_ranks, decode_ranks, *compacts = json.loads(line)
            decoding.begin(name, dtype, decode_ranks)
            print(json.dumps(prefill(name, dtype, prefill_ranks, decoding, *compacts)), flush=True)
    except BaseException:
        traceback.print_exc()
        decoding.kill()
        os._exit(1)  # not held up by what the case left running
    decoding.close()


if __name__ == "__main__":
    main()
