import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import reszoo
from reszoo.errors import ReszooError
from reszoo.layers import StochasticDepth, drop_linearly, linear_rates
from reszoo.layers.stochastic_depth import MASK_UP_TO


class Block(nn.Module):
    """A residual block with a branch of BatchNorm and a convolution."""

    def __init__(self, **how):
        super().__init__()
        self.residual = StochasticDepth(nn.Conv2d(3, 3, 3, padding=1), nn.BatchNorm2d(3), **how)
        self.shortcut = nn.Identity()

    def forward(self, x):
        return self.residual(x) + self.shortcut(x)


def constant_one(**how):
    branch = StochasticDepth(nn.Linear(1, 1), **how)
    nn.init.zeros_(branch[0].weight)
    nn.init.ones_(branch[0].bias)
    return branch


@pytest.mark.parametrize("rate", [0.0, 0.05, 0.5, 0.9, 1.0])
@pytest.mark.parametrize("per", ["batch", "sample"])
def test_the_mean_over_many_draws_is_the_output_in_eval_mode(per, rate):
    torch.manual_seed(0)
    branch = constant_one(rate=rate, per=per)
    with torch.no_grad():
        if per == "sample":
            mean = (branch(torch.ones(100_000, 1)) + torch.zeros(100_000, 1)).mean()
        else:
            mean = torch.stack([branch(torch.ones(1, 1)).mean() for _ in range(4_000)]).mean()
        expected = branch.eval()(torch.ones(1, 1)).mean()
    torch.testing.assert_close(mean, expected, rtol=0, atol=0.03)
    assert expected == pytest.approx({"batch": 1 - rate, "sample": float(rate < 1)}[per])


@pytest.mark.parametrize("per", ["batch", "sample"])
def test_rate_0_is_the_plain_sequential_to_the_bit_and_draws_nothing(per):
    torch.manual_seed(0)
    branch = StochasticDepth(nn.Linear(3, 3), nn.ReLU(), rate=0.0, per=per)
    state, x = torch.get_rng_state(), torch.randn(4, 3, generator=torch.Generator().manual_seed(1))
    assert torch.equal(branch(x), nn.Sequential(*branch)(x))
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("per", ["batch", "sample"])
def test_rate_1_leaves_the_shortcut_with_finite_gradients(per):
    block, x = Block(rate=1.0, per=per), torch.randn(4, 3, 5, 5, requires_grad=True)
    y = block(x)
    y.sum().backward()
    assert torch.equal(y, x)
    assert torch.equal(x.grad, torch.ones_like(x))


@pytest.mark.parametrize("rate", [-0.1, 1.1, float("nan")])
def test_a_rate_outside_0_and_1_is_refused(rate):
    with pytest.raises(ReszooError, match="rate must be between 0 and 1"):
        StochasticDepth(rate=rate)
    with pytest.raises(ReszooError, match="last_rate must be between 0 and 1"):
        linear_rates(3, rate)


@pytest.mark.parametrize("rate", [MASK_UP_TO, 0.5])
def test_each_sample_is_either_the_shortcut_or_the_scaled_branch(rate):
    torch.manual_seed(0)
    branch = StochasticDepth(nn.Linear(3, 3), rate=rate, per="sample")
    x = torch.randn(64, 3)
    y, full = branch(x), nn.Sequential(*branch)(x) / (1 - rate)
    kept = (y != 0).any(1)
    assert 0 < kept.sum() < 64
    torch.testing.assert_close(y[kept], full[kept])


def test_only_the_kept_samples_are_computed():
    torch.manual_seed(0)
    branch, seen = StochasticDepth(nn.Linear(3, 3), rate=0.5, per="sample"), []
    branch[0].register_forward_hook(lambda module, args, output: seen.append(len(output)))
    y = branch(torch.randn(64, 3))
    assert seen == [(y != 0).any(1).sum()]
    assert seen[0] < 64


def test_computing_the_kept_samples_gives_the_gradients_of_masking():
    torch.manual_seed(0)
    branch, x = StochasticDepth(nn.Linear(3, 3), rate=0.5, per="sample"), torch.randn(16, 3, requires_grad=True)
    y = branch(x)
    masked = nn.Sequential(*branch)(x) * (y != 0).any(1, keepdim=True) * 2
    inputs = (x, *branch.parameters())
    ours, theirs = torch.autograd.grad(y.square().sum(), inputs), torch.autograd.grad(masked.square().sum(), inputs)
    torch.testing.assert_close(ours, theirs)


