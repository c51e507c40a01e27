"""Foreign trace formats: files as other software writes them, round trips, and refusals in one
line."""

from __future__ import annotations

import base64
import io
import json
from pathlib import Path

import numpy as np
import pytest

from helpers import refused
from moesaic.errors import InputError
from moesaic.traces.formats import FORMATS, ReadOptions
from moesaic.traces.formats.base import tokens_segment
from moesaic.traces.load import faults
from moesaic.traces.trace import Trace, TraceSegment, TraceShape
from moesaic_lab.traces.synthetic import SyntheticRouting, make_trace

EXPERTS = [[[0, 3], [1, 2]], [[2, 0], [3, 1]], [[1, 0], [0, 2]]]
"""The experts of three tokens in two layers, top 2 of 4, in the layout of vLLM and SGLang."""


def opened(name: str, path: Path, **options: object) -> Trace:
    return Trace.of(FORMATS[name].read(path, ReadOptions(**options)), "it")  # type: ignore[arg-type]


def test_megatron_ranks_micro_batches_and_pipeline_stages(tmp_path):
    def line(step, layer, rank, experts, **more):
        record = {
            "step": step,
            "stage": "pre_dispatch",
            "block": "decoder",
            "layer": layer,
            "rank": rank,
        }
        return json.dumps(
            {**record, "num_tokens": len(experts), "topk": 2, "top_indices": experts, **more}
        )

    one = [[0, 1], [2, 3]]
    other = [[3, 0], [1, 2]]
    lines = {  # ranks 0 and 1 are one pipeline stage, ranks 2 and 3 the other; two micro-batches
        0: [line(4, 2, 0, one), line(4, 2, 0, other)],
        1: [line(4, 2, 1, other), line(4, 2, 1, one)],
        2: [line(4, 1, 2, one, block="mtp", mtp_idx=0), line(4, 1, 2, one, block="mtp", mtp_idx=0)],
        3: [
            line(4, 1, 3, other, block="mtp", mtp_idx=0),
            line(4, 1, 3, other, block="mtp", mtp_idx=0),
        ],
    }
    for rank, text in lines.items():
        (tmp_path / f"router_trace_rank{rank}.jsonl").write_text("\n".join(text) + "\n")
    (tmp_path / "hidden_states_rank0.bin").write_bytes(b"ignored")
    trace = opened("megatron", tmp_path)
    assert trace.shape == TraceShape(
        num_layers=2, num_experts=4, top_k=2, sequences=2, seq_len=2, accumulation=2
    )
    assert trace.experts(0, 4, 0).tolist() == one + other  # the decoder's layer comes first
    assert trace.experts(0, 4, 1).tolist() == other + one
    assert trace.experts(1, 4, 1).tolist() == one + other


def test_requests_of_vllm_and_sglang(tmp_path):
    experts = np.array(EXPERTS, dtype=np.int16)
    data = io.BytesIO()
    np.save(data, experts[1:])
    npy, nested, encoded, flat, bare = (
        tmp_path / name for name in ("a.npy", "b.json", "c.json", "d.json", "e.json")
    )
    np.save(npy, experts)
    nested.write_text(
        json.dumps(
            {"prompt_routed_experts": EXPERTS[:1], "choices": [{"routed_experts": EXPERTS[1:]}]}
        )
    )
    text = base64.b64encode(data.getvalue()).decode()
    encoded.write_text(
        json.dumps({"prompt_routed_experts": EXPERTS[:1], "choices": [{"routed_experts": text}]})
    )
    raw = base64.b64encode(experts.astype("<i4").tobytes()).decode()
    flat.write_text(
        json.dumps(
            [{"meta_info": {"routed_experts": raw, "prompt_tokens": 3, "completion_tokens": 1}}]
        )
    )
    bare.write_text(json.dumps({"choices": [{"sgl_ext": {"routed_experts": raw}}]}))
    actual = [
        opened("vllm", npy),
        opened("vllm", nested),
        opened("vllm", encoded),
        opened("sglang", flat, top_k=2),
    ]
    for trace in actual:
        assert trace.shape == TraceShape(
            num_layers=2, num_experts=4, top_k=2, sequences=1, seq_len=3
        )
        assert [trace.experts(layer, 0).tolist() for layer in (0, 1)] == np.swapaxes(
            EXPERTS, 0, 1
        ).tolist()
    assert "SGLang responses lack the shape" in refused(opened, "sglang", bare, top_k=2)


def test_each_response_of_a_list_is_read(tmp_path):
    answers = [{"routed_experts": EXPERTS}, {"routed_experts": [*EXPERTS, EXPERTS[0]]}]
    path = tmp_path / "a.json"
    path.write_text(json.dumps(answers))
    read = opened("vllm", path)
    expected = np.swapaxes([*EXPERTS, *EXPERTS, EXPERTS[0]], 0, 1).tolist()
    assert [read.experts(layer, 0).tolist() for layer in (0, 1)] == expected


