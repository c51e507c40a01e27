"""Traces of one step: kernels in their order take what the trace takes, and files that are none are
refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from moesaic.errors import InputError
from moesaic_lab.ledger.page import claims
from moesaic_lab.ledger.records import Entry
from moesaic_lab.ledger.trace import laid_out, read_kernels, trace

HEAD = "stream,kind,start_us,duration_us\n"


def written(folder: Path, *lines: str) -> Path:
    path = folder / "kernels.csv"
    path.write_text(HEAD + "\n".join(lines) + "\n", encoding="utf-8")
    return path


def test_a_kernel_waits_for_its_stream_and_for_what_had_ended_elsewhere(tmp_path: Path) -> None:
    """b waits for a on its stream, c for b on the other, d for both; the gap before d is nobody's.
    Launches take 2."""
    path = written(
        tmp_path,
        "compute,a,0,10",
        "compute,b,12,20",
        "communication,c,33,40",
        "compute,d,105,5",
        "compute,e,112,8",
    )
    # 10 + 2 + 20 + 2, c 40 + 2, d 5 + 2, e 8 + 2
    assert laid_out(read_kernels(path)) == pytest.approx((34 + 42 + 7 + 10) * 1e-6)


def test_what_had_not_ended_is_not_waited_for(tmp_path: Path) -> None:
    """The second kernel of the one stream begins while the other's runs."""
    path = written(tmp_path, "compute,a,0,10", "communication,b,0,100", "compute,c,10,50")
    assert laid_out(read_kernels(path)) == pytest.approx(100e-6)


def test_a_trace_gives_both_claims_and_counts_nowhere_else(
    ledger_entries: list[Entry], tmp_path: Path
) -> None:
    path = written(tmp_path, *(f"compute,x,{1000 * n},998" for n in range(100)))
    found = trace(path)
    assert [each.kind for each in found] == ["trace", "trace"]
    assert found[0].ratio == pytest.approx(1.0, rel=1e-3)
    assert 50 < found[1].predicted < 300  # milliseconds of four layers forward beside four backward
    made = {claim.name: claim for claim in claims([*ledger_entries, *found])}
    assert made["ledger.trace_order"].holds
    assert made["ledger.trace_predicted"].value == pytest.approx(found[1].error)
    assert not {claim.name for claim in claims(ledger_entries)} & {
        "ledger.trace_order",
        "ledger.trace_predicted",
    }


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        (
            ("compute,a,zero,10",),
            "a line per kernel with stream, kind, start_us, duration_us is wanted",
        ),
        (("compute,a,0",), "a line per kernel with stream, kind, start_us, duration_us is wanted"),
        ((), "0 kernels on 0 streams: give at least one kernel"),
        (("compute,a,0,-1",), "no duration below 0"),
        (tuple(f"{n},a,0,1" for n in range(4)), "4 kernels on 4 streams"),
    ],
)
def test_files_that_are_no_trace_are_one_line(
    tmp_path: Path, lines: tuple[str, ...], words: str
) -> None:
    with pytest.raises(InputError) as refusal:
        read_kernels(written(tmp_path, *lines))
    assert words in str(refusal.value)
    assert "\n" not in str(refusal.value)


def test_a_file_that_is_not_there_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(
        InputError, match=r"none\.csv: cannot be read \(No such file or directory\)"
    ):
        read_kernels(tmp_path / "none.csv")
