#!/bin/sh
# All figures of one GPU in nine minutes: `moesaic bench gpu` where the packages of a command line are not installed.
# Usage: lab/gpu.sh [--out FOLDER] [--seconds 540] [--dry]
cd "$(dirname "$0")/.." && PYTHONPATH=src:lab exec "${PYTHON:-python3}" -m moesaic_lab.gpu.command "$@"