@pytest.mark.parametrize("name", FORMATS)
def test_what_is_written_is_read_again(tmp_path, name):
    made = make_trace(
        SyntheticRouting(
            steps=2,
            num_layers=2,
            num_experts=8,
            sequences=4,
            seq_len=16,
            groups=2,
            skew=0.7,
            tokens=True,
        )
    )
    FORMATS[name].write(made, tmp_path / "out")
    read = opened(name, tmp_path / "out", top_k=2, num_experts=8)
    loads = made.loads()
    if name in ("vllm", "sglang"):  # these formats have no steps
        loads = loads.sum(0, keepdims=True)
    assert (read.loads() == loads).all()
    assert faults(read) == []
    if name == "megatron":
        assert (read.experts(1, 1) == made.experts(1, 1)).all()


def test_check_names_each_kind_of_fault():
    shape = TraceShape(num_layers=3, num_experts=4, top_k=2, sequences=1, seq_len=2)
    experts = np.zeros((3, 1, 3, 2, 2), dtype=np.int64)
    experts[..., 1] = 1
    experts[0, 0, 1, 0] = (2, 2)
    assert faults(Trace.of(TraceSegment(shape, "tokens", np.array([0, 1, 2]), experts))) == [
        "top-k: layer 1: 1 tokens chose an expert twice"
    ]
    counts = np.ones((4, 1, 3, 1, 4), dtype=np.int64)
    counts[:, 0, 1] = 0
    counts[1, 0, 0, 0, 0] = 0
    assert faults(Trace.of(TraceSegment(shape, "counts", np.array([0, 10, 30, 40]), counts))) == [
        "sums: layer 0: 1 sequences do not have 4 copies, first in step 10, sequence 0: 3",
        "layers: layer 1 has no copies at all",
        "gaps: 1 in steps 0 and 10 and 30 and 40 that are 10 apart: 10 to 30",
    ]


RECORD = {"step": 0, "layer": 1, "rank": 0, "num_tokens": 1, "topk": 1, "top_indices": [[0]]}


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("megatron", "", "has no records"),
        (
            "megatron",
            json.dumps({**RECORD, "num_tokens": float("inf")}),
            "is not a record of Megatron's router trace",
        ),
        ("megatron", json.dumps({**RECORD, "step": 10**30}), "is damaged, or not from"),
        ("megatron", "[" * 100_000, "is not a record of Megatron's router trace"),
        ("vllm", '""', "holds no routed experts"),
        ("vllm", '{"routed_experts": 3}', "holds no routed experts"),
        ("sglang", '{"routed_experts": "AAAA", "shape": [[2]]}', "holds no routed experts"),
        ("vllm", "[" * 100_000, "holds no routed experts"),
        ("megatron", "{}\n", "is not a record of Megatron's router trace"),
        ("vllm", "{}", "holds no routed experts"),
        ("vllm", "[]", "holds no request"),
        ("vllm", '[{"routed_experts": [[[1]]]}, 3]', "holds no routed experts"),
        (
            "vllm",
            '{"choices": [{"routed_experts": [[[1]]]}, {"routed_experts": [[[0]]]}]}',
            "it has 2 choices: ask for one, n=1",
        ),
        (
            "vllm",
            f'{{"routed_experts": [[[{2**40}]]]}}',
            "1,099,511,627,777 experts in a layer are not possible",
        ),
    ],
)
def test_damaged_files_are_refused_in_one_line(tmp_path, name, text, says):
    path = tmp_path / {"megatron": "router_trace_rank0.jsonl"}.get(name, "a.json")
    path.write_text(text)
    with pytest.raises(InputError, match=says) as refused:
        FORMATS[name].read(path, ReadOptions(top_k=1))
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("data", [b"", b"PK\3\4"])
def test_what_is_no_array_is_refused(tmp_path, data):
    path = tmp_path / "a.npy"
    path.write_bytes(data)
    assert "holds no routed experts" in refused(lambda: FORMATS["vllm"].read(path, ReadOptions()))


def test_padding_in_a_trace_is_refused_for_what_it_is() -> None:
    table = np.array([[[[[0, 512], [-1, -1]]]]])
    line = refused(tokens_segment, table, steps=[0], sequences=1, num_experts=513, source={})
    assert "it has expert -1" in line
    assert "padding" in line
    line = refused(tokens_segment, abs(table), steps=[0], sequences=1, num_experts=9, source={})
    assert "give --num-experts 513 or more" in line


