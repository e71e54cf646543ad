"""Every family learns scikit-learn's digits from the same few lines; add a row to add a network."""

import pytest
import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import nn

import reszoo

EXAMPLES = [  # name, options, learning rate of SGD (of AdamW for a Transformer), epochs
    ("plain8", {}, 0.05, 8),
    ("resnet20", {}, 0.05, 8),
    ("resnet20", {"stochastic_depth": 0.2}, 0.05, 12),
    ("resnet20", {"stochastic_depth": 0.2, "drop_per": "sample"}, 0.05, 12),
    ("resnet20", {"branch_scale": "rezero"}, 0.05, 8),
    ("preact_resnet20", {}, 0.05, 8),
    ("mapping_resnet8", {"mapping": "exclusive_gate", "gate_bias": -3.0}, 0.1, 15),
    ("mapping_resnet8", {"mapping": "shortcut_gate", "activation": "full_preact"}, 0.05, 8),
    ("fixup_resnet8", {}, 0.05, 12),
    ("skipinit_resnet8", {}, 0.05, 12),
    ("wrn10_1", {}, 0.05, 8),
    ("resnext11_4x16d", {}, 0.05, 8),
    ("densenet_bc22_k12", {}, 0.05, 10),
    ("densenet_bc22_k12", {"memory": "lean"}, 0.05, 10),
    ("vit_ti16", {"image_size": 8, "patch_size": 4, "embed_dim": 64, "depth": 4, "num_heads": 4}, 0.003, 30),
    ("highway_mlp", {"depth": 10, "image_size": 8}, 0.05, 30),
    ("highway_mlp", {"depth": 50, "gate_bias": -4.0, "image_size": 8}, 0.05, 20),
    ("highway10", {"image_size": 8}, 0.1, 35),
    ("highway19", {"widths": [16, 16, 16], "gate_bias": -3.0}, 0.1, 20),
    ("fractalnet10", {"widths": [16, 32, 32]}, 0.05, 12),
    ("fractalnet20", {"widths": [16, 32, 32], "dropout": 0.1}, 0.05, 12),
    ("vgg9", {"widths": [16, 32, 32], "image_size": 8}, 0.02, 10),
    ("vgg15", {"widths": [16, 32, 32, 32, 32], "image_size": 8}, 0.02, 10),
]


def digits():
    """Train and test images, (N, 1, 8, 8) with mean 0 and deviation 1, and their labels: 1,437 and 360."""
    images, labels = load_digits(return_X_y=True)
    images = torch.tensor((images - images.mean()) / images.std(), dtype=torch.float32).view(-1, 1, 8, 8)
    return train_test_split(images, torch.tensor(labels), test_size=0.2, random_state=0, stratify=labels)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "options", "learning_rate", "epochs"), EXAMPLES)
def test_it_learns_digits(name, options, learning_rate, epochs):
    torch.manual_seed(0)
    images, test_images, labels, test_labels = digits()
    network = reszoo.create(name, in_chans=1, **options)
    if name.startswith("vit"):
        optimizer = torch.optim.AdamW(network.parameters(), learning_rate)
    else:
        optimizer = torch.optim.SGD(network.parameters(), learning_rate, momentum=0.9, nesterov=True)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs)
    for _ in range(epochs):
        for batch in torch.randperm(len(images)).split(64):
            optimizer.zero_grad()
            nn.functional.cross_entropy(network(images[batch]), labels[batch]).backward()
            optimizer.step()
        schedule.step()
    with torch.no_grad():
        accuracy = (network.eval()(test_images).argmax(1) == test_labels).float().mean().item()
    assert accuracy > 0.95
