"""`python tests/integration/hand_off.py FAMILY DTYPE [PREFILL_RANKS DECODE_RANKS]`: one engine against two.

Links a prompt on a prefill engine and decodes it on a stock, text-only engine in another process, over NIXL. Prints
what that engine answers and what one multimodal engine does, as one line of JSON.
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

from infra.checkpoints import checkpoint_path
from infra.families import FAMILIES, Family
from infra.vllm_env import vllm_environment
from serving.app import free_port

TOKENS = 8


def enter_vllm() -> None:
    os.environ.update(vllm_environment(kv_cache_gib=1, nixl_host="127.0.0.1", nixl_port=free_port()))


def answer(output: Any) -> dict[str, Any]:
    """Token ids, their log-probabilities, and by how much each leads the next best one."""
    chosen = zip(output.token_ids, output.logprobs, strict=True)
    ranked = (sorted((entry.logprob for entry in top.values()), reverse=True) for top in output.logprobs)
    return {
        "tokens": list(output.token_ids),
        "logprobs": [entry[token].logprob for token, entry in chosen],
        "leads": [best - second for best, second, *_ in ranked],
    }


def decode(family: Family, dtype: str, block_size: int | None, ranks: int, prompts: Any, answers: Any) -> None:
    """The other process: a stock engine that is given token ids."""
    enter_vllm()
    from vllm import SamplingParams

    from decode_workers.engine import DecodeEngine, DecodeSpec

    engine = DecodeEngine(
        DecodeSpec(
            model=str(checkpoint_path(family.checkpoint)),
            dtype=dtype,
            max_model_len=2048,
            block_size=block_size,
            trust_remote_code=family.trust_remote_code,
            tensor_parallel_size=ranks,
        )
    )

    async def one(token_ids: list[int], transfer: dict[str, Any]) -> dict[str, Any]:
        params = SamplingParams(max_tokens=TOKENS, temperature=0, logprobs=2, detokenize=False, ignore_eos=True)
        async for output in engine.generate(token_ids, transfer, params, "request"):
            last = output
        return answer(last.outputs[0])

    async def serve() -> None:
        while (prompt := await asyncio.to_thread(prompts.get)) is not None:
            answers.put(await one(*prompt))

    asyncio.run(serve())
    engine.shutdown()


def main(name: str, dtype: str, prefill_ranks: int, decode_ranks: int) -> None:
    family = FAMILIES[name]
    enter_vllm()
    context = multiprocessing.get_context("spawn")
    prompts, answers = context.Queue(), context.Queue()
    block_size = 32 if family.layout == "gqa" else None
    checkpoint_path(family.checkpoint)
    child = context.Process(target=decode, args=(family, dtype, block_size, decode_ranks, prompts, answers))
    child.start()

    from rig import Page, Rig, tiny_engine, vllm_prompt
    from vllm import SamplingParams

    engine = tiny_engine(dtype, family, hand_off=True, tensor_parallel_size=prefill_ranks)
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
            prompts.put((plan.sequence.token_ids.tolist(), result.transfer))
            points = [str(outcome.operating_point) for outcome in result.chunks]
            report["linked"].append({"points": points, **answers.get(timeout=300)})
            rig.settle()
        prompts.put(None)
        rig.wait_until_free()
        report["leases"] = rig.loop.stats().leases
        print(json.dumps(report))
        rig.close()
        child.join(60)
        engine.shutdown()


if __name__ == "__main__":
    name, dtype, *ranks = sys.argv[1:]
    main(name, dtype, *(map(int, ranks) if ranks else (1, 1)))
