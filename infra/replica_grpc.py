"""gRPC between Ray Serve replicas: keepalive, and the address that they listen on.

Serve's calls go over gRPC (`RAY_SERVE_USE_GRPC_BY_DEFAULT`). Of a host that is cut off nothing comes back, not even a
reset: a call that it was answering would wait until Ray declares the node dead and longer, and a connection to it that
is not open yet takes 20 s to fail. Ray's keepalive is of minutes, and set for all of its own connections at once; Serve
has no setting. `install` gives Serve's channels one of their own:

| after the host has vanished      | what happens                                                                 |
|----------------------------------|------------------------------------------------------------------------------|
| 2 s at most                      | a ping is sent on each connection with a call under way                      |
| 3 s later                        | those calls fail as unavailable: Serve routes them again, or we do           |
| from then on                     | further calls fail at once; a new connection is tried every 2 s              |

gRPC answers pings on threads of its own, so that a replica whose Python is busy is not taken for lost. A gRPC server
punishes clients that ping as often (GOAWAY, "too many pings"), unless it is told not to: both ends need `install`, in
every replica before Serve starts its server (`serving.replicas` does that as it is imported), and in the proxies.

Those servers unpickle what they are sent. Serve has them listen on all interfaces of a node; with `install` they do on
the address alone under which Ray knows it, which is 127.0.0.1 in a cluster that `orbitserve` starts.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import ray
from ray.serve._private import replica as serve_replica
from ray.serve._private.request_router import replica_wrapper

from infra.ports import url_host

PING_SECONDS, ANSWER_SECONDS = 2.0, 3.0
_RECONNECT_SECONDS = 2.0

CLIENT_OPTIONS = (
    ("grpc.keepalive_time_ms", int(PING_SECONDS * 1e3)),
    ("grpc.keepalive_timeout_ms", int(ANSWER_SECONDS * 1e3)),
    ("grpc.http2.max_pings_without_data", 0),  # else two, and silence afterwards
    ("grpc.initial_reconnect_backoff_ms", 500),
    ("grpc.min_reconnect_backoff_ms", int(_RECONNECT_SECONDS * 1e3)),  # also how long one attempt may take
    ("grpc.max_reconnect_backoff_ms", int(_RECONNECT_SECONDS * 1e3)),
)
SERVER_OPTIONS = (("grpc.http2.max_ping_strikes", 0),)


def install() -> None:
    """Set up gRPC channels and servers that Serve makes in this process from now on."""
    _wrap(replica_wrapper, "init_grpc_channel", functools.partial(_with_options, added=CLIENT_OPTIONS))
    _wrap(serve_replica, "create_grpc_server_with_interceptors", functools.partial(_with_options, added=SERVER_OPTIONS))
    _wrap(serve_replica, "add_port_to_grpc_server", _on_node_address)


def _wrap(module: Any, name: str, wrapper: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    function: Callable[..., Any] = getattr(module, name)
    if not hasattr(function, "__wrapped__"):
        setattr(module, name, wrapper(function))


def _with_options(make: Callable[..., Any], added: tuple[tuple[str, int], ...]) -> Callable[..., Any]:
    @functools.wraps(make)
    def made(*arguments: Any, options: Any = None, **named: Any) -> Any:
        return make(*arguments, options=[*(options or ()), *added], **named)

    return made


def _on_node_address(add_port: Callable[[Any, str], int]) -> Callable[[Any, str], int]:
    @functools.wraps(add_port)
    def added(server: Any, address: str) -> int:
        return add_port(server, address.replace("[::]", url_host(ray.util.get_node_ip_address())))

    return added
