"""A real S3 server on this machine: OpenStack Swift behind its S3 API.

`python -m infra.s3_server`, or `s3_server()`.

The command makes a bucket and prints the configuration that puts library and files there. They go when it ends.

Swift runs from the package index in a virtual environment of its own; nothing is installed system-wide and no root is
needed. One proxy, one account, one container and one object server keep their data in a directory whose file system
has extended attributes, on loopback ports that were free. Authentication is `tempauth` with one user.

Known limits of the server: bucket names need three characters, no conditional PUT with an ETag, bulk deletion wants
Content-MD5.
"""

from __future__ import annotations

import fcntl
import getpass
import hashlib
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from infra.ports import free_port

ENVIRONMENT = Path(".orbitserve/s3-server")
REQUIREMENTS = Path(__file__).with_name("requirements-s3-server.txt")
BUCKET = "orbitserve"
ACCESS_KEY, SECRET_KEY = "orbit:serve", "local-secret"
START_SECONDS = 60.0
_PAST_PROXIES = urllib.request.build_opener(urllib.request.ProxyHandler({}))
_STORAGE = ("account", "container", "object")

# Every part is there once. Half a second without an answer, as on a busy host, would count as an error to the proxy,
# ten of them would have it ask nothing for a minute, and a listing would come to know of an object later.
_PROXY = """
    [DEFAULT]
    bind_ip = 127.0.0.1
    bind_port = {port}
    swift_dir = {directory}
    user = {user}
    workers = 0
    log_level = WARNING
    [pipeline:main]
    pipeline = catch_errors healthcheck listing_formats s3api tempauth slo proxy-server
    [app:proxy-server]
    use = egg:swift#proxy
    account_autocreate = true
    allow_account_management = true
    conn_timeout = 10
    node_timeout = 60
    error_suppression_limit = 1000000000
    [filter:tempauth]
    use = egg:swift#tempauth
    user_{user_name} = {secret} .admin
    [filter:s3api]
    use = egg:swift#s3api
    location = us-east-1
    [filter:catch_errors]
    use = egg:swift#catch_errors
    [filter:healthcheck]
    use = egg:swift#healthcheck
    [filter:listing_formats]
    use = egg:swift#listing_formats
    [filter:slo]
    use = egg:swift#slo
"""
_STORAGE_SERVER = """
    [DEFAULT]
    bind_ip = 127.0.0.1
    bind_port = {port}
    swift_dir = {directory}
    devices = {directory}/devices
    mount_check = false
    user = {user}
    workers = 0
    log_level = WARNING
    fallocate_reserve = 0
    conn_timeout = 10
    node_timeout = 60
    container_update_timeout = 60
    [pipeline:main]
    pipeline = {role}-server
    [app:{role}-server]
    use = egg:swift#{role}
    disk_chunk_size = 1048576
    network_chunk_size = 1048576
"""
_RINGS = """
    import sys
    from swift.common.ring import RingBuilder
    directory, *ports = sys.argv[1:]
    for role, port in zip({roles}, ports):
        builder = RingBuilder(part_power=4, replicas=1, min_part_hours=0)
        node = dict(region=1, zone=1, ip="127.0.0.1", port=int(port), device="disk", weight=1)
        builder.add_dev(dict(node, replication_ip="127.0.0.1", replication_port=int(port)))
        builder.rebalance()
        builder.get_ring().save(directory + "/" + role + ".ring.gz")
"""


class S3ServerUnavailable(RuntimeError):
    """The server cannot be installed or does not start here; the message says what went wrong."""


