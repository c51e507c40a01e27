"""Virtual accelerators: the seconds that they charge, the shapes and the bytes that they hand on.
No time is measured."""

from __future__ import annotations

import pytest
import torch

from moesaic.codecs import CODECS
from moesaic.comm.loopback import run_ranks
from moesaic.comm.mesh import Mesh
from moesaic.comm.transport import AbstractTransport, NoTransport
from moesaic.errors import InputError
from moesaic.experts.experts import ExpertCall
from moesaic.kernels.codecs import codec_named
from moesaic.layer import MoE
from moesaic.program.compile import compile_plan
from moesaic.program.grid import Grid
from moesaic.program.plan import Codec, Plan
from moesaic.program.task import Op
from moesaic_lab.recorder import Recorder
from moesaic_lab.virtual import Accelerator, VirtualCodec, virtual_codecs, virtual_experts

DIM = 8
HIDDEN = 16
EXPERTS = 4


class Slept:
    """A clock that a sleep moves on, by a factor too far."""

    def __init__(self, factor: float = 1.0) -> None:
        self.now = 0.0
        self.naps = list[float]()
        self.factor = factor

    def sleep(self, seconds: float) -> None:
        self.naps.append(seconds)
        self.now += self.factor * seconds

    def clock(self) -> float:
        return self.now


def accelerator(slept: Slept | None = None, **options: float) -> Accelerator:
    slept = slept or Slept()
    given = {
        "flops_per_second": 1e6,
        "coded_bytes_per_second": 1e6,
        "shortest_sleep": 0.0,
        **options,
    }
    return Accelerator(**given, sleep=slept.sleep, clock=slept.clock)  # type: ignore[arg-type]


def test_charges_add_up_to_flops_and_bytes_over_their_rates() -> None:
    slept = Slept()
    device = accelerator(slept)
    device.multiply(3e6)
    device.code(5e5)
    assert slept.naps == [3.0, 0.5]
    assert device.charged == 3.5


def test_short_tasks_add_up_until_they_are_worth_a_sleep() -> None:
    slept = Slept()
    device = accelerator(slept, shortest_sleep=1e-3)
    for _ in range(5):
        device.charge(4e-4)
    assert slept.naps == [pytest.approx(1.2e-3)]
    assert device.charged == pytest.approx(2e-3)
    device.charge(4e-4)
    assert slept.naps == [pytest.approx(1.2e-3), pytest.approx(1.2e-3)]


def test_a_sleep_that_took_too_long_shortens_the_next_one() -> None:
    slept = Slept(factor=1.25)
    device = accelerator(slept)
    device.charge(1.0)
    device.charge(1.0)
    assert slept.naps == [1.0, 0.75]
    assert device.charged == 2.0


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"flops_per_second": 0.0}, "flops_per_second above 0, got 0.0"),
        ({"flops_per_second": float("nan")}, "flops_per_second above 0, got nan"),
        ({"coded_bytes_per_second": -1.0}, "coded_bytes_per_second=-1.0: write bytes per second"),
    ],
)
def test_rates_that_make_no_sense_are_refused(options: dict[str, float], words: str) -> None:
    with pytest.raises(InputError, match=words):
        accelerator(**options)


def test_a_codec_without_a_rate_is_refused() -> None:
    device = accelerator(coded_bytes_per_second=0.0)
    with pytest.raises(InputError, match="give the virtual accelerator coded_bytes_per_second"):
        VirtualCodec(codec_named("int8"), device).encode(torch.zeros(2, 3))


def test_experts_charge_two_flops_per_row_and_element_forward_and_four_backward() -> None:
    device = accelerator()
    experts = virtual_experts(device)(DIM, HIDDEN, EXPERTS)
    weights = experts.weights()[0]
    ends = torch.tensor([3, 3, 5, 10], dtype=torch.int32)
    rows = torch.randn(10, DIM)
    gates = torch.rand(10)
    call = ExpertCall(weights, (), rows, gates, ends)
    out, kept = experts.run(call)
    forward = 2 * 10 * (2 * DIM * HIDDEN) / 1e6
    assert device.charged == pytest.approx(forward)
    assert torch.equal(out, rows)
    dy = torch.randn(10, DIM)
    d_rows, d_gates, d_weights, d_common = experts.gradients(call, kept, dy)
    assert device.charged == pytest.approx(3 * forward)
    assert torch.equal(d_rows, dy)
    assert d_gates is not None
    assert d_gates.shape == gates.shape
    assert [d.shape for d in d_weights] == [w.shape for w in weights]
    assert d_common == ()
    assert all(float(d.abs().sum()) == 0 for d in (d_gates, *d_weights))
    assert experts.gradients(ExpertCall(weights, (), rows, None, ends), kept, dy)[1] is None


