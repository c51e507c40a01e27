#!/bin/sh
# The GPU evidence in one command: tests on the device, a tiny run, tiles, figures. About 25 minutes on one H200.
# Usage: lab/gpu.sh [FOLDER]. Run again with the same folder after a cut: what is done is not done again.
set -eu
cd "$(dirname "$0")/.."
folder=${1:-gpu_results}
mkdir -p "$folder"
export PYTHONPATH=src:lab PYTHONUNBUFFERED=1 TRITON_CACHE_DIR="$folder/triton_cache"
python=${PYTHON:-python3}

if [ ! -e "$folder/tests_passed" ]; then
    # The kernels' own tests, on the device. A failure is shown and does not stop the measurement, which checks results itself.
    tests="tests/kernels/triton --ignore tests/kernels/triton/test_triton_interpreter.py"
    tests="$tests --ignore tests/kernels/triton/test_triton_compiled.py"
    if timeout 420 "$python" -m pytest $tests -q -p no:cacheprovider --tb=short >"$folder/tests.txt" 2>&1; then
        touch "$folder/tests_passed"
    fi
    tail -15 "$folder/tests.txt"
fi
"$python" -m moesaic_lab.gpu --small --folder "$folder" --stages check measure --repeats 3 --json "$folder/small.json"
"$python" -m moesaic_lab.gpu --folder "$folder" --stages tune --seconds "${TUNE_SECONDS:-600}" --json "$folder/tuned.json"
"$python" -m moesaic_lab.gpu --folder "$folder" --stages measure --seconds "${MEASURE_SECONDS:-420}" --json "$folder/gpu.json"
