#!/bin/sh
# Prepares .venv in this checkout: `scripts/setup.sh` for using edgespec, `scripts/setup.sh dev` for working on it.
#
# This file only finds a Python; scripts/setup_venv.py does the work. Both keep off stdin and stdout, because
# `make chat <prompts.txt >answers.txt` has to reach the chat untouched.
#
#   PYTHON=python3.12                use this interpreter
#   EDGESPEC_LLAMA_WHEELS=URL|FOLDER take llama-cpp-python prebuilt from this wheel index or folder, no compiler needed
#   EDGESPEC_SKIP_DISK_CHECK=1       do not look at the free disk space
set -eu
exec </dev/null 1>&2

cd -- "$(dirname -- "$0")/.."

is_recent_python() {
    "$1" -I -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null
}

if [ -n "${PYTHON:-}" ]; then
    if ! is_recent_python "$PYTHON"; then
        echo "setup: PYTHON=$PYTHON is not a working Python 3.11 or later; point PYTHON at one, or unset it to search."
        exit 1
    fi
    exec "$PYTHON" -I scripts/setup_venv.py "$@"
fi

# The one already in .venv comes first: it starts fastest, and nothing else matters once setup has been done.
for candidate in .venv/bin/python python3 python3.13 python3.12 python3.14 python3.11 python; do
    if is_recent_python "$candidate"; then
        exec "$candidate" -I scripts/setup_venv.py "$@"
    fi
done
echo "setup: edgespec needs Python 3.11 or later and found none; install one, or name it: make setup PYTHON=/path/to/python3."
exit 1
