"""FractalNet: self-similar columns of plain layers that meet in element-wise means, with no residual connection.

Paper: Larsson, Maire and Shakhnarovich 2016, "FractalNet: Ultra-Deep Neural Networks without Residuals",
arXiv:1605.07648. Where the paper leaves a choice, the authors' released generator decides: every column is pooled
before the last join of a block, and a layer is convolution, dropout, BatchNorm, ReLU.

The rule f_1(z) = conv(z), f_{C+1}(z) = join(f_C(f_C(z)), conv(z)), unrolled, is a grid: column c of a block, counted
from 0, is a chain of 2^c layers, and after each layer of the deepest column all columns that end there are joined, in
one mean.

Drop-path. Each training pass draws two subnetworks afresh, one for each part of the mini-batch. In the *local* part
each join loses each of its inputs with probability `drop_path`, but never all of them; the *global* part runs one
column throughout the network. Nothing is drawn in evaluation, where a join is the mean of all its inputs. Dropped paths
are computed and weighted by 0: every parameter takes part in every step, so DistributedDataParallel needs no search for
unused ones, and BatchNorm sees the whole mini-batch. The price is that a dropped path saves no time, and that weight
decay and momentum go on acting on it.

Departures: convolutions have no bias, which the BatchNorm behind them would take away; the global part, which the
released generator runs as a second copy of the network, is half of the mini-batch; pooling rounds sizes up and an
average over what is left precedes the head, so that any image size passes (at 32x32 neither changes anything).

Shapes: N batch, C channels, H height, W width, K classes, P paths that meet in a join.
"""

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from reszoo.errors import ReszooError, check_at_least, check_between
from reszoo.models._registry import register


class Join(nn.Module):
    """The element-wise mean of the paths that survive."""

    def forward(self, paths: Sequence[Tensor], survive: Tensor | None = None) -> Tensor:
        """P tensors (N, C, H, W) and which survive, (N, P) or None for all -> (N, C, H, W)."""
        if len(paths) == 1:
            return paths[0]
        if survive is None:
            return sum(paths[1:], paths[0]) / len(paths)
        share = (survive / survive.sum(1, keepdim=True)).to(paths[0].dtype)  # (N, P)
        weighted = [path * share[:, index, None, None, None] for index, path in enumerate(paths)]
        return sum(weighted[1:], weighted[0])


class DropPath:
    """One training pass's draw: which samples run a single column, which column, and what the joins of the others lose.

    It is made anew for each pass and handed down, so nothing of it outlives the pass. All numbers come from the default
    generator of `device`, without a transfer between devices.

    Args:
        batch_size: N.
        num_columns: Columns of the network.
        rate: Probability with which a join of the local part loses an input.
        global_share: Share of the mini-batch that runs a single column; a fraction of a sample is rounded at random.
        device: Where the masks are needed.
    """

    def __init__(
        self, batch_size: int, num_columns: int, rate: float, global_share: float, device: torch.device
    ) -> None:
        self.num_columns = num_columns
        self.rate = rate
        self.column = torch.randint(num_columns, (), device=device)
        num_global = (batch_size * global_share + torch.rand((), device=device)).floor()
        self.is_global = torch.arange(batch_size, device=device) < num_global  # (N,)

    def survivors(self, num_paths: int) -> Tensor:
        """Which of the `num_paths` deepest columns a join keeps for each sample: (N, P), true at least once a row."""
        device = self.column.device
        places = torch.arange(num_paths, device=device)
        local = torch.rand(num_paths, device=device) >= self.rate
        local = local | (~local.any() & (places == torch.randint(num_paths, (), device=device)))
        single = places == self.column - (self.num_columns - num_paths)
        # A join that the drawn column does not reach feeds layers whose output a later join drops: its value is free.
        single = single | ~single.any()
        return torch.where(self.is_global[:, None], single, local)


