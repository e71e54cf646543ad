"""Creating a network with its stored weights, against timm's `create_model` and `load_state_dict`.

Both take the same numbers from a safetensors file in the page cache, and both networks are ready to train afterwards.
A mapped file is read when it is used, so one contestant also touches every weight, and one reads all into memory of its
own. Memory is that of a fresh process that has touched every weight, against the size of the weights.
"""

import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from torch import nn

from reszoo.cli.benchmark._harness import Row, interleaved, memory_rows
from reszoo.errors import ReszooError
from reszoo.hub.adopt import build_with, save_weights
from reszoo.hub.convert import convert

NETWORKS = {"resnet50": "resnet50", "vit_base_patch16_224": "vit_b16"}


def measure() -> list[Row]:
    """Time and memory for ResNet-50 and ViT-B/16."""
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as folder:
        for theirs, ours in NETWORKS.items():
            rows += _measure(theirs, ours, Path(folder))
    return rows


def _measure(theirs: str, ours: str, folder: Path) -> list[Row]:
    """One network: the same outputs first, then the time, then the memory."""
    import timm
    from safetensors.torch import load_file, save_file

    foreign, native = folder / f"timm_{theirs}.safetensors", folder / f"reszoo_{ours}.safetensors"
    peer = timm.create_model(theirs).eval()
    save_file(peer.state_dict(), foreign)
    converted = convert(foreign, ours).eval()
    save_weights(converted, native)
    with torch.no_grad():
        x = torch.randn(1, 3, 224, 224)
        if not torch.allclose(converted(x), peer(x), rtol=1e-3, atol=1e-4):
            raise ReszooError(f"{ours} does not give the outputs of timm's {theirs}; nothing was timed")

    contestants = {
        f"timm {theirs}": lambda: timm.create_model(theirs).load_state_dict(load_file(foreign)),
        f"reszoo {ours}, own file": lambda: build_with(native, ours),
        f"reszoo {ours}, own file, every weight touched": lambda: touch(build_with(native, ours)),
        f"reszoo {ours}, own file, not mapped": lambda: build_with(native, ours, mapped=False),
        f"reszoo {ours}, timm's file": lambda: convert(foreign, ours),
    }
    weights = sum(tensor.numel() * tensor.element_size() for tensor in peer.state_dict().values()) / 2**20
    memory = {"the weights": weights, f"reszoo {ours}, own file": _peak(native, ours)}
    return [*interleaved(contestants), *memory_rows(memory)]


def touch(network: nn.Module) -> float:
    """Read every weight."""
    return sum(float(parameter.detach().sum()) for parameter in network.parameters())


def _peak(file: Path, name: str) -> float:
    """MiB that building adds at most to a fresh process."""
    program = (
        "import sys, torch, safetensors.torch\n"
        "import reszoo\n"
        "from reszoo.cli.benchmark._harness import peak_memory\n"
        "from reszoo.hub.adopt import build_with\n"
        "from reszoo.cli.benchmark.loading import touch\n"
        "touch(reszoo.create('resnet8'))\n"
        "print(peak_memory(lambda: touch(build_with(sys.argv[1], sys.argv[2]))))\n"
    )
    done = subprocess.run([sys.executable, "-c", program, str(file), name], capture_output=True, text=True, check=True)
    return float(done.stdout)
