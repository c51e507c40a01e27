"""Configurations of benchmarks on beds: each mistake is refused in one line that names the
field."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from moesaic.errors import InputError
from moesaic_lab.balance.config import read_config as balance
from moesaic_lab.comm.config import read_config as comm
from moesaic_lab.layer.config import read_config as layer
from moesaic_lab.model.config import read_config as model
from moesaic_lab.train.config import read_config as train

MODEL = "[[cases]]\n"
BAD: dict[tuple[Callable[[Path], object], str], str] = {
    # what all share
    (comm, "dimm = 4"): "unknown field dimm: did you mean dim?",
    (comm, "dim = 'x'"): "dim must be a whole number, got 'x'",
    (
        comm,
        "[exchange]\nnodes = 2",
    ): "exchange must be a list of tables: write [[exchange]] above each",
    (comm, "[[exchange]]\nnodez = 2"): "exchange[0].nodez: did you mean nodes?",
    (layer, "[[schedule]]\n"): "unknown field schedule: did you mean schedules?",
    (layer, "[[schedules]]\nrepeats = 0\n"): "repeats=0: must be above 0",
    (layer, "[[codecs]]\ninter = '5'\n"): "inter='5' is no rate",
    (balance, "skewed = 3"): "skewed must be a list of tables: write [[skewed]] above each",
    (balance, "shares = 3"): "shares must be a table: write [shares]",
    (balance, '[[skewed]]\nname = "a"\n[[recorded]]\nname = "a"'): "two recorded have one name",
    # all-to-alls
    (comm, "dim = 0"): "dim=0, warmup=1: must be at least 1 and 0",
    (comm, "[[exchange]]\nmethods = ['linaer']"): "unknown method linaer: did you mean linear?",
    (
        comm,
        "[[exchange]]\nsizes_kib = [3]",
    ): "exchange on 2x2: 3 KiB are not a whole number of rows of 256 float32",
    (
        comm,
        "[[exchange]]\nsizes_kib = []",
    ): "exchange on 2x2: sizes_kib is empty: list at least one size",
    (
        comm,
        "[[dispatch]]\nnum_experts = 6",
    ): "dispatch on 2x2: num_experts=6 does not split over 4 ranks",
    (comm, "[[dispatch]]\ntop_k = 17"): "dispatch on 2x2: top_k=17 of num_experts=16",
    (comm, "[[dispatch]]\nchunks = [0]"): "dispatch on 2x2: chunks=(0,): list numbers from 1 on",
    # layers
    (layer, "[[orders]]\norders = ['best']\n"): "orders[0].orders",
    (layer, "[[codecs]]\ngflops = 0\n"): "gflops=0.0: must be above 0",
    (
        layer,
        "[[codecs]]\ntokens_per_rank = 24\n",
    ): "tokens_per_rank=24 must be a multiple of num_experts=16",
    (layer, "[[codecs]]\ntop_k = 17\n"): "top_k=17 of num_experts=16",
    # training
    (train, '[[case]]\npeers = ["deepsped"]'): "unknown peer deepsped: did you mean deepspeed?",
    (train, "[[case]]\nbatch_size = 6"): "batch_size=6 does not split over 4 ranks",
    (train, "[[candidate]]\netp = 3\n[[case]]"): "etp=3 does not divide the 4 ranks",
    (train, "[[layout]]\nworlds = [3]"): "3 does not divide rows_per_expert=512",
    (train, "[[case]]\nshare_low = 0.9\nshare_high = 0.1"): "give a range in 0 to 1",
    # the cost model
    (model, MODEL + "etp=3"): "etp=3 does not divide",
    (model, MODEL + "tokens_per_rank=10"): "multiple of num_experts",
    (model, MODEL + "gflops=0"): "gflops=0",
    (model, MODEL + "bedd=1"): "cases[0].bedd",
    # skewed routing
    (balance, "[[skewed]]\ngflops = 0"): "gflops=0.0: must be above 0",
    (balance, "[[skewed]]\ntop_k = 17"): "bed: top_k=17 of 16 experts",
}


@pytest.mark.parametrize(("case", "message"), BAD.items())
def test_a_bad_configuration_gets_one_line(
    tmp_path: Path, case: tuple[Callable[[Path], object], str], message: str
) -> None:
    read_config, text = case
    (tmp_path / "bad.toml").write_text(text)
    with pytest.raises(InputError) as error:
        read_config(tmp_path / "bad.toml")
    assert message in str(error.value)
    assert "\n" not in str(error.value)
