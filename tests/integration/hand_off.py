"""`python tests/integration/hand_off.py`: one engine against two, case by case.

Reads cases from standard input, each a line of JSON: [family, dtype, prefill ranks, decode ranks]. For each it links a
prompt on a prefill engine and decodes it on a stock, text-only engine in another process, over NIXL; writes what that
engine answers and what one multimodal engine does, as a line of JSON. One process can hold one NIXL engine at a time.
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import os
import sys
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from infra.checkpoints import checkpoint_path
from infra.families import FAMILIES, Family
from infra.ports import free_port
from infra.vllm_env import vllm_environment

TOKENS = 8
SECONDS = 90  # a process that has to answer within them and does not is stuck


def enter_vllm() -> None:
    os.environ.update(vllm_environment(kv_cache_gib=1, nixl_host="127.0.0.1", nixl_port=free_port()))


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
    """The other process: per case a stock engine, which is given token ids until it is told None."""
    enter_vllm()
    from vllm import SamplingParams

    from decode_workers.engine import DecodeEngine, DecodeSpec

    params = SamplingParams(max_tokens=TOKENS, temperature=0, logprobs=2, detokenize=False, ignore_eos=True)

    async def one(engine: DecodeEngine, token_ids: list[int], transfer: dict[str, Any]) -> dict[str, Any]:
        async for output in engine.generate(token_ids, transfer, params, "request"):
            last = output
        return answer(last.outputs[0])

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
            answers.put(await one(engine, *prompt))
        engine.shutdown()

    while (begun := asked.get()) is not None:
        enter_vllm()
        asyncio.run(case(*begun))


def prefill(name: str, dtype: str, ranks: int, ask: Callable[[list[int], dict[str, Any]], Any]) -> dict[str, Any]:
    """Link a prompt twice, let it be decoded, and report that beside what this engine answers by itself."""
    from rig import Page, Rig, tiny_engine, vllm_prompt
    from vllm import SamplingParams

    family = FAMILIES[name]
    enter_vllm()
    engine = tiny_engine(dtype, family, hand_off=True, tensor_parallel_size=ranks)
    with tempfile.TemporaryDirectory() as directory:
        rig = Rig(engine, Path(directory), family=family)
        chunk = (lambda n: n) if family.image else Page
        parts = ["See ", chunk(1), " and ", chunk(2), " and then say what follows."]
        prompt, _ = vllm_prompt(parts, rig.documents, family.image)
        params = SamplingParams(max_tokens=TOKENS, temperature=0, logprobs=2, detokenize=False, ignore_eos=True)
        expected = answer(engine._llm.generate([prompt], params, use_tqdm=False)[0].outputs[0])

        report: dict[str, Any] = {"expected": expected, "linked": []}
        for _ in range(2):  # computed in context, then patched at full rank
            plan = rig.plan(parts)
            result = rig.loop.submit(plan).result(60)
            points = [str(outcome.operating_point) for outcome in result.chunks]
            report["linked"].append({"points": points, **ask(plan.sequence.token_ids.tolist(), result.transfer)})
            rig.settle()
        rig.wait_until_free()
        report["leases"] = rig.loop.stats().leases
        rig.close()
    engine.shutdown()
    return report


def main() -> None:
    context = multiprocessing.get_context("spawn")
    asked, answers = context.Queue(), context.Queue()
    child = context.Process(target=decode, args=(asked, answers))
    child.start()
    enter_vllm()

    def ask(token_ids: list[int], transfer: dict[str, Any]) -> Any:
        asked.put((token_ids, transfer))
        return answers.get(timeout=SECONDS)

    try:
        for line in sys.stdin:
            name, dtype, prefill_ranks, decode_ranks = json.loads(line)
            asked.put((name, dtype, decode_ranks))
            report = prefill(name, dtype, prefill_ranks, ask)
            asked.put(None)
            print(json.dumps(report), flush=True)
    except BaseException:
        traceback.print_exc()
        child.kill()
        os._exit(1)  # not held up by what the case left running
    asked.put(None)
    child.join(SECONDS)


if __name__ == "__main__":
    main()
