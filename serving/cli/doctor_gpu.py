"""The doctor's checks of GPUs: devices, build tools, fit of roles, speed of a hand-off.

`serving.cli.doctor` runs them; on an installation for CPUs there is nothing to check but NIXL.
"""

from __future__ import annotations

import json
import multiprocessing
from multiprocessing.connection import Connection
from typing import Any

from infra.gpu import NoUsableGpu, gpus, missing_build_tools
from infra.nixl_agents import finish, make_agent
from infra.vllm_env import is_cpu_build
from serving.cli.findings import CheckResult
from serving.deploy.gpu_fit import shortage

_HOST_BYTES, _GPU_BYTES = 1 << 20, 1 << 28  # of a read; a GPU's is long enough to show its speed
_SECONDS = 30.0  # for a read
_START_SECONDS = 120.0  # for the other process to import torch and NIXL
SLOWEST = 5.0  # GB/s between GPUs: less is TCP, on which a long prompt's hand-off takes a second


def check_build_tools() -> list[CheckResult]:
    """The compiler and Python headers that Triton builds its launchers with."""
    if is_cpu_build():
        return []
    missing = missing_build_tools()
    remedy = f"apt-get install {' '.join(missing)}" if missing else ""
    detail = f"missing: {', '.join(missing)}" if missing else "a C compiler and Python.h"
    return [CheckResult("build tools", not missing, detail, remedy)]


def probe_gpus(wanted: str = "{}") -> list[CheckResult]:
    """The devices that engines have, and whether roles fit.

    `wanted`: what these reserve (`gpu_fit.reserved`), as JSON.
    """
    if is_cpu_build():
        return []
    try:
        found = gpus()
    except NoUsableGpu as error:
        return [CheckResult("GPUs", False, str(error), "see the message; until then no engine starts")]
    named = ", ".join(
        f"{one.name} ({one.memory / 2**30:.0f} GiB, sm_{one.capability[0]}{one.capability[1]})" for one in found
    )
    results = [CheckResult("GPUs", True, named)]
    if roles := json.loads(wanted):
        short = shortage(roles, [len(found)])
        detail = f"all roles fit {len(found)}" if short is None else short
        results.append(
            CheckResult("roles on GPUs", short is None, detail, "" if short is None else "change the settings")
        )
    return results


def probe_nixl() -> list[CheckResult]:
    """A read between two processes over UCX, as a hand-off is; on GPUs of their memory.

    The environment has to have `infra.vllm_env.GPU_ENVIRONMENT` there, as engines' has.
    """
    import torch

    device, other = map(torch.device, _devices())
    nbytes = _HOST_BYTES if device.type == "cpu" else _GPU_BYTES
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    prefill = context.Process(target=_offer, args=(there, str(other), nbytes), daemon=True)
    prefill.start()
    try:
        if not here.poll(_START_SECONDS):
            return [CheckResult("NIXL loopback", False, "the other process said nothing")]
        metadata, descriptors = here.recv()
        agent = make_agent("decode")
        target = torch.zeros(nbytes, dtype=torch.uint8, device=device)
        registered = agent.register_memory([target])
        peer = agent.add_remote_agent(metadata)
        arguments = (agent.get_xfer_descs([target]), agent.deserialize_descs(descriptors), peer, b"read")
        seconds, state = _read(agent, arguments)
        if device.type == "cuda" and state == "DONE":  # the first connects
            seconds, state = _read(agent, arguments)
        same = bool((target == _pattern(nbytes, device)).all())
        agent.deregister_memory(registered)
        here.send(None)
    finally:
        prefill.join(1)
        prefill.terminate()
    way = "" if other == device else f" from {other} to {device}"
    if way and not torch.cuda.can_device_access_peer(device, other):
        way += " without peer access"
    return [_verdict(device.type, nbytes, seconds, state, same, way)]


def _devices() -> tuple[str, str]:
    """Devices of this process and of the other: apart where there are two, as those of engines are."""
    import torch

    if is_cpu_build():
        return "cpu", "cpu"
    return "cuda:0", "cuda:1" if torch.cuda.device_count() > 1 else "cuda:0"


def _verdict(device: str, nbytes: int, seconds: float, state: str, same: bool, way: str = "") -> CheckResult:
    speed = nbytes / seconds / 1e9
    what = f"{nbytes >> 20} MiB of {'GPU' if device == 'cuda' else 'host'} memory{way} over UCX"
    if state != "DONE" or not same:
        return CheckResult("NIXL loopback", False, f"{what}: state {state}" + ("" if same else ", the bytes differ"))
    detail = f"{what} in {1e3 * seconds:.1f} ms, {speed:.1f} GB/s"
    if device == "cuda" and speed < SLOWEST:
        return CheckResult(
            "NIXL loopback", False, detail, "UCX goes over TCP: run this with UCX_PROTO_INFO=y and see infra/README.md"
        )
    return CheckResult("NIXL loopback", True, detail)


def _read(agent: Any, arguments: tuple[Any, ...]) -> tuple[float, str]:
    """Seconds that a read took, and its last state."""
    local, remote, peer, note = arguments
    transfer = agent.initialize_xfer("READ", local, remote, peer, note)
    seconds, state = finish(agent, transfer, _SECONDS)
    agent.release_xfer_handle(transfer)
    return seconds, state


def _offer(pipe: Connection, device: str, nbytes: int) -> None:
    """Offer memory to another process, until that says that it has read it."""
    import torch

    if device != "cpu":
        torch.cuda.set_device(device)
    agent, source = make_agent("prefill"), _pattern(nbytes, device)
    registered = agent.register_memory([source])
    pipe.send((agent.get_agent_metadata(), agent.get_serialized_descs(agent.get_xfer_descs([source]))))
    if pipe.poll(_START_SECONDS):
        pipe.recv()
    agent.deregister_memory(registered)


def _pattern(nbytes: int, device: Any) -> Any:
    import torch

    return torch.arange(nbytes, device=device).to(torch.uint8)
