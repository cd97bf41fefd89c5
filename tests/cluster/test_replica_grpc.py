"""gRPC calls to a host that vanishes, between hosts of namespaces; no Ray cluster."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Callable

import grpc
import pytest

from infra import replica_grpc
from tests.cluster.cluster import recipe_environment
from tests.cluster.hosts import Network

SERVER = """
import asyncio, grpc
from ray.serve._private import replica
from infra import replica_grpc
replica_grpc.install()

async def answer(seconds, context):
    await asyncio.sleep(float(seconds))
    return seconds

async def main():
    server = replica.create_grpc_server_with_interceptors(asynchronous=True, options=[])
    handlers = {"Wait": grpc.unary_unary_rpc_method_handler(answer)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("t.T", handlers),))
    server.add_insecure_port("0.0.0.0:5555")
    await server.start()
    print("up", flush=True)
    await server.wait_for_termination()

asyncio.run(main())
"""
NOTICED_S = replica_grpc.PING_SECONDS + replica_grpc.ANSWER_SECONDS + 1.5


async def test_a_call_fails_within_seconds_of_its_hosts_end_and_a_long_one_is_left_alone(network: Network):
    from ray.serve._private.request_router import replica_wrapper

    replica_grpc.install()
    host, log = network.up("b"), network.base / "server.log"
    environment = recipe_environment() | {"RAY_AUTH_MODE": "disabled"}
    host.start(sys.executable, "-c", SERVER, environment=environment, log=log)
    async with asyncio.timeout(120):
        while "up" not in log.read_text():
            await asyncio.sleep(0.1)
    async with replica_wrapper.init_grpc_channel(f"{host.address}:5555", options=[], asynchronous=True) as channel:
        wait = channel.unary_unary("/t.T/Wait")
        assert await wait(b"8") == b"8", "pings that a server without `install` would punish by then"
        await failed_within(NOTICED_S, lambda: wait(b"60"), host.unplug)
        await failed_within(NOTICED_S, lambda: wait(b"0"))
        host.plug()
        began = time.monotonic()
        while True:
            try:
                assert await wait(b"0") == b"0"
                break
            except grpc.aio.AioRpcError:
                assert time.monotonic() - began < 6, "a host that is back is found soon"
                await asyncio.sleep(0.1)


async def failed_within(
    seconds: float, call: Callable[[], grpc.aio.UnaryUnaryCall], fault: Callable[[], None] | None = None
) -> None:
    """A call that must fail as unavailable, soon after a fault if there is one."""
    made = asyncio.ensure_future(call())
    if fault is not None:
        await asyncio.sleep(0.5)
        fault()
    began = time.monotonic()
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await made
    assert error.value.code() == grpc.StatusCode.UNAVAILABLE
    assert time.monotonic() - began < seconds
