import pytest
import torch
from torch import nn

import reszoo
from reszoo.layers import StochasticDepth, recompute, run_in_segments


def blocks(num: int) -> nn.Sequential:
    """Blocks with BatchNorm, dropout and, in every second one, a draw of stochastic depth."""
    torch.manual_seed(0)
    return nn.Sequential(
        *(
            StochasticDepth(
                nn.Conv2d(3, 3, 3, padding=1), nn.BatchNorm2d(3), nn.Dropout(0.5), rate=0.1 * (i % 2), per="sample"
            )
            for i in range(num)
        )
    )


def train(network: nn.Module, every: int, steps: int = 3) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
    """Outputs, last gradients and state after some steps from one seed."""
    torch.manual_seed(1)
    optimizer, results = torch.optim.SGD(network.parameters(), lr=0.1), []
    for _ in range(steps):
        optimizer.zero_grad()
        y = run_in_segments(network, torch.randn(4, 3, 5, 5), every)
        y.square().mean().backward()
        optimizer.step()
        results.append(y.detach())
    results += [p.grad for p in network.parameters()]
    return results, network.state_dict()


@pytest.mark.parametrize("every", [1, 2, 3, 9])
def test_outputs_gradients_and_buffers_equal_the_plain_form(every):
    plain, checkpointed = train(blocks(5), 0), train(blocks(5), every)
    torch.testing.assert_close(checkpointed, plain, rtol=0, atol=1e-6)
    assert checkpointed[1]["0.1.num_batches_tracked"] == 3


def test_only_the_input_of_a_segment_is_kept():
    kept: list[int] = []
    network, x = blocks(6), torch.randn(4, 3, 5, 5)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.numel()) or t, lambda t: t):
        run_in_segments(network, x, 3)
        checkpointed, kept = sum(kept), []
        run_in_segments(network, x, 0)
    assert checkpointed <= 2 * x.numel()
    assert sum(kept) > 6 * x.numel()


def test_an_input_without_gradient_still_lets_the_parameters_learn():
    network = blocks(2)
    recompute(list(network), torch.randn(2, 3, 5, 5)).sum().backward()
    assert all(p.grad is not None for p in network.parameters())


def test_a_frozen_batch_norm_stays_frozen():
    network = blocks(2)
    network[0][1].eval()
    before = network[0][1].running_mean.clone()
    run_in_segments(network, torch.randn(2, 3, 5, 5), 2).sum().backward()
    assert torch.equal(network[0][1].running_mean, before)
    assert network[0][1].num_batches_tracked == 0


@pytest.mark.parametrize("name", ["resnet20", "preact_resnet20"])
def test_a_checkpointed_network_learns_what_the_plain_one_does(name):
    results = []
    for every in (0, 2):
        torch.manual_seed(0)
        network = reszoo.create(name, checkpoint_every=every, stochastic_depth=0.5, drop_per="sample")
        for _ in range(2):
            network.zero_grad()
            network(torch.randn(4, 3, 8, 8)).square().mean().backward()
        results.append(([p.grad for p in network.parameters()], network.state_dict()))
    torch.testing.assert_close(*results, rtol=0, atol=1e-6)
