import copy
from collections import Counter
from itertools import combinations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import reszoo
from reszoo.errors import ReszooError
from reszoo.models.fractalnet import DropPath, FractalBlock, FractalNet, Join

NARROW = {"widths": [4, 6, 8], "in_chans": 1}


class Constant(nn.Module):
    """Whatever comes in, one number goes out; the product keeps the shape."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self.value = value

    def forward(self, x):
        return x * 0 + self.value


def block_of_constants():
    """The 4-column block whose columns put out 1, 2, 4 and 8."""
    block = FractalBlock(1, 1, 4, dropout=0.0)
    for index, column in enumerate(block.columns):
        for place in range(len(column)):
            column[place] = Constant(2.0**index)
    return block


@torch.no_grad()
def draws(rate, global_share, number=1000):
    torch.manual_seed(0)
    block, x = block_of_constants(), torch.zeros(1, 1, 2, 2)
    device = torch.device("cpu")
    return [block(x, DropPath(1, 4, rate, global_share, device)).item() for _ in range(number)]


def norms(network):
    return [m for m in network.modules() if isinstance(m, nn.BatchNorm2d)]


def with_statistics(network):
    """Give every BatchNorm running statistics that matter."""
    for norm in norms(network):
        norm.running_mean.normal_(0, 0.1)
        norm.running_var.uniform_(0.5, 1.5)
    return network


def train_but_norms(network):
    """Training mode, so that drop-path draws, but with fixed statistics, so that rows do not see each other."""
    network.train()
    for norm in norms(network):
        norm.eval()
    return network


def fixed(network):
    return train_but_norms(with_statistics(network))


def count(network: nn.Module) -> int:
    return sum(p.numel() for p in network.parameters())


@pytest.mark.parametrize(
    ("name", "expected"), [("fractalnet10", 13_325_322), ("fractalnet20", 33_724_618), ("fractalnet40", 76_106_634)]
)
def test_parameter_count(name, expected):
    with torch.device("meta"):
        assert count(reszoo.create(name)) == expected


@pytest.mark.parametrize(("name", "depth"), [("fractalnet10", 10), ("fractalnet20", 20), ("fractalnet40", 40)])
def test_the_deepest_column_gives_the_name_and_each_other_has_half_the_layers(name, depth):
    network = reszoo.create(name, widths=[2] * 5)
    columns = [network.column(index) for index in range(network.num_columns)]
    convolutions = [sum(isinstance(m, nn.Conv2d) for m in column.modules()) for column in columns]
    assert convolutions[::-1] == [depth // 2**k for k in range(network.num_columns)]


def expand(z, columns):
    """f_1(z) = conv(z) and f_{C+1}(z) = join(f_C(f_C(z)), conv(z)), word for word; a list of what the join receives."""
    shortest, *deeper = columns
    if not deeper:
        return [next(shortest)(z)]
    middle = torch.stack(expand(z, deeper)).mean(0)
    return [next(shortest)(z), *expand(middle, deeper)]


@pytest.mark.parametrize("num_columns", [1, 2, 3, 4])
def test_the_block_is_the_expansion_rule_pooled_before_the_last_join(num_columns):
    torch.manual_seed(0)
    block = fixed(FractalBlock(3, 5, num_columns, dropout=0.0))
    x = torch.randn(2, 3, 8, 8)
    paths = expand(x, [iter(column) for column in block.columns])
    pooled = torch.stack([nn.functional.max_pool2d(path, 2) for path in paths])
    torch.testing.assert_close(block(x), pooled.mean(0))
    if num_columns > 1:  # pooling the mean instead would be another network
        assert (block(x) - nn.functional.max_pool2d(torch.stack(paths).mean(0), 2)).abs().max() > 1e-2


def test_no_input_passes_around_every_layer():
    block = block_of_constants()
    assert torch.equal(block(torch.full((1, 1, 2, 2), 100.0)), block(torch.zeros(1, 1, 2, 2)))


def test_evaluation_joins_by_the_mean_of_all_columns():
    assert block_of_constants().eval()(torch.zeros(1, 1, 2, 2)).item() == 3.75


def test_local_joins_are_means_of_survivors_and_one_always_survives():
    possible = {sum(kept) / len(kept) for size in (1, 2, 3, 4) for kept in combinations((1, 2, 4, 8), size)}
    seen = Counter(round(value, 4) for value in draws(rate=0.5, global_share=0.0))
    assert set(seen) == {round(value, 4) for value in possible}
    # All four survive with probability 1/16; a lone column with (1 + 1/4) / 16, the revived ones included.
    assert seen[3.75] == pytest.approx(1000 / 16, abs=30)
    for lone in (1, 2, 4, 8):
        assert seen[lone] == pytest.approx(1000 * 1.25 / 16, abs=35)


def test_at_rate_one_a_single_path_is_revived_each_with_equal_probability():
    seen = Counter(draws(rate=1.0, global_share=0.0, number=400))
    assert set(seen) == {1, 2, 4, 8}
    assert all(number == pytest.approx(100, abs=35) for number in seen.values())


def test_a_global_draw_is_one_column_each_with_equal_probability():
    seen = Counter(draws(rate=0.15, global_share=1.0))
    assert set(seen) == {1, 2, 4, 8}
    assert all(number == pytest.approx(250, abs=55) for number in seen.values())


def test_without_drop_path_training_joins_as_evaluation_does():
    assert set(draws(rate=0.0, global_share=0.0, number=20)) == {3.75}


def test_a_global_draw_is_the_same_column_in_every_block_and_equals_its_extraction():
    torch.manual_seed(0)
    network = reszoo.create("fractalnet40", widths=[4, 6, 8], dropout=0.0, global_share=1.0)
    x = torch.randn(4, 3, 8, 8)
    drawn = set()
    for seed in range(12):
        torch.manual_seed(seed)
        index = torch.randint(4, ()).item()
        torch.manual_seed(seed)
        torch.testing.assert_close(network(x), network.column(index)(x))
        drawn.add(index)
    assert drawn == {0, 1, 2, 3}


def test_an_extracted_column_shares_its_weights_and_a_copy_does_not():
    network = reszoo.create("fractalnet20", **NARROW)
    column = network.column(2)
    assert {id(p) for p in column.parameters()} < {id(p) for p in network.parameters()}
    assert not {id(p) for p in copy.deepcopy(column).parameters()} & {id(p) for p in network.parameters()}


def test_half_of_each_mini_batch_runs_one_column():
    torch.manual_seed(0)
    network = fixed(reszoo.create("fractalnet20", **NARROW, dropout=0.0))
    x = torch.randn(6, 1, 8, 8)
    for seed in range(5):
        torch.manual_seed(seed)
        column = network.column(torch.randint(3, ()).item())(x)
        torch.manual_seed(seed)
        same = (network(x) - column).abs().amax(1) < 1e-5
        assert same.tolist() == [True] * 3 + [False] * 3


def test_the_odd_sample_joins_either_half_at_random():
    torch.manual_seed(0)
    shares = Counter(int(DropPath(5, 3, 0.15, 0.5, torch.device("cpu")).is_global.sum()) for _ in range(400))
    assert set(shares) == {2, 3}
    assert shares[2] == pytest.approx(200, abs=40)


def test_no_mask_outlives_its_pass():
    torch.manual_seed(0)
    network = fixed(reszoo.create("fractalnet20", **NARROW, dropout=0.0))
    x = torch.randn(4, 1, 8, 8)
    expected = copy.deepcopy(network).eval()(x)
    passes = [train_but_norms(network)(x) for _ in range(8)]
    assert torch.equal(network.eval()(x), expected)
    passes += [train_but_norms(network)(x) for _ in range(8)]
    assert len({one.sum().item() for one in passes}) > 8


def test_the_draws_repeat_under_a_seed_and_come_from_torch():
    network = reszoo.create("fractalnet20", **NARROW)
    x, outputs = torch.randn(4, 1, 8, 8), []
    for _ in range(2):
        torch.manual_seed(3)
        outputs.append(network(x))
    assert torch.equal(*outputs)


def test_dropout_grows_over_the_blocks_to_40_percent():
    network = reszoo.create("fractalnet20", widths=[2] * 5)
    for block, rate in zip(network.blocks, (0.0, 0.1, 0.2, 0.3, 0.4), strict=True):
        assert all(m.p == pytest.approx(rate) for m in block.modules() if isinstance(m, nn.Dropout))


def test_a_join_weighs_no_survivor_more_than_another():
    paths = [torch.full((2, 1, 1, 1), value) for value in (1.0, 2.0, 6.0)]
    survive = torch.tensor([[True, False, True], [False, True, False]])
    assert Join()(paths, survive).flatten().tolist() == [3.5, 2.0]
    assert Join()(paths).flatten().tolist() == [3.0, 3.0]


@pytest.mark.parametrize("size", [1, 8, 28, 32, 33])
def test_any_size_passes_five_poolings(size):
    network = reszoo.create("fractalnet20", widths=[2] * 5, num_classes=7)
    assert network(torch.randn(2, 3, size, size)).shape == (2, 7)


def test_at_32_pixels_five_poolings_leave_one():
    maps = reszoo.create("fractalnet10", widths=[2, 3, 4, 5, 6]).feature_maps(torch.randn(2, 3, 32, 32))
    assert [tuple(m.shape[1:]) for m in maps] == [(2, 16, 16), (3, 8, 8), (4, 4, 4), (5, 2, 2), (6, 1, 1)]


def test_without_classes_the_output_is_the_pooled_last_map():
    network = reszoo.create("fractalnet10", **NARROW, num_classes=0).eval()
    x = torch.randn(1, 1, 32, 32)
    torch.testing.assert_close(network(x), network.feature_maps(x)[-1].mean((2, 3)))


def test_one_sample_in_eval_mode_equals_its_row():
    network = fixed(reszoo.create("fractalnet20", **NARROW)).eval()
    x = torch.randn(3, 1, 8, 8)
    torch.testing.assert_close(network(x[:1]), network(x)[:1])


def test_steps_of_sgd_lower_the_loss():
    torch.manual_seed(0)
    network: FractalNet = reszoo.create("fractalnet20", **NARROW)
    x, y = torch.randn(16, 1, 8, 8), torch.arange(16) % 2
    optimizer = torch.optim.SGD(network.parameters(), lr=0.02)
    losses = []
    for _ in range(30):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(network(x), y)
        loss.backward()
        assert all(p.grad is not None and p.grad.isfinite().all() for p in network.parameters())
        optimizer.step()
        losses.append(loss.item())
    assert sum(losses[-5:]) < 0.7 * sum(losses[:5])


@pytest.mark.parametrize("option", ["dropout", "drop_path", "global_share"])
def test_a_rate_outside_0_to_1_is_refused(option):
    with pytest.raises(ReszooError, match=f"{option} must be between 0 and 1, got 1.5"):
        reszoo.create("fractalnet10", **{option: 1.5})


def test_a_column_that_does_not_exist_is_refused():
    with pytest.raises(ReszooError, match=r"column must be 0 \(shortest\) to 2 \(deepest\), got 3"):
        reszoo.create("fractalnet20", **NARROW).column(3)


def train_on_a_rank(rank, address):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=2)
    torch.manual_seed(rank)
    network = DistributedDataParallel(reszoo.create("fractalnet20", **NARROW, drop_path=0.9))
    optimizer = torch.optim.SGD(network.parameters(), lr=0.05, momentum=0.9)
    for _ in range(4):
        optimizer.zero_grad()
        nn.functional.cross_entropy(network(torch.randn(4, 1, 8, 8)), torch.arange(4)).backward()
        optimizer.step()
    flat = torch.cat([p.detach().flatten() for p in network.parameters()])
    other = flat.clone()
    dist.broadcast(other, src=0)
    assert torch.equal(flat, other)
    dist.destroy_process_group()


@pytest.mark.slow
def test_two_ranks_train_four_steps_without_a_search_for_unused_parameters(tmp_path):
    torch.multiprocessing.spawn(train_on_a_rank, (f"file://{tmp_path / 'store'}",), nprocs=2)
