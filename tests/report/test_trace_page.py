"""The page about a trace shows its numbers, loads nothing, and no name can break it."""

from __future__ import annotations

import numpy as np
import pytest

from helpers import refused
from moesaic.errors import InputError
from moesaic.report.style import expert_loads
from moesaic.report.trace_page import drawn_layers, trace_in_words, violations, write_trace_page
from moesaic.traces.load import layer_loads
from moesaic.traces.trace import Trace, write_segment
from moesaic_lab.traces.synthetic import SyntheticRouting, make_segment


def made(name: str = "a trace", **changes: object) -> Trace:
    return Trace.of(
        make_segment(
            SyntheticRouting(**{"steps": 5, "num_layers": 2, "skew": 1.0, "drift": 0.5, **changes})
        ),
        name,
    )


def test_the_charts_show_the_figures():
    trace = made()
    loads = layer_loads(trace)
    lines = {trace_.name: trace_.y for trace_ in violations(trace.steps, loads).data}
    assert list(lines) == ["layer 0", "layer 1", "mean"]
    assert list(lines["layer 1"]) == pytest.approx(loads[1].max_violation, rel=1e-5)
    assert lines["mean"][2] == pytest.approx(
        np.mean([load.max_violation[2] for load in loads]), rel=1e-5
    )
    (heat,) = expert_loads(trace.steps, loads[0].shares.tolist()).data
    assert np.array(heat.z) == pytest.approx(loads[0].shares.T * 16, abs=1e-3)
    assert list(heat.x) == [0, 1, 2, 3, 4]


def test_the_page_holds_everything_and_escapes_names(tmp_path):
    trace = made("<script>alert(1)</script>")
    text = write_trace_page(trace, layer_loads(trace), tmp_path / "new" / "page.html").read_text(
        encoding="utf-8"
    )
    assert "<script>alert" not in text
    for part in (
        "MaxVio",
        "Load of the experts, layer 0",
        "Load of the experts, layer 1",
        "default-src 'none'",
    ):
        assert part in text
    assert (
        "counts of 2 MoE layers with 16 experts, 2 per token; steps 0 to 4 of 16 sequences of "
        "256 tokens"
    ) in text


def test_deep_models_show_layers_evenly_spread():
    assert drawn_layers(12) == list(range(12))
    shown = drawn_layers(60)
    assert (shown[0], shown[-1], len(shown)) == (0, 59, 12)
    trace = made(num_layers=14, steps=2, sequences=2, seq_len=8)
    assert len(violations(trace.steps, layer_loads(trace)).data) == 15


def test_words_name_micro_batches_and_tokens(tmp_path):
    assert trace_in_words(made(tokens=True)).startswith("every token's experts of 2 MoE layers")
    assert "is a folder: name a file" in refused(lambda: write_trace_page(made(), [], tmp_path))
    write_segment(make_segment(SyntheticRouting(steps=1)), tmp_path / "a.npz")
    with pytest.raises(InputError, match="cannot be written"):
        write_trace_page(made(), layer_loads(made()), tmp_path / "a.npz" / "page.html")
