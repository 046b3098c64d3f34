#!/bin/sh
# `make test-vulkan`: the tests that need a second device. Builds llama.cpp with its Vulkan backend into a separate
# environment (once; about 10 minutes on 2 cores), then runs tests/vulkan on the first Vulkan device of the machine,
# which may be Mesa's device in software. docs/vulkan.md says what to install. Arguments go to pytest.
#
#   PYTHON=python3.12        make the environment with this interpreter
#   VULKAN_VENV=FOLDER       use this environment instead of .venv-vulkan
#   CMAKE_ARGS=...           further options of the build: where headers and glslc are, if not where CMake looks
#   VULKAN_DEVICE=1          the second device instead of the first
#   VULKAN_HARDWARE=1        the device is a real graphics card: leave out what a device in software needs
set -eu
cd -- "$(dirname -- "$0")/.."

say() {
    echo "test-vulkan: $*" >&2
}

venv="${VULKAN_VENV:-.venv-vulkan}"
python="$venv/bin/python"
stamp="$venv/vulkan.stamp"
options="-DGGML_VULKAN=ON ${CMAKE_ARGS:-}"
# Its C code is the subject, so the version is part of the stamp: the one that pyproject.toml asks for.
wanted="$(sed -n 's/^ *"\(llama-cpp-python[^"]*\)",$/\1/p' pyproject.toml)"

if [ "$(cat "$stamp" 2>/dev/null)" != "$wanted $options" ]; then
    case "$options" in
    *Vulkan_GLSLC_EXECUTABLE*) ;;
    *)
        command -v glslc >/dev/null || {
            say "glslc, which compiles the backend's shaders, was not found; see docs/vulkan.md for what to install"
            exit 1
        }
        ;;
    esac
    if [ ! -x "$python" ]; then
        "${PYTHON:-python3}" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || {
            say "Python 3.11 or later is needed; name one: make test-vulkan PYTHON=/path/to/python3"
            exit 1
        }
        "${PYTHON:-python3}" -m venv "$venv"
    fi
    say "building $wanted with $options"
    # pip's cache does not know one build from another.
    CMAKE_ARGS="$options" "$python" -m pip install --no-cache-dir --force-reinstall --no-deps \
        --no-binary llama-cpp-python "$wanted"
    "$python" -m pip install --editable '.[dev]'
    echo "$wanted $options" >"$stamp"
fi

if [ -z "${VULKAN_HARDWARE:-}" ]; then
    # llama.cpp hides a device in software unless it is named, and these features of its kernels crash on one.
    export GGML_VK_VISIBLE_DEVICES="${VULKAN_DEVICE:-0}"
    for feature in F16 INTEGER_DOT_PRODUCT FUSION ASYNC GRAPH_OPTIMIZE MMVQ; do
        export "GGML_VK_DISABLE_$feature=1"
    done
elif [ -n "${VULKAN_DEVICE:-}" ]; then
    export GGML_VK_VISIBLE_DEVICES="$VULKAN_DEVICE"
fi
if [ -z "${XDG_RUNTIME_DIR:-}" ]; then  # Mesa asks for one
    XDG_RUNTIME_DIR="$(mktemp -d)"
    export XDG_RUNTIME_DIR
    trap 'rm -rf "$XDG_RUNTIME_DIR"' EXIT
fi

EDGESPEC_TEST_VULKAN=1 "$python" -m pytest tests/vulkan "$@"
