"""Other people's MoE layers beside ours on this CPU, the same weights and inputs, in turn: `moesaic bench device`, SwiGLU only.

transformers and DeepSpeed are optional; a layer that is not there is listed with the reason.

    python benchmarks/peers.py --json peers.json
"""

from __future__ import annotations

import sys

from moesaic.cli.bench.device import run

if __name__ == "__main__":
    sys.exit(run(["--only", "swiglu", *sys.argv[1:]]))
