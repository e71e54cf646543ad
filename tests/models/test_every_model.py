"""What holds for every registered architecture, found by the registry."""

import io
from functools import lru_cache

import pytest
import torch

import reszoo
from reszoo.cli.list_models import count_parameters
from reszoo.models import factory_of

QUICK = 3_000_000  # parameters up to which a network's passes take well under a second


count = lru_cache(count_parameters)


def every(limit: int = QUICK):
    marks = {name: () if count(name) <= limit else (pytest.mark.slow,) for name in reszoo.list_models()}
    return pytest.mark.parametrize("name", [pytest.param(name, marks=marks[name]) for name in marks])


def smallest_of_each_file(limit: int = QUICK):
    """One name a file of `reszoo.models`: enough for the costly compilers, since variants differ only in numbers."""
    by_file: dict[str, str] = {}
    for name in sorted(reszoo.list_models(), key=count):
        by_file.setdefault(factory_of(name).__module__, name)
    marks = {name: () if count(name) <= limit else (pytest.mark.slow,) for name in by_file.values()}
    return pytest.mark.parametrize("name", [pytest.param(name, marks=marks[name]) for name in sorted(marks)])


def scalar(output) -> torch.Tensor:
    """A differentiable number from whatever a network returns."""
    if isinstance(output, torch.Tensor):
        return output.float().square().mean()
    if isinstance(output, dict):
        return sum(scalar(value) for value in output.values())
    return sum(scalar(value) for value in output)


@every(limit=10**12)
def test_it_says_how_it_was_built(name):
    with torch.device("meta"):
        network = reszoo.create(name)
        again = reszoo.create(network.architecture, **network.arguments)
    assert network.architecture == name
    assert {k: v.shape for k, v in network.state_dict().items()} == {k: v.shape for k, v in again.state_dict().items()}
    assert factory_of(name).__doc__


@every()
def test_every_parameter_receives_a_finite_gradient(name):
    torch.manual_seed(0)
    network = reszoo.create(name)
    scalar(network(*network.example_inputs(2))).backward()
    assert [key for key, p in network.named_parameters() if p.grad is None] == []
    assert [key for key, p in network.named_parameters() if not p.grad.isfinite().all()] == []


def skip_if_the_output_size_depends_on_the_data(inputs):
    """A detection network takes a list of images, and how many boxes it returns depends on what it sees."""
    if any(isinstance(argument, list) for argument in inputs):
        pytest.skip("the number of detections depends on the data, so there is no graph of fixed shapes")


def channels_last(argument):
    """A batch of images with its channels innermost; a list of single images, which have no batch axis, as it is."""
    if isinstance(argument, torch.Tensor) and argument.dim() == 4:
        return argument.contiguous(memory_format=torch.channels_last)
    return argument


@every()
def test_one_sample_in_eval_mode_equals_its_row_in_a_batch(name):
    torch.manual_seed(0)
    network = reszoo.create(name).eval()
    inputs = network.example_inputs(2)
    with torch.no_grad():
        both = network(*inputs)
        one = network(*(argument[:1] for argument in inputs))
    torch.testing.assert_close(one, both[:1], rtol=1e-4, atol=1e-5)


@every()
def test_it_trains_in_bfloat16(name):
    train_under_autocast(name, torch.bfloat16)


@smallest_of_each_file(limit=QUICK // 4)  # half precision is emulated on the CPU, a hundred times slower than float32
def test_it_trains_in_float16(name):
    train_under_autocast(name, torch.float16)


def train_under_autocast(name, dtype):
    torch.manual_seed(0)
    network = reszoo.create(name)
    with torch.autocast("cpu", dtype=dtype):
        loss = scalar(network(*network.example_inputs(2)))
    loss.backward()
    assert loss.isfinite()
    assert all(p.grad.isfinite().all() for p in network.parameters())


@every()
def test_channels_last_changes_nothing_but_the_memory_format(name):
    torch.manual_seed(0)
    network = reszoo.create(name).eval()
    inputs = network.example_inputs(2)
    with torch.no_grad():
        expected = network(*inputs)
        network.to(memory_format=torch.channels_last)
        got = network(*(channels_last(argument) for argument in inputs))
    torch.testing.assert_close(got, expected, rtol=1e-3, atol=1e-4)


@smallest_of_each_file()
def test_torch_export_keeps_a_free_batch_size(name):
    network = reszoo.create(name).eval()
    inputs = network.example_inputs(2)
    skip_if_the_output_size_depends_on_the_data(inputs)
    free = tuple({0: torch.export.Dim("batch", min=1, max=64)} for _ in inputs)
    exported = torch.export.export(network, inputs, dynamic_shapes=free).module()
    three = network.example_inputs(3)
    with torch.no_grad():
        torch.testing.assert_close(exported(*three), network(*three), rtol=1e-3, atol=1e-4)


@smallest_of_each_file()
def test_a_saved_state_loads_strictly(name):
    network, other = reszoo.create(name), reszoo.create(name)
    file = io.BytesIO()
    torch.save(network.state_dict(), file)
    file.seek(0)
    other.load_state_dict(torch.load(file, weights_only=True))
    for (key, a), b in zip(network.state_dict().items(), other.state_dict().values(), strict=True):
        assert torch.equal(a, b), key


@pytest.mark.slow
@smallest_of_each_file()
def test_compiled_output_equals_eager(name):
    torch.manual_seed(0)
    network = reszoo.create(name).eval()
    inputs = network.example_inputs(2)
    skip_if_the_output_size_depends_on_the_data(inputs)
    with torch.no_grad():
        torch.testing.assert_close(torch.compile(network)(*inputs), network(*inputs), rtol=1e-3, atol=1e-4)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:# The axis name:UserWarning")  # tokens and mask share one batch axis
@smallest_of_each_file()
def test_onnx_runtime_gives_the_same_output_at_another_batch_size(name, tmp_path):
    ort = pytest.importorskip("onnxruntime", reason="needs the `export` extra")
    network = reszoo.create(name).eval()
    inputs = network.example_inputs(2)
    skip_if_the_output_size_depends_on_the_data(inputs)
    free = tuple({0: torch.export.Dim("batch", min=1, max=64)} for _ in inputs)
    path = tmp_path / "network.onnx"
    torch.onnx.export(network, inputs, path, dynamic_shapes=free, dynamo=True, verbose=False)
    three = network.example_inputs(3)
    session = ort.InferenceSession(path)
    feed = {node.name: argument.numpy() for node, argument in zip(session.get_inputs(), three, strict=True)}
    with torch.no_grad():
        torch.testing.assert_close(torch.from_numpy(session.run(None, feed)[0]), network(*three), rtol=1e-3, atol=1e-4)
