import torch

from reszoo.analysis.jacobian import identity_error, jacobian, stack_gain


def linear(matrix):
    return lambda x: matrix @ x


def test_the_jacobian_of_a_linear_map_is_its_matrix():
    matrix = torch.randn(3, 3)
    torch.testing.assert_close(jacobian(linear(matrix), torch.randn(3)), matrix)


def test_a_residual_block_adds_the_identity():
    branch = lambda x: torch.tanh(x) * x.sum()  # noqa: E731
    assert identity_error(branch, torch.randn(5)) < 1e-5


def test_the_gain_of_scaled_identities_is_their_product():
    halves = [linear(0.5 * torch.eye(4))] * 3
    x = torch.randn(4)
    assert stack_gain(halves, x, residual=False) == 0.5**3
    assert stack_gain(halves, x, residual=True) == 1.5**3


def test_the_gain_bounds_how_much_a_small_change_grows():
    torch.manual_seed(0)
    matrices = [torch.randn(6, 6, dtype=torch.float64) for _ in range(2)]
    branches = [linear(m) for m in matrices]
    gain = stack_gain(branches, torch.randn(6, dtype=torch.float64), residual=True)
    whole = (torch.eye(6, dtype=torch.float64) + matrices[1]) @ (torch.eye(6, dtype=torch.float64) + matrices[0])
    assert abs(gain - torch.linalg.svdvals(whole)[0].item()) < 1e-9
