"""A process that Ray was in ends with its own status, whatever native libraries would do on its way out."""

from __future__ import annotations

import subprocess
import sys

import pytest

CODE = """
import atexit, ctypes, sys, threading, time, types
from infra.ray_exit import exit_with

libc = ctypes.CDLL(None)
libc.__cxa_atexit(ctypes.cast(libc._exit, ctypes.c_void_p), ctypes.c_void_p(9), None)  # stands for a crash
if sys.argv[1] == "with":
    sys.modules["ray"] = types.ModuleType("ray")
threading.Thread(target=lambda: (time.sleep(0.2), print("a thread"))).start()
atexit.register(print, "what was registered")
print("said", end=" ")
exit_with(3)
sys.exit(3)
"""


@pytest.mark.parametrize(("ray", "status"), [("with", 3), ("without", 9)])
def test_only_where_ray_is_native_libraries_are_not_torn_down(ray: str, status: int):
    ended = subprocess.run([sys.executable, "-c", CODE, ray], capture_output=True, text=True)
    assert (ended.returncode, ended.stderr) == (status, "")
    assert ended.stdout == "said a thread\nwhat was registered\n"


def test_the_command_says_what_it_exits_with(monkeypatch: pytest.MonkeyPatch):
    from serving.cli import main as cli

    said: list[int] = []
    monkeypatch.setattr(cli, "exit_with", said.append)
    for arguments, status in (["--help"], 0), (["no-such-command"], 2):
        monkeypatch.setattr(sys, "argv", ["orbitserve", *arguments])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        assert (ended.value.code or 0) == status == said[-1]
