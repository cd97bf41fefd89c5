"""Hosts on one machine, made of Linux namespaces: each has its own network, processes, IPC, host name, /tmp, /dev/shm.

| what happens to a host | how                                                                                 |
|------------------------|-------------------------------------------------------------------------------------|
| power cut              | its first process is killed: the kernel ends all others at once, its network is gone |
| cable out              | its side of the switch goes down: packets vanish, nothing is reset                   |

The hosts are on one switch, a bridge in a namespace of its own; this process is on it too (`Network.here`). The file
system is shared but for /tmp and /dev/shm, and for `Network.shared`, which is /mnt on every host. Needs root.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

NET = "10.77.0"
_PROJECT = Path(__file__).resolve().parents[2]
_TOOLS = ("ip", "unshare", "nsenter", "mount")
_START_SECONDS = 20.0
_INIT = """
import os, signal, time
signal.signal(signal.SIGCHLD, signal.SIG_DFL)
open("/tmp/ready", "w").close()
while True:  # reaps what its processes leave behind, as an init does
    try:
        os.waitpid(-1, 0)
    except ChildProcessError:
        time.sleep(0.2)
"""
_SET_UP = """
set -e
mount --make-rprivate /
hostname {name}
mount -t proc proc /proc
mount -t tmpfs -o size=2g,mode=1777 tmpfs /dev/shm
mount --bind {shared} /mnt
mount --bind {names} /etc/hosts
if [[ {project} == /tmp/* ]]; then  # of a clone that lies there
  mkdir -p {tmp}{below} && mount --bind {project} {tmp}{below}
fi
mount --rbind {tmp} /tmp
cd /
exec {python} -c '{init}'
"""


def missing() -> str | None:
    """Reason why no hosts can be made here; None: they can."""
    if os.geteuid() != 0:
        return "hosts are made of namespaces, which needs root"
    absent = [tool for tool in _TOOLS if shutil.which(tool) is None]
    if absent:
        return f"hosts need {', '.join(absent)} (Debian packages iproute2, util-linux, mount)"
    tried = subprocess.run(["ip", "netns", "exec", "none", "true"], capture_output=True, check=False, text=True)
    made = subprocess.run(["unshare", "--mount", "--net", "--pid", "--fork", "true"], capture_output=True, check=False)
    return None if made.returncode == 0 else f"no namespaces here: {made.stderr.decode().strip() or tried.stderr}"


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True)


class Network:
    """A switch, and hosts on it by a letter each.

    Args:
        base: an empty directory for what hosts write.
    """

    def __init__(self, base: Path) -> None:
        self.base, self._prefix = base, f"orb{os.getpid() % 100_000}"
        self.shared, self.here = base / "shared", f"{NET}.254"
        self.hosts: dict[str, Host] = {}
        self.shared.mkdir()
        self.switch = f"{self._prefix}sw"
        _ip("netns", "add", self.switch)
        _ip("-n", self.switch, "link", "add", "br0", "type", "bridge")
        _ip("-n", self.switch, "link", "set", "br0", "up")
        _ip("link", "add", self._prefix, "type", "veth", "peer", "name", "here", "netns", self.switch)
        _ip("-n", self.switch, "link", "set", "here", "master", "br0", "up")
        _ip("addr", "add", f"{self.here}/24", "dev", self._prefix)
        _ip("link", "set", self._prefix, "up")

    def up(self, letter: str) -> Host:
        """Switch a host on. One that was on before has lost what was in its memory, and its /tmp."""
        host = Host(self, letter, f"{self._prefix}{letter}")
        self.hosts[letter] = host
        return host

    def close(self) -> None:
        """Switch all hosts off, and take the switch away."""
        for host in list(self.hosts.values()):
            host.power_off()
        _ip("netns", "del", self.switch)
        subprocess.run(["ip", "link", "del", self._prefix], check=False, capture_output=True)  # went with its peer


class Host:
    """A host that is on."""

    def __init__(self, network: Network, letter: str, name: str) -> None:
        self.network, self.letter, self.name = network, letter, name
        self.address = f"{NET}.{ord(letter) - ord('a') + 1}"
        _ip("netns", "add", name)
        _ip("link", "add", self._port, "netns", network.switch, "type", "veth", "peer", "name", "eth0", "netns", name)
        _ip("-n", network.switch, "link", "set", self._port, "master", "br0", "up")
        _ip("-n", name, "addr", "add", f"{self.address}/24", "dev", "eth0")
        _ip("-n", name, "link", "set", "lo", "up")
        _ip("-n", name, "link", "set", "eth0", "up")
        self.tmp = network.base / letter
        shutil.rmtree(self.tmp, ignore_errors=True)
        (self.tmp / "home").mkdir(parents=True)
        self.tmp.chmod(0o1777)
        names = network.base / f"{letter}.hosts"
        names.write_text(f"127.0.0.1 localhost\n{self.address} {name}\n")
        script = _SET_UP.format(
            name=name,
            shared=network.shared,
            tmp=self.tmp,
            project=_PROJECT,
            below=str(_PROJECT).removeprefix("/tmp"),
            names=names,
            python=sys.executable,
            init=_INIT,
        )
        own = ["unshare", "--mount", "--uts", "--ipc", "--pid", "--fork", "--kill-child=KILL", "bash", "-c", script]
        self._log = network.base / f"{letter}.log"
        with self._log.open("w") as log:
            command = ["ip", "netns", "exec", name, *own]
            self._process = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
        self._init = self._wait_for_init()

    @property
    def _port(self) -> str:
        return f"v{self.letter}"

    def _wait_for_init(self) -> int:
        until = time.monotonic() + _START_SECONDS
        while not (self.tmp / "ready").exists():
            if time.monotonic() > until or self._process.poll() is not None:
                raise RuntimeError(f"host {self.letter} did not come up: {self._log.read_text()}")
            time.sleep(0.05)
        pids = subprocess.run(["ip", "netns", "pids", self.name], check=True, capture_output=True, text=True).stdout
        for pid in pids.split():
            status = Path(f"/proc/{pid}/status").read_text()
            numbers = next(line for line in status.splitlines() if line.startswith("NSpid:")).split()[1:]
            if len(numbers) > 1 and numbers[-1] == "1":
                return int(pid)
        raise RuntimeError(f"host {self.letter} has no first process")

    def command(self, arguments: Sequence[str | Path]) -> list[str]:
        """Command line that runs another one on the host."""
        into = ["nsenter", "--target", str(self._init), "--net", "--mount", "--uts", "--ipc", "--pid", "--"]
        return [*into, *map(str, arguments)]

    def run(
        self, *arguments: str | Path, environment: Mapping[str, str], seconds: float = 120, **options: Any
    ) -> subprocess.CompletedProcess[str]:
        """Run a command on the host; returns what it said, whatever its status."""
        return subprocess.run(
            self.command(arguments),
            env=dict(environment),
            timeout=seconds,
            check=False,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            text=True,
            **options,
        )

    def start(
        self, *arguments: str | Path, environment: Mapping[str, str], log: Path, **options: Any
    ) -> subprocess.Popen[bytes]:
        """Start a command on the host, with its output in a file."""
        with log.open("w") as said:
            return subprocess.Popen(
                self.command(arguments),
                env=dict(environment),
                stdout=said,
                stderr=said,
                stdin=subprocess.DEVNULL,
                **options,
            )

    def unplug(self) -> None:
        """Take the cable out."""
        _ip("-n", self.network.switch, "link", "set", self._port, "down")

    def plug(self) -> None:
        """Put the cable back."""
        _ip("-n", self.network.switch, "link", "set", self._port, "up")

    def power_off(self) -> None:
        """Cut the power."""
        os.kill(self._init, signal.SIGKILL)
        self._process.wait(_START_SECONDS)
        until = time.monotonic() + _START_SECONDS
        while subprocess.run(["ip", "netns", "pids", self.name], capture_output=True, check=False).stdout.strip():
            if time.monotonic() > until:
                raise RuntimeError(f"processes of host {self.letter} outlive it")
            time.sleep(0.05)
        _ip("netns", "del", self.name)
        # The kernel takes a namespace's links down some time later; the next host of this letter wants the name.
        subprocess.run(["ip", "-n", self.network.switch, "link", "del", self._port], check=False, capture_output=True)
        self.network.hosts.pop(self.letter, None)