class FractalBlock(nn.Module):
    """Columns of 1, 2, 4, ... layers over one input, joined wherever two or more end at the same depth.

    Args:
        in_channels: Channels of the input.
        width: Channels of every layer.
        num_columns: The paper's C; the deepest column has 2^(C-1) layers.
        dropout: Dropout rate of every layer.
    """

    def __init__(self, in_channels: int, width: int, num_columns: int, dropout: float) -> None:
        super().__init__()
        self.columns = nn.ModuleList(
            nn.Sequential(*(layer(width if index else in_channels, width, dropout) for index in range(2**column)))
            for column in range(num_columns)
        )
        self.pool = nn.MaxPool2d(2, ceil_mode=True)
        self.join = Join()

    def forward(self, x: Tensor, drop_path: DropPath | None = None) -> Tensor:
        """(N, C_in, H, W) -> (N, width, ceil(H / 2), ceil(W / 2))."""
        columns = cast(list[nn.Sequential], list(self.columns))
        depth = len(columns[-1])
        inputs = [x] * len(columns)
        for step in range(1, depth + 1):
            paths = []
            for index, column in enumerate(columns):
                span = depth // len(column)  # the depth that one layer of this column bridges
                if step % span == 0:
                    paths.append(column[step // span - 1](inputs[index]))
            if step == depth:
                paths = [self.pool(path) for path in paths]
            survive = drop_path.survivors(len(paths)) if drop_path and len(paths) > 1 else None
            x = self.join(paths, survive)
            inputs[-len(paths) :] = [x] * len(paths)  # those that end here are the deepest ones
        return x


def layer(in_channels: int, width: int, dropout: float) -> nn.Sequential:
    """Convolution, dropout, BatchNorm, ReLU, in the order of the released generator."""
    return nn.Sequential(
        nn.Conv2d(in_channels, width, 3, padding=1, bias=False),
        nn.Dropout(dropout),
        nn.BatchNorm2d(width),
        nn.ReLU(),
    )


class FractalNet(nn.Module):
    """Fractal blocks, each followed by pooling, and a linear head.

    Args:
        num_columns: Columns of each block; B blocks make B 2^(C-1) layers.
        widths: Channels of each block.
        dropout: Dropout rate of the last block; that of the others grows evenly from 0, by default 0, 10, 20, 30, 40%.
        drop_path: Probability with which a join loses an input, in the local part of the mini-batch.
        global_share: Share of the mini-batch that runs one column; 0 with `drop_path=0` turns drop-path off.
        num_classes: Outputs of the head; 0 gives the pooled features.
        in_chans: Channels of the images.

    Attributes:
        num_features: Channels of the last block.
    """

    def __init__(
        self,
        num_columns: int,
        *,
        num_classes: int = 10,
        in_chans: int = 3,
        widths: Sequence[int] = (64, 128, 256, 512, 512),
        dropout: float = 0.4,
        drop_path: float = 0.15,
        global_share: float = 0.5,
    ) -> None:
        super().__init__()
        check_at_least("num_classes", num_classes, 0)
        check_at_least("number of blocks in widths", len(widths), 1)
        for name, value in (("num_columns", num_columns), ("in_chans", in_chans), ("widths", min(widths))):
            check_at_least(name, value, 1)
        for name, rate in (("dropout", dropout), ("drop_path", drop_path), ("global_share", global_share)):
            check_between(name, rate, 0, 1)
        self.num_columns = num_columns
        self.drop_path = drop_path
        self.global_share = global_share
        self.in_chans = in_chans
        self.num_features = widths[-1]
        self.blocks = nn.ModuleList()
        for index, (before, width) in enumerate(zip((in_chans, *widths[:-1]), widths, strict=True)):
            rate = dropout * index / max(len(widths) - 1, 1)
            self.blocks.append(FractalBlock(before, width, num_columns, rate))
        self.head = nn.Linear(self.num_features, num_classes) if num_classes else nn.Identity()
        for module in self.modules():
            if isinstance(module, nn.Conv2d | nn.Linear):
                nn.init.xavier_uniform_(module.weight)

    def example_inputs(self, batch_size: int = 2) -> tuple[Tensor, ...]:
        """Random arguments of one forward pass, of the size of CIFAR's images."""
        return (torch.randn(batch_size, self.in_chans, 32, 32),)

    def feature_maps(self, x: Tensor) -> list[Tensor]:
        """(N, in_chans, H, W) -> each block's joined and pooled map, the finest first."""
        draw = self._draw(x)
        maps = []
        for block in self.blocks:
            x = block(x, draw)
            maps.append(x)
        return maps

    def forward(self, x: Tensor) -> Tensor:
        """(N, in_chans, H, W) -> (N, K), or the pooled (N, num_features) without a head."""
        x = self.feature_maps(x)[-1]  # (N, num_features, h, w)
        return self.head(x.mean((2, 3)))

    def column(self, index: int) -> nn.Sequential:
        """The plain network that one column is, sharing its weights with this one; `copy.deepcopy` makes it apart.

        Args:
            index: 0 is the shortest column, `num_columns - 1` the deepest.

        Returns:
            That column of each block and its pooling, the average and the head. It computes what a global draw of this
            column computes.

        Raises:
            ReszooError: There is no such column.
        """
        if not 0 <= index < self.num_columns:
            raise ReszooError(f"column must be 0 (shortest) to {self.num_columns - 1} (deepest), got {index}")
        blocks = [cast(FractalBlock, block) for block in self.blocks]
        columns = (nn.Sequential(*cast(nn.Sequential, block.columns[index]), block.pool) for block in blocks)
        return nn.Sequential(*columns, nn.AdaptiveAvgPool2d(1), nn.Flatten(), self.head)

    def _draw(self, x: Tensor) -> DropPath | None:
        if not self.training or self.num_columns == 1 or self.drop_path == self.global_share == 0:
            return None
        return DropPath(len(x), self.num_columns, self.drop_path, self.global_share, x.device)


@register
def fractalnet10(**options: Any) -> FractalNet:
    """FractalNet of two columns, 10 layers deep: 13.3M parameters."""
    return FractalNet(2, **options)


@register
def fractalnet20(**options: Any) -> FractalNet:
    """FractalNet-20, three columns: 33.7M parameters; 4.60% error on CIFAR-10 with augmentation, 23.73% on CIFAR-100.

    The paper states 38.6M, which three columns of these widths do not have.
    """
    return FractalNet(3, **options)


@register
def fractalnet40(**options: Any) -> FractalNet:
    """FractalNet of four columns, 40 layers deep: 76.1M parameters.

    The paper's 40-layer network is narrower: it states 22.9M, and neither the text nor the released code gives its
    widths, so `widths` is yours.
    """
    return FractalNet(4, **options)
