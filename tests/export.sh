#!/bin/sh
# tests/export.sh: export.py's round trips in a virtual environment of its own (numpy, safetensors, gguf,
# sentencepiece from PyPI). RUN_C_VENV names an environment that is kept between runs.
set -eu
cd "$(dirname "$0")/.."
venv=${RUN_C_VENV:-$(mktemp -d)/venv}
if ! [ -x "$venv/bin/python" ]; then
    python3 -m venv "$venv" || { echo "skip: python3 cannot make a virtual environment"; exit 0; }
    "$venv/bin/pip" install -q numpy safetensors gguf sentencepiece protobuf || {
        echo "skip: the packages cannot be installed"
        exit 0
    }
fi
make -s run
"$venv/bin/python" tests/export_test.py
