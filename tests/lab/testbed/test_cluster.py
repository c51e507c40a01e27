"""Functions and commands on the ranks of a bed: what comes back, and what is said when a rank
fails."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap

import pytest
import torch
import torch.distributed as dist

from moesaic.errors import InputError
from moesaic_testbed import Change, RankError
from moesaic_testbed import cluster as open_cluster


def about(word):
    """What a rank knows of itself."""
    total = torch.full((3,), dist.get_rank(), dtype=torch.int64)
    dist.all_reduce(total)
    names = (
        "RANK",
        "WORLD_SIZE",
        "LOCAL_RANK",
        "LOCAL_WORLD_SIZE",
        "GROUP_RANK",
        "OMP_NUM_THREADS",
        "GLOO_SOCKET_IFNAME",
    )
    return (
        word,
        total,
        [os.environ[name] for name in names],
        torch.get_num_threads(),
        dist.get_backend(),
    )


def raise_on(rank):
    if dist.get_rank() == rank:
        raise InputError("dim=7: must be even")
    dist.barrier()


def die_on(rank, how):
    if dist.get_rank() == rank:
        os.kill(os.getpid(), how) if how else os._exit(5)
    dist.barrier()


def network():
    return os.readlink("/proc/self/ns/net"), os.getppid()


def return_a_lambda():
    return lambda: None


def leave_a_child():
    return subprocess.Popen(["sleep", "1000"]).pid


def is_running(pid):
    return os.path.exists(f"/proc/{pid}")


def rate_of_link():
    shown = subprocess.run(
        ["tc", "class", "show", "dev", "eth0"], capture_output=True, text=True, check=True
    ).stdout
    return shown.split("rate ")[1].split()[0]


def rates_seen(last):
    """Look at this node's link, on node 1 until it has a rate; returns the different rates that it
    had."""
    seen = [rate_of_link()]
    while dist.get_rank() == 1 and seen[-1] != last:
        rate = rate_of_link()
        seen += [rate] if rate != seen[-1] else []
    dist.barrier()
    return seen


def test_a_function_runs_on_every_rank_as_under_torchrun(cluster):
    results = cluster(2, 2).run(about, "hello", threads=2)
    for rank, (word, total, names, threads, backend) in enumerate(results):
        assert (word, threads, backend) == ("hello", 2, "gloo")
        assert torch.equal(total, torch.full((3,), 6))
        assert names == [str(rank), "4", str(rank % 2), "2", str(rank // 2), "2", "eth0"]


def test_ranks_of_a_node_share_its_network_and_no_other(cluster):
    results = cluster(2, 2).run(network)
    nets = [net for net, _ in results]
    assert nets[0] == nets[1] != nets[2] == nets[3]
    assert os.readlink("/proc/self/ns/net") not in nets
    assert {parent for _, parent in results} == {1}  # number 1 of a process namespace


def test_an_exception_names_rank_and_place_and_the_bed_lives_on(cluster):
    bed = cluster(2, 1)
    with pytest.raises(RankError) as error:
        bed.run(raise_on, 1)
    text = str(error.value)
    assert text.startswith(
        "rank 1 failed: moesaic.errors.InputError: dim=7: must be even\n\nTraceback"
    )
    assert "in raise_on" in text
    assert error.value.rank == 1
    assert isinstance(error.value.__cause__, InputError)
    assert str(error.value.__cause__) == "dim=7: must be even"
    assert [word for word, *_ in bed.run(about, 5)] == [5, 5]


@pytest.mark.parametrize(
    ("how", "message"),
    [
        (signal.SIGKILL, "rank 2 was killed by SIGKILL before it returned"),
        (signal.SIGSEGV, "rank 2 was killed by SIGSEGV before it returned"),
        (0, "rank 2 left with exit code 5 before it returned"),
    ],
)
def test_a_rank_that_dies_is_named_and_not_those_that_miss_it(cluster, how, message):
    with pytest.raises(RankError) as error:
        cluster(2, 2).run(die_on, 2, how)
    assert (str(error.value), error.value.rank) == (message, 2)


def test_what_cannot_travel_is_refused(cluster):
    bed = cluster(1, 1)
    with pytest.raises(
        InputError, match=r"cannot be sent to ranks .* define it at the top level of a module"
    ):
        bed.run(lambda: None)
    with pytest.raises(
        RankError, match="rank 0 failed: TypeError: what the function returned cannot be sent back"
    ):
        bed.run(return_a_lambda)
    with pytest.raises(InputError, match="threads=0: must be at least 1"):
        bed.run(about, 1, threads=0)
    with pytest.raises(InputError, match="no command to run"):
        bed.command([])


def test_a_module_that_is_not_there_is_an_error_of_the_bed(cluster, monkeypatch):
    bed = cluster(1, 1)
    monkeypatch.setattr(about, "__module__", "moesaic_nowhere")
    monkeypatch.setitem(sys.modules, "moesaic_nowhere", sys.modules[__name__])
    with pytest.raises(
        RankError, match=r"^ModuleNotFoundError: No module named 'moesaic_nowhere'"
    ) as error:
        bed.run(about, 1)
    assert error.value.rank is None


def test_nothing_of_a_run_is_left_for_the_next(cluster):
    bed = cluster(1, 1)
    (pid,) = bed.run(leave_a_child)
    assert pid > 1
    assert bed.run(is_running, pid) == [False]
    assert bed.run(is_running, 1) == [True]


def test_two_beds_at_once(cluster):
    first = cluster(2, 1)
    second = cluster(2, 1, inter="1gbit")
    assert first.run(about, "a")[1][0] == "a"
    assert second.run(about, "b")[1][0] == "b"
    assert not {net for net, _ in first.run(network)} & {net for net, _ in second.run(network)}


def test_a_link_changes_during_a_run_and_changes_back(cluster):
    changes = (
        Change(at_seconds=2, node=1, rate="3mbit"),
        Change(at_seconds=1, node=1, rate="2mbit"),
    )
    bed = cluster(2, 1, changes=changes)
    other, own = bed.run(rates_seen, "3Mbit")
    assert other == ["200Mbit"]
    # of which a rank that could not look for a second has missed some
    rates = ["200Mbit", "2Mbit", "3Mbit"]
    assert own == [rate for rate in rates if rate in own]
    assert bed.run(rate_of_link) == ["200Mbit", "200Mbit"]


def test_commands_get_the_environment_of_torchrun(cluster, capfd, tmp_path):
    bed = cluster(2, 2)
    script = (
        "echo $RANK $LOCAL_RANK $GROUP_RANK $NODE_RANK $WORLD_SIZE $MASTER_ADDR $EXTRA $(pwd); "
        "touch said$RANK; "
    )
    # the first that fails ends the others
    script += "while [ $(ls | wc -l) -lt 4 ]; do sleep 0.05; done; exit $RANK"
    assert bed.command(["sh", "-c", script], env={"EXTRA": "x"}, cwd=tmp_path) == [0, 1, 2, 3]
    lines = sorted(capfd.readouterr().out.splitlines())
    assert lines == [
        f"{rank} {rank % 2} {rank // 2} {rank // 2} 4 10.64.0.2 x {tmp_path}" for rank in range(4)
    ]
    assert bed.command(["moesaic-no-such-command"]) == [127] * 4
    assert "moesaic-no-such-command: No such file or directory" in capfd.readouterr().err


def test_commands_can_form_a_group_as_under_torchrun(cluster, capfd):
    code = """
        import os, torch, torch.distributed as dist
        assert dist.is_torchelastic_launched()
        dist.init_process_group("gloo")
        total = torch.tensor(dist.get_rank())
        dist.all_reduce(total)
        os.write(1, f"total {total.item()}\\n".encode())  # one write: lines of two ranks do not mix
        dist.barrier()
        os._exit(0)
    """
    assert cluster(2, 1).command([sys.executable, "-c", textwrap.dedent(code)]) == [0, 0]
    assert capfd.readouterr().out.splitlines() == ["total 1", "total 1"]


def test_ranks_that_outlive_a_failed_one_are_ended(cluster, monkeypatch):
    codes = cluster(2, 1).command(["sh", "-c", '[ "$RANK" = 1 ] && exit 3; exec sleep 1000'])
    assert codes == [-signal.SIGTERM, 3]


def test_a_function_of_a_script(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        textwrap.dedent(
            """
            from moesaic_testbed import cluster

            def double(x):
                import torch.distributed as dist

                return 2 * x + dist.get_rank()

            if __name__ == "__main__":
                with cluster(2, 1) as bed:
                    print(bed.run(double, 21))
            """
        )
    )
    done = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, check=False
    )
    if "no emulated cluster" in done.stderr:
        pytest.skip(done.stderr.splitlines()[-1])
    assert (done.stdout, done.stderr) == ("[42, 43]\n", "")


def test_a_closed_bed_says_so(cluster_launcher):
    with open_cluster(1, 1) as bed:
        pass
    with pytest.raises(RuntimeError, match="this cluster is closed: make a new one"):
        bed.run(about, 1)
    bed.close()
