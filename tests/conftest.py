import torch

# Threads waiting for each other slow small networks down a hundredfold on a busy machine; one repeats to the bit.
torch.set_num_threads(1)


def pytest_collection_modifyitems(config, items):
    """Leave the slow tests out unless `-m` asks for them."""
    if config.getoption("-m"):
        return
    slow = [item for item in items if item.get_closest_marker("slow")]
    config.hook.pytest_deselected(items=slow)
    items[:] = [item for item in items if not item.get_closest_marker("slow")]