def test_batch_norm_in_the_branch_never_sees_a_single_value():
    torch.manual_seed(0)
    block = Block(rate=0.7, per="sample")
    for _ in range(200):  # of which 84 keep exactly one of the two samples
        assert block(torch.randn(2, 3, 1, 1)).isfinite().all()


def test_a_dropped_branch_is_not_computed_and_its_parameters_stay_where_they_are():
    torch.manual_seed(0)
    block, calls = Block(rate=0.5), []
    block.residual[0].register_forward_hook(lambda *_: calls.append(1))
    optimizer = torch.optim.SGD(block.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1)
    skips = 0
    for _ in range(20):
        before, ran = block.residual[0].weight.clone(), len(calls)
        optimizer.zero_grad()
        block(torch.randn(2, 3, 4, 4, requires_grad=True)).square().mean().backward()
        optimizer.step()
        skipped = len(calls) == ran
        assert torch.equal(before, block.residual[0].weight) == skipped
        assert (block.residual[0].weight.grad is None) == skipped
        skips += skipped
    assert 0 < skips < 20


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("rate", [0.05, 0.5, 1.0])
@pytest.mark.parametrize("per", ["batch", "sample"])
def test_half_precision_stays_half_precision(per, rate, dtype):
    block = Block(rate=rate, per=per).to(dtype)
    for mode in (True, False):
        block.train(mode)
        x = torch.randn(4, 3, 2, 2, dtype=dtype, requires_grad=True)
        y = block(x)
        y.sum().backward()
        assert y.dtype == x.grad.dtype == dtype
        assert x.grad.isfinite().all()


def test_the_linear_rule_runs_from_p_0_equal_to_1_down_to_the_last_rate():
    assert linear_rates(4, 0.5) == [0.125, 0.25, 0.375, 0.5]
    # Section 4: 54 blocks at p_L = 0.5 leave an expected (3L - 1) / 4 = 40.25.
    assert sum(1 - rate for rate in linear_rates(54, 0.5)) == pytest.approx(40.25)


def test_a_network_gets_the_linear_rule_in_the_order_of_its_blocks():
    network = nn.Sequential(Block(), Block())
    drop_linearly(network, 0.4, "sample")
    assert [(block.residual.rate, block.residual.per) for block in network] == [(0.2, "sample"), (0.4, "sample")]


def test_state_keys_are_those_of_a_sequential():
    layers = nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2)
    assert list(StochasticDepth(*layers, rate=0.3).state_dict()) == list(nn.Sequential(*layers).state_dict())


@pytest.mark.parametrize("per", ["batch", "sample"])
def test_export_in_training_mode_masks(per):
    block = Block(rate=0.5, per=per)
    exported = torch.export.export(block, (torch.randn(4, 3, 4, 4),)).module()
    torch.manual_seed(0)
    x = torch.randn(4, 3, 4, 4)
    results = torch.cat([exported(x) - x for _ in range(20)])
    dropped = (results == 0).flatten(1).all(1)
    assert 0 < dropped.sum() < 80


def train_ddp(rank, folder, per, every):
    """Four steps of one of two processes; every parameter ends equal on both."""
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    torch.manual_seed(rank)  # the draws of the two processes differ
    network, draws = reszoo.create("resnet14", stochastic_depth=0.9, drop_per=per, checkpoint_every=every), []
    branches = [m for m in network.modules() if isinstance(m, StochasticDepth)]
    for branch in branches:
        branch[0].register_forward_hook(lambda *_: draws.append(1))
    parallel = DistributedDataParallel(network)
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1, momentum=0.9)
    for _ in range(4):
        optimizer.zero_grad()
        parallel(torch.randn(3, 3, 8, 8)).square().mean().backward()
        assert all(p.grad is not None for p in network.parameters())
        optimizer.step()
    assert every or len(draws) < 4 * len(branches)  # so some branch was skipped
    assert_same_everywhere(torch.cat([p.detach().flatten() for p in network.parameters()]))
    # SyncBatchNorm itself needs an accelerator; that it shares the draw does not.
    branch = StochasticDepth(nn.SyncBatchNorm(3), rate=0.5, per="batch")
    assert_same_everywhere(torch.stack([branch.draw(3) for _ in range(8)]))
    dist.destroy_process_group()


def assert_same_everywhere(mine):
    first = mine.clone()
    dist.broadcast(first, 0)
    assert torch.equal(mine, first)


@pytest.mark.slow
@pytest.mark.parametrize(("per", "every"), [("batch", 0), ("sample", 0), ("batch", 2)])
def test_two_processes_train_without_looking_for_unused_parameters(per, every, tmp_path):
    mp.spawn(train_ddp, (tmp_path, per, every), nprocs=2)
