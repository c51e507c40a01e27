"""The progress display of training."""

from __future__ import annotations

import io

from rich.console import Console

from moesaic.train.progress import TrainingProgress, status


def test_the_progress_bar_says_loss_speed_mfu_and_balance() -> None:
    layers = [{"max_violation": 0.5}, {"max_violation": 1.5}]
    values = {"loss": 1.25, "tokens_per_second": 6579.0, "mfu": 0.061, "layers": layers}
    assert status(values) == "loss 1.250  6,579 tokens/s  MFU 6.1%  MaxVio 1.00"
    del values["mfu"]
    assert status(values) == "loss 1.250  6,579 tokens/s  MaxVio 1.00"
    assert "MaxVio" not in status(values | {"layers": []})


def test_lines_appear_on_a_terminal_and_elsewhere() -> None:
    for terminal in (True, False):
        out = io.StringIO()
        with TrainingProgress(
            3, 0, console=Console(file=out, force_terminal=terminal, width=120), label="moe"
        ) as progress:
            progress.advance(1, "loss 1.250")
            progress.say("moe: step 1, validation 1.2000 nats/byte")
            progress.advance(2)
        assert "moe: step 1, validation 1.2000 nats/byte" in out.getvalue()
        assert "loss 1.250" in out.getvalue()
        assert ("moe: step 1, loss 1.250\n" in out.getvalue()) is not terminal
