"""vLLM's arguments from settings: no role starts without what its model was configured with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from decode_workers.engine import engine_arguments as decode_arguments
from decode_workers.spec import DecodeSpec
from infra.vllm_arguments import ModelEngineSpec
from prefill_workers.engine.engine import engine_arguments as prefill_arguments
from prefill_workers.engine.spec import EngineSpec
from serving.config import OrbitServeConfig
from serving.engine_spec import decode_spec, front_end_config, prefill_spec, vision_spec
from serving.settings import ModelSettings

# Settings that every engine takes, with other values than by default.
OF_ENGINES: dict[str, Any] = {
    "path": Path("other"),
    "dtype": "float32",
    "load_format": "safetensors",
    "max_model_len": 512,
    "kv_cache_dtype": "fp8",
    "seed": 7,
    "trust_remote_code": True,
}
OF_PROMPTS = OF_ENGINES.keys() - {"load_format", "kv_cache_dtype"}  # those of processes that hold no weights and no KV
# What only the HTTP front end reads (`serving.api.app`); decode engines take the reasoning parser, too.
OF_HTTP = {
    "served_name",
    "default_max_tokens",
    "chat_template",
    "enable_auto_tool_choice",
    "tool_call_parser",
    "reasoning_parser",
}
SPECS: list[Callable[[OrbitServeConfig], ModelEngineSpec]] = [prefill_spec, vision_spec, decode_spec]


def config(**model: Any) -> OrbitServeConfig:
    return OrbitServeConfig.model_validate({"model": {"path": "model", "served_name": "m", **model}})


def test_every_model_setting_has_somebody_who_takes_it():
    assert ModelSettings.model_fields.keys() == OF_ENGINES.keys() | OF_HTTP


@pytest.mark.parametrize("setting", OF_ENGINES)
@pytest.mark.parametrize("spec", SPECS)
def test_every_engine_takes_the_models_settings(spec: Callable[[OrbitServeConfig], ModelEngineSpec], setting: str):
    field = "model" if setting == "path" else setting
    value = OF_ENGINES[setting]
    usual, other = spec(config()), spec(config(**{setting: value}))
    assert other == replace(usual, **{field: str(value) if setting == "path" else value})
    assert other != usual


@pytest.mark.parametrize("setting", sorted(OF_PROMPTS))
def test_the_front_end_takes_what_prompts_are_read_by(setting: str, monkeypatch: pytest.MonkeyPatch):
    from vllm.engine import arg_utils

    given: dict[str, Any] = {}

    class Arguments:
        def __init__(self, **arguments: Any) -> None:
            given.update(arguments)

        def create_engine_config(self) -> None:
            """Nothing is read from a checkpoint."""

    monkeypatch.setattr(arg_utils, "AsyncEngineArgs", Arguments)
    front_end_config(config(**{setting: OF_ENGINES[setting]}).model, processor_cache_gib=0.5)
    assert str(given["model" if setting == "path" else setting]) == str(OF_ENGINES[setting])
    assert given["mm_processor_cache_gb"] == 0.5
    front_end_config(config(max_model_len=512).model, 0.5, longest=256)
    assert given["max_model_len"] == 256


def test_every_field_of_a_specification_reaches_vllm(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("infra.vllm_arguments.uses_gpu", lambda: True)  # where pools are told by argument
    monkeypatch.setattr("prefill_workers.engine.engine.uses_gpu", lambda: True)  # and forwards are captured
    other = {
        "model": "other", "dtype": "float32", "load_format": "dummy", "max_model_len": 512, "block_size": 32,
        "tensor_parallel_size": 2, "gpu_memory_utilization": 0.5, "kv_cache_gib": 3, "trust_remote_code": True,
        "kv_cache_dtype": "fp8", "seed": 7,
    }  # fmt: skip
    of_prefill = {**other, "max_batch_tokens": 8192, "hand_off": False, "encoder_only": True, "buckets": (64,)}
    of_decode = {**other, "max_num_seqs": 4, "reasoning_parser": "qwen3", "hands_back": True}
    assert asdict(EngineSpec("")).keys() == of_prefill.keys() | {"device_bytes"}, "which are ours"
    assert asdict(DecodeSpec("")).keys() == of_decode.keys()
    for field, value in of_prefill.items():
        assert prefill_arguments(EngineSpec(**{"model": "", field: value})) != prefill_arguments(EngineSpec("")), field
    for field, value in of_decode.items():
        assert decode_arguments(DecodeSpec(**{"model": "", field: value})) != decode_arguments(DecodeSpec("")), field


def test_roles_take_their_own_pools_and_ranks():
    settings = OrbitServeConfig.model_validate(
        {
            "model": {"path": "model"},
            "prefill": {
                "kv_cache_gib": 3,
                "tensor_parallel_size": 2,
                "block_size": 32,
                "max_batch_tokens": 512,
                "buckets": [1024, 256, 64],
            },
            "decode": {"kv_cache_gib": 5, "tensor_parallel_size": 4, "max_num_seqs": 8, "gpu_memory_utilization": 0.4},
            "vision": {"gpu_memory_utilization": 0.2},
        }
    )
    prefill, vision, decode = prefill_spec(settings), vision_spec(settings), decode_spec(settings)
    assert (prefill.kv_cache_gib, prefill.tensor_parallel_size, prefill.max_batch_tokens) == (3, 2, 512)
    assert (decode.kv_cache_gib, decode.tensor_parallel_size, decode.max_num_seqs) == (5, 4, 8)
    assert prefill.buckets == (64, 256), "a forward is never longer than its budget"
    assert prefill.block_size == decode.block_size == 32, "KV is handed over by blocks"
    assert (vision.gpu_memory_utilization, decode.gpu_memory_utilization) == (0.2, 0.4)
    assert (vision.tensor_parallel_size, vision.encoder_only, vision.hand_off) == (1, True, False)
    assert (prefill.hand_off, prefill_spec(settings, hand_off=False).hand_off) == (True, False)
