#!/bin/sh
# `moesaic bench device --device cuda` without an installation: all figures of one GPU in nine minutes; a second call goes on.
# Usage: lab/gpu.sh [--keep FOLDER] [--seconds 540] [--only plans,layer] [--dry]        lab/wheels.sh: what to carry
cd "$(dirname "$0")/.." && PYTHONPATH="src:lab${PYTHONPATH:+:$PYTHONPATH}" exec "${PYTHON:-python3}" -m moesaic_lab.device "$@"
