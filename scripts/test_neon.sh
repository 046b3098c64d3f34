#!/bin/sh
# `make test-neon`: the kernels as they are built for 64-bit ARM, in an emulator: the NEON level computes the portable
# level's bits there, and they are those of this machine's levels. Needs no other machine and no package of Python's;
# docs/kernels.md says what to install.
#
#   PYTHON=python3.12   compile with this interpreter; any that runs edgespec will do
#   DRAWS=1000000       compare that many draws of tokens; default: 3000
#   SYSROOT=FOLDER      where ARM's C library is, if not in /usr/aarch64-linux-gnu
set -eu
cd -- "$(dirname -- "$0")/.."

say() {
    echo "test-neon: $*" >&2
}

for tool in aarch64-linux-gnu-gcc qemu-aarch64 cc; do
    command -v "$tool" >/dev/null || {
        say "$tool was not found; install gcc, gcc-aarch64-linux-gnu and qemu-user; see docs/kernels.md"
        exit 1
    }
done

place="$(mktemp -d)"
trap 'rm -rf "$place"' EXIT

# build MACHINE COMPILER: the library as an installation makes it, and the program that calls it.
build() {
    mkdir "$place/$1"
    "${PYTHON:-python3}" - "$place/$1" "$1" "$2" <<'END'
import sys
from pathlib import Path

sys.path.insert(0, "edgespec/kernels")
from compile import LIBRARY_NAME, compile_library

compile_library(Path(sys.argv[1], LIBRARY_NAME), machine=sys.argv[2], compiler=sys.argv[3])
END
    "$2" -std=c11 -O1 -Wall -Wextra -ffp-contract=off -I edgespec/kernels tests/kernels/compare_levels.c \
        -o "$place/$1/compare" -L "$place/$1" -ledgespec_kernels -Wl,-rpath,"$place/$1"
}

build aarch64 aarch64-linux-gnu-gcc
build "$(uname -m)" cc
emulated="$(qemu-aarch64 -L "${SYSROOT:-/usr/aarch64-linux-gnu}" "$place/aarch64/compare" "${DRAWS:-3000}")" || {
    say "in the emulator: $emulated"
    exit 1
}
here="$("$place/$(uname -m)/compare" "${DRAWS:-3000}")" || {
    say "on this machine: $here"
    exit 1
}
echo "$emulated"
echo "$here"
if [ "${emulated##*digest }" != "${here##*digest }" ]; then
    say "the two processors compute different bits"
    exit 1
fi
