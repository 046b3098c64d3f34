#!/bin/sh
# `make test-page`: the tests of the server's page in a real Chromium, axe's rules of accessibility among them. Needs a
# Chromium: Debian's package `chromium`, Chrome, or another that EDGESPEC_TEST_CHROMIUM names. Arguments go to pytest.
set -eu
cd -- "$(dirname -- "$0")/.."

sh scripts/setup.sh dev
python=.venv/bin/python
needs='import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["browser"])'
# shellcheck disable=SC2046  # one argument for each package
$python -m pip install --quiet $($python -c "$needs")
$python -c 'import sys; from tests.support.browser import missing; sys.exit(missing())'
exec $python -m pytest tests/server/test_page_in_browser.py "$@"