def test_a_shard_charges_its_share() -> None:
    device = accelerator()
    experts = virtual_experts(device)(DIM, HIDDEN, EXPERTS)
    halves = (experts.w1[:, : HIDDEN // 2], experts.w2[:, :, : HIDDEN // 2])
    ends = torch.tensor([6, 6, 6, 6], dtype=torch.int32)
    experts.run(ExpertCall(halves, (), torch.zeros(6, DIM), None, ends, 2))
    assert device.charged == pytest.approx(2 * 6 * (DIM * HIDDEN) / 1e6)


def test_packed_weights_come_back() -> None:
    experts = virtual_experts(accelerator())(DIM, HIDDEN, EXPERTS)
    weights = (torch.randn(EXPERTS, HIDDEN, DIM), torch.randn(EXPERTS, DIM, HIDDEN))
    packed = experts.pack(weights)
    assert packed.shape == (EXPERTS * HIDDEN, 2 * DIM)
    assert experts.num_units(weights) == HIDDEN
    for one, two in zip(experts.unpack(packed, EXPERTS), weights, strict=True):
        assert torch.equal(one, two)
    assert {name for name, _ in experts.named_parameters()} == {"w1", "w2"}
    assert [experts.shard_dim(name) for name in experts.names[0]] == [1, 2]


@pytest.mark.parametrize("name", [name for name in CODECS if name != "none"])
@pytest.mark.parametrize("rows", [0, 1, 5, 8])
def test_virtual_messages_are_as_long_as_the_codecs(name: str, rows: int) -> None:
    device = accelerator()
    codec = codec_named(name)
    virtual = VirtualCodec(codec_named(name), device)
    values = torch.randn(rows, 12)
    message = virtual.encode(values)
    assert message.dtype == torch.uint8
    assert len(message) == codec.num_bytes(rows, 12, torch.float32)
    assert device.charged == pytest.approx(rows * 12 * 4 / 1e6)
    back = virtual.decode(message, rows, 12, torch.float32)
    assert back.shape == values.shape
    assert back.dtype == values.dtype
    assert device.charged == pytest.approx(2 * rows * 12 * 4 / 1e6)


def test_rows_without_a_codec_arrive_as_they_are() -> None:
    device = accelerator()
    codec = virtual_codecs(device)("none")
    rows = torch.randn(3, 4)
    assert torch.equal(codec.decode(codec.encode(rows), 3, 4, torch.float32), rows)
    assert device.charged == 0


def layer_on(grid: Grid, transport: AbstractTransport, device: Accelerator, plan: Plan) -> MoE:
    torch.manual_seed(0)
    layer = MoE(DIM, HIDDEN, EXPERTS, 2, experts=virtual_experts(device), losses=())
    layer.parallelize(Mesh(grid, transport), plan)
    assert layer.on_mesh is not None
    layer.on_mesh.codecs = virtual_codecs(device)
    return layer


@pytest.mark.parametrize(
    "plan",
    [
        Plan(),
        Plan(schedule="s3", chunks=2),
        Plan(schedule="s2", gather_weights=1),
        Plan(schedule="s1", gather_weights=0),
    ],
    ids=str,
)
def test_all_ranks_of_a_layer_together_charge_every_copy_once(plan: Plan) -> None:
    grid = Grid(world=4, ep=2, etp=2, ranks_per_node=2)
    tokens = 8

    def rank(transport: AbstractTransport) -> float:
        device = accelerator()
        layer = layer_on(grid, transport, device, plan)
        x = torch.randn(
            tokens, DIM, generator=torch.Generator().manual_seed(transport.rank)
        ).requires_grad_()
        y = layer(x)
        y.sum().backward()
        assert y.shape == x.shape
        return device.charged

    copies = grid.world * tokens * 2
    assert sum(run_ranks(4, rank)) == pytest.approx(6 * copies * 2 * DIM * HIDDEN / 1e6)


@pytest.mark.parametrize("codec", ["bf16", "int8", "zfp"])
def test_a_layer_sends_what_a_real_codec_would(codec: Codec) -> None:
    grid = Grid(world=2, ep=2)

    def sent(virtual: bool) -> list[list[int]]:
        def rank(transport: AbstractTransport) -> list[int]:
            recorder = Recorder(transport)
            layer = layer_on(grid, recorder, accelerator(), Plan(codec=codec, backward_codec=codec))
            if not virtual:
                assert layer.on_mesh is not None
                del layer.on_mesh.codecs
                layer.on_mesh.codecs = codec_named
            layer(torch.ones(8, DIM, requires_grad=True)).sum().backward()
            return [message.num_bytes for each in recorder.ranges for message in each.messages]

        return run_ranks(2, rank)

    assert sent(True) == sent(False)


def test_coded_rows_are_charged_where_they_are_encoded_and_where_they_are_decoded() -> None:
    grid = Grid(world=2, ep=2)

    def rank(transport: AbstractTransport) -> tuple[float, int]:
        device = accelerator(flops_per_second=1e30)
        recorder = Recorder(transport)
        layer = layer_on(grid, recorder, device, Plan(codec="bf16", backward_codec="bf16"))
        layer(torch.randn(8, DIM, requires_grad=True)).sum().backward()
        assert layer.on_mesh is not None
        ran = layer.on_mesh.compiled
        tasks = [*ran.forward.tasks, *ran.backward.tasks]
        of_program = next(each for each in recorder.ranges if each.length == len(tasks))
        return device.charged, sum(
            m.num_bytes for m in of_program.messages if tasks[m.tag].op is Op.HOP
        )

    found = run_ranks(2, rank)
    sent = sum(num_bytes for _, num_bytes in found)
    assert sent > 0
    assert sum(charged for charged, _ in found) == pytest.approx(
        2 * 2 * sent / 1e6
    )  # twice as long in float32, at both ends


def test_one_rank_alone_charges_too() -> None:
    device = accelerator()
    layer = layer_on(Grid(world=1), NoTransport(), device, compile_plan(Plan(), Grid(world=1)).plan)
    layer(torch.randn(4, DIM))
    assert device.charged == pytest.approx(2 * 8 * 2 * DIM * HIDDEN / 1e6)
