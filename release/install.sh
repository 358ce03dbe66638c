#!/bin/sh
# Install relax_hetero from a checkout, where there may be nothing but a Python: these are the steps of the Dockerfile.
#   release/install.sh FOLDER [EXTRAS]      a virtual environment in FOLDER; EXTRAS such as llm,serve
# PYTHON=/path/to/python3.12 chooses the interpreter.
set -eu
folder=$1
extras=${2:+[$2]}
checkout=$(cd "$(dirname "$0")/.." && pwd)
"${PYTHON:-python3}" -m venv "$folder"
"$folder/bin/python" -m pip install --quiet --no-cache-dir --disable-pip-version-check "$checkout$extras"
"$folder/bin/relax-hetero" --version
"$folder/bin/relax-hetero" doctor
