"""vLLM's own switches, all of them, in one place.

vLLM reads these variables when it is imported, so they have to be in the environment of a process before anything
imports vLLM: a replica of a role, tests and scripts put them into `os.environ` first.
"""

from __future__ import annotations

from importlib import metadata

from infra.ports import LOOPBACK
from infra.vllm_plugin import NIXL_PORT, SHARED_CORES

KV_SPACE = "VLLM_CPU_KVCACHE_SPACE"
NIXL_HOST = "VLLM_NIXL_SIDE_CHANNEL_HOST"  # of the handshake
# Of processes with an engine on a GPU.
GPU_ENVIRONMENT = {
    # Triton's products of fp32 have 10 bits (TF32) else, of which the self-check of an fp32 engine rightly complains.
    "TRITON_F32_DEFAULT": "ieee",
    # Without NVLink UCX reads GPU memory over TCP else, at a hundredth of the speed, and vLLM's connector only reads.
    "UCX_CUDA_IPC_ENABLE_GET_ZCOPY": "on",
}
BLOCK_SIZE = "prefill_block_size"  # what we tell in `kv_transfer_params` beside what vLLM reads: tokens of a block


def vllm_environment(
    *,
    kv_cache_gib: float | None,
    threads: int | None = None,
    nixl_host: str = LOOPBACK,
    nixl_port: int | None = None,
    own_runner: bool = True,
) -> dict[str, str]:
    """Environment of a process that runs one vLLM engine.

    Args:
        kv_cache_gib: size of the KV pool on a CPU; None: 1. The environment tells whole GiB alone: what is not whole,
            and what is on a GPU, is an argument (`infra.vllm_arguments`), and the variable, which would go before it,
            must not be set.
        threads: OpenMP threads of the process; None leaves the choice to Ray and OpenMP.
        nixl_host: address of the handshake, which peers must reach; nothing is listened to on others.
        nixl_port: port of that handshake; None where the process exchanges no KV.
        own_runner: the engine has our worker extension; False: a GPU's engine has the model runner that vLLM prefers.
    """
    pool = kv_cache_gib or 1
    environment = {
        NIXL_HOST: nixl_host,
        # Prefill: the engine core lives in the calling process. Decode (AsyncLLM always starts a core of its own): on
        # CPU the worker then lives in that core, instead of a further process that both spin on a queue to talk to;
        # with that process a token of a tiny model took 100 ms on two cores.
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_COMPUTE_NANS_IN_LOGITS": "1",  # see `decode_workers.engine`
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_NO_USAGE_STATS": "1",
        # The worker extension takes tensors and dataclasses as arguments; they only travel between our own processes.
        "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    if own_runner or is_cpu_build():
        # The model runner that `prefill_workers.engine.worker_extension` is written for and tested on; CPUs have no
        # other.
        environment["VLLM_USE_V2_MODEL_RUNNER"] = "0"
    if not is_cpu_build():
        environment |= GPU_ENVIRONMENT
    if is_cpu_build():
        # Engines run eagerly there; what vLLM still compiles (its sampler's log-probability ranks) would need a C++
        # compiler on the machine and seconds on the first request that asks for it.
        environment["TORCH_COMPILE_DISABLE"] = "1"
        environment[SHARED_CORES] = "1"
        environment["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"  # engines of several roles share the cores
    if not pool % 1:
        environment[KV_SPACE] = str(int(pool))
    if nixl_port is not None:
        environment[NIXL_PORT] = str(nixl_port)
    if threads is not None:
        environment["OMP_NUM_THREADS"] = str(threads)
    return environment


def is_cpu_build() -> bool:
    """True if the installed vLLM is the CPU build (`vllm-cpu`); does not import it."""
    try:
        metadata.version("vllm-cpu")
    except metadata.PackageNotFoundError:
        return False
    return True
