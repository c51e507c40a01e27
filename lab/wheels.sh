#!/bin/sh
# Downloads what a machine with torch and Triton alone lacks for all steps of lab/gpu.sh: Linux on x86-64, one folder of wheels per purpose.
# Usage: lab/wheels.sh FOLDER [PYTHON_VERSION, 3.12 unless given]
# On the machine: pip install --no-deps --no-index --target site FOLDER/*/*.whl, with `site` on PYTHONPATH. SonicMoE's compiler is in
# site/nvidia_cutlass_dsl/python_packages, which belongs there too. SonicMoE's versions are those that fit each other and torch 2.11.
# Packages without a version have that of constraints.txt.
set -e
folder=${1:?a folder for the wheels}
fetch() {
	purpose=$1
	shift
	for name in "$@"; do
		case $name in
		*==*) echo "$name" ;;
		*) sed -n "s/^\($name==[^ ;]*\) *\(;.*\)\{0,1\}$/\1/p" "$(dirname "$0")/../constraints.txt" | head -1 ;;
		esac
	done >"$folder/$purpose.txt"
	[ "$(wc -l <"$folder/$purpose.txt")" -eq $# ] || { echo "constraints.txt lacks a package of: $*" >&2 && exit 1; }
	"${PYTHON:-python3}" -m pip download --quiet --no-deps --only-binary=:all: --python-version "$version" --implementation cp \
		--platform manylinux_2_28_x86_64 --platform manylinux_2_24_x86_64 --platform manylinux_2_17_x86_64 --platform manylinux2014_x86_64 \
		--dest "$folder/$purpose" --requirement "$folder/$purpose.txt"
	du -sm "$folder/$purpose" | sed "s|^\([0-9]*\).*|\1 MB  $purpose: $*|"
}
version=${2:-3.12}
mkdir -p "$folder"
fetch command tyro rich numpy scipy typeguard docstring-parser typing-extensions markdown-it-py mdurl pygments safetensors greenlet
fetch tests pytest pytest-xdist pytest-timeout hypothesis iniconfig pluggy execnet sortedcontainers packaging
fetch transformers transformers huggingface-hub tokenizers regex pyyaml tqdm httpx2 httpcore2 h11 anyio idna truststore click hf-xet filelock fsspec typer \
	shellingham annotated-doc
fetch finetune peft accelerate psutil
fetch liger liger-kernel==0.8.5
fetch sonic sonic-moe==0.1.2.post1 quack-kernels==0.3.11 nvidia-cutlass-dsl==4.4.2 nvidia-cutlass-dsl-libs-base==4.4.2 einops \
	apache-tvm-ffi==0.1.15.post2 torch-c-dlpack-ext==0.1.5