class S3Server:
    """A server over one directory; what was stored there before is served again.

    Not thread-safe.
    """

    def __init__(self, directory: Path) -> None:
        """Raise S3ServerUnavailable if the server's software cannot be installed."""
        self.directory = directory.absolute()
        self._python = install()
        self._ports = {name: free_port() for name in ("proxy", *_STORAGE)}
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._configure()

    @property
    def port(self) -> int:
        return self._ports["proxy"]

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def storage_options(self, endpoint: str | None = None, **changes: Any) -> dict[str, Any]:
        """Options for s3fs (`LibrarySettings.storage_options`), with `changes` over them."""
        return {
            "key": ACCESS_KEY,
            "secret": SECRET_KEY,
            "endpoint_url": endpoint or self.endpoint,
            "client_kwargs": {"region_name": "us-east-1"},
            "config_kwargs": {
                "s3": {"addressing_style": "path"},
                "request_checksum_calculation": "when_required",
                "response_checksum_validation": "when_required",
            },
        } | changes

    def make_bucket(self, name: str) -> None:
        """Make a bucket, unless there is one of that name."""
        import s3fs

        store = s3fs.S3FileSystem(**self.storage_options())
        if not store.exists(name):
            store.mkdir(name)

    def configuration(self, bucket: str) -> str:
        """YAML of an OrbitServeConfig's sections that put library and files into a bucket."""
        library = {"url": f"s3://{bucket}/library", "storage_options": self.storage_options()}
        return yaml.safe_dump({"library": library, "files_url": f"s3://{bucket}/files"}, sort_keys=False)

    def start(self) -> None:
        """Start the processes and wait until they answer.

        Raises S3ServerUnavailable with the log's end if not.
        """
        for role in self._ports:
            with self._log(role).open("ab") as log:
                command = [str(self._python.with_name(f"swift-{role}-server")), str(self._config(role)), "-v"]
                self._processes[role] = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        deadline = time.monotonic() + START_SECONDS
        while not self._answers():
            dead = [role for role, process in self._processes.items() if process.poll() is not None]
            if dead or time.monotonic() > deadline:
                self.kill()
                role = dead[0] if dead else "proxy"
                raise S3ServerUnavailable(f"swift-{role}-server does not start: {_tail(self._log(role))}")
            time.sleep(0.05)

    def stop(self) -> None:
        """End the processes in good order."""
        self._end(signal.SIGTERM)

    def kill(self) -> None:
        """End the processes as a crash would, in the middle of whatever they do."""
        self._end(signal.SIGKILL)

    def _end(self, how: signal.Signals) -> None:
        for process in self._processes.values():
            process.send_signal(how)
        for process in self._processes.values():
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self._processes.clear()

    def _answers(self) -> bool:
        for role in _STORAGE:
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", self._ports[role])) != 0:
                    return False
        try:
            with _PAST_PROXIES.open(f"{self.endpoint}/healthcheck", timeout=5) as answer:
                return bool(answer.status == 200)
        except (urllib.error.URLError, OSError):
            return False

    def _configure(self) -> None:
        (self.directory / "devices" / "disk").mkdir(parents=True, exist_ok=True)
        values = {"directory": self.directory, "user": getpass.getuser(), "secret": SECRET_KEY}
        values["user_name"] = ACCESS_KEY.replace(":", "_")
        for role, port in self._ports.items():
            template = _PROXY if role == "proxy" else _STORAGE_SERVER
            text = textwrap.dedent(template).format(**values, role=role, port=port)
            self._config(role).write_text(text)
        (self.directory / "swift.conf").write_text("[swift-hash]\nswift_hash_path_suffix = orbitserve\n")
        rings = textwrap.dedent(_RINGS).format(roles=_STORAGE)
        ports = [str(self._ports[role]) for role in _STORAGE]
        _run([self._python, "-c", rings, self.directory, *ports], "the server's rings cannot be built")

    def _config(self, role: str) -> Path:
        return self.directory / f"{role}-server.conf"

    def _log(self, role: str) -> Path:
        return self.directory / f"{role}.log"


@contextmanager
def s3_server() -> Iterator[S3Server]:
    """A running server over a temporary directory. Raises S3ServerUnavailable."""
    with tempfile.TemporaryDirectory(prefix="orbitserve-s3-") as directory:
        server = S3Server(Path(directory))
        server.start()
        try:
            yield server
        finally:
            server.stop()


def install(environment: Path = ENVIRONMENT) -> Path:
    """The Python of the server's environment, made first unless it is current.

    Raises S3ServerUnavailable.
    """
    environment.mkdir(parents=True, exist_ok=True)
    python, stamp = environment.absolute() / "bin" / "python", environment / "requirements.sha256"
    where = str(environment.absolute()).encode()  # scripts in it name their interpreter: it cannot be moved
    wanted = hashlib.sha256(where + REQUIREMENTS.read_bytes()).hexdigest()
    with (environment / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not stamp.exists() or stamp.read_text() != wanted:
            _run([sys.executable, "-m", "venv", environment], "cannot make a virtual environment")
            _run([python, "-m", "pip", "install", "-qq", "-r", REQUIREMENTS], "cannot install Swift")
            stamp.write_text(wanted)
    return python


def _run(command: list[Any], failure: str) -> None:
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        said = [line for line in done.stderr.splitlines() if line.strip()]
        raise S3ServerUnavailable(f"{failure}: {said[-1] if said else f'exit status {done.returncode}'}")


def _tail(log: Path) -> str:
    """The last line that the server wrote."""
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1] if lines else "it said nothing"


def main() -> None:
    """Serve one bucket until interrupted or terminated, and print how to use it."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        with s3_server() as server:
            server.make_bucket(BUCKET)
            print("# S3 until interrupted; what it holds goes then. For orbitserve.yaml:")
            print(server.configuration(BUCKET), end="", flush=True)
            signal.pause()
    except KeyboardInterrupt:
        print("stopped")


if __name__ == "__main__":
    main()