@pytest.mark.parametrize("padding", [np.uint8(255), np.uint16(65535), np.int16(0)])
def test_padding_that_looks_like_an_expert_is_refused(tmp_path, padding) -> None:
    experts = np.array(EXPERTS, dtype=padding.dtype)
    path = tmp_path / "a.npy"
    np.save(path, np.concatenate([experts, np.full_like(experts, padding)]))
    assert "a token has an expert twice, as padding has" in refused(
        lambda: FORMATS["vllm"].read(path, ReadOptions())
    )
    experts[0, 0, 0] = padding
    np.save(path, experts)  # of a token's experts one may have that number
    read = FORMATS["vllm"].read(path, ReadOptions())
    assert read.shape.num_experts == max(4, int(padding) + 1)


TABLE = """rank,layer,micro_batch,expert,count,note
1,5,0,3,4,x
0,5,0,3,3,
0,5,0,2,1,
1,5,1,1,4,
0,5,1,0,4,
0,7,0,1,4,
1,7,0,2,2,
1,7,0,0,2,
0,7,1,3,4,
1,7,1,2,4,
"""
"""Copies of two ranks in two layers and two micro-batches."""


def test_a_plain_table_of_counts_is_read(tmp_path):
    path = tmp_path / "table.csv"
    path.write_text(TABLE)
    trace = opened("counts", path, num_experts=6)
    assert trace.holds == "counts"
    assert trace.shape == TraceShape(
        num_layers=2, num_experts=6, top_k=1, sequences=2, seq_len=4, accumulation=2
    )
    assert trace.steps == [0]
    assert trace.counts(0, 0, 0).tolist() == [[0, 0, 1, 3, 0, 0], [0, 0, 0, 4, 0, 0]]
    assert trace.counts(0, 0, 1).tolist() == [[4, 0, 0, 0, 0, 0], [0, 4, 0, 0, 0, 0]]
    assert trace.counts(1, 0, 0).tolist() == [[0, 4, 0, 0, 0, 0], [2, 0, 2, 0, 0, 0]]
    assert trace.counts(1, 0, 1).tolist() == [[0, 0, 0, 4, 0, 0], [0, 0, 4, 0, 0, 0]]
    assert faults(trace) == []


def test_a_table_of_counts_with_steps_goes_there_and_back(tmp_path):
    lines = ["step,layer,micro_batch,rank,expert,count"]
    lines += [
        f"{step},0,0,{rank},{expert},{2 + step // 10 * (1 if expert else -1)}"
        for step in (0, 10)
        for rank in (0, 1)
        for expert in (0, 1)
    ]
    first = tmp_path / "first.csv"
    first.write_text("\n".join(lines) + "\n")
    trace = opened("counts", first, top_k=1)
    assert trace.steps == [0, 10]
    assert trace.counts(0, 10).tolist() == [[1, 3], [1, 3]]
    second = tmp_path / "second.csv"
    FORMATS["counts"].write(trace, second)
    again = opened("counts", second)
    assert again.shape == trace.shape
    assert all((again.counts(0, step) == trace.counts(0, step)).all() for step in (0, 10))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("micro_batch", "batch"), "has no column micro_batch"),
        (("1,5,1,1,4,", "1,5,1,1,four,"), "line 5: is not a row of whole numbers"),
        (("1,5,1,1,4,", "1,5,1,1,,"), "line 5: is not a row of whole numbers"),
        (("1,5,1,1,4,", "1,5,1"), "line 5: is not a row of whole numbers"),
        (("1,5,1,1,4,", "1,5,1,1,-4,"), "line 5: has a number below 0"),
        (("0,5,0,3,3,", "0,5,0,2,3,"), "line 4: this rank and expert stand twice"),
        (("1,5,1,1,4,", "1,5,1,2000000,4,"), "give --num-experts"),
        (("1,5,1,1,4,", f"1,5,1,1,{1 << 70},"), "a number that no run reaches"),
        ((TABLE[TABLE.index("\n") :], "\n"), "has no rows"),
    ],
)
def test_a_damaged_table_of_counts_is_refused_in_one_line(tmp_path, change, message):
    path = tmp_path / "table.csv"
    path.write_text(TABLE.replace(*change))
    with pytest.raises(InputError, match=message) as error:
        opened("counts", path)
    assert "\n" not in str(error.value)


def test_copies_of_a_table_that_do_not_fit_top_k_are_refused(tmp_path):
    path = tmp_path / "table.csv"
    path.write_text(TABLE)
    with pytest.raises(InputError, match="4 copies are not a multiple of top_k=3"):
        opened("counts", path, top_k=3)
    with pytest.raises(InputError, match="an expert has more copies than there are tokens"):
        opened("counts", path, top_k=2)
