"""Our image classifiers in timm's registry, as `reszoo_<name>`.

Import this module, and `timm.create_model` knows them; timm 1.0 looks for no entry points, so the import is needed. The
networks keep our names of tensors, and gain what timm's scripts call: `reset_classifier`, `get_classifier`,
`forward_features`, `forward_head`, `default_cfg`.
"""

import sys
from collections.abc import Callable
from inspect import signature
from typing import Any

import timm
import torch
from timm.models import register_model
from timm.models._features import FeatureInfo
from timm.models._pretrained import PretrainedCfg
from torch import Tensor, nn

from reszoo.errors import ReszooError
from reszoo.models import factory_of, list_models

_OPTIONS = {"img_size": "image_size", "drop_rate": "dropout", "drop_path_rate": "stochastic_depth"}
"""timm's options under our names."""
_OTHER_TASKS = ("unet", "faster_rcnn")
"""Files whose networks take images and classify something else than the image."""


class TimmFace:
    """What timm's scripts call on a classifier, in terms of `feature_maps` and `head`."""

    def forward_features(self, x: Tensor) -> Tensor:
        """(N, C, H, W) -> what the head pools: (N, num_features, h, w), or a ViT's tokens (N, 1 + L, D)."""
        if hasattr(self, "tokens"):
            return self.tokens(x)
        return self.feature_maps(x)[-1]  # type: ignore[attr-defined]

    def forward_head(self, x: Tensor, pre_logits: bool = False) -> Tensor:
        """What `forward_features` gave -> (N, K), or (N, num_features) before the head."""
        if hasattr(self, "tokens"):
            x = x[:, 0]  # the class token
        elif hasattr(self, "neck"):
            x = self.neck(x)
        else:
            x = x.mean((2, 3))
        return x if pre_logits else self.head(x)

    def get_classifier(self) -> nn.Module:
        """The head."""
        return self.head

    def reset_classifier(self, num_classes: int, global_pool: str | None = None) -> None:
        """A new head of `num_classes` outputs; 0 gives features.

        Raises:
            ReszooError: Another pooling is asked for.
        """
        if global_pool not in (None, "", "avg", "token"):
            raise ReszooError(f"global_pool={global_pool!r} is not available here; leave it out")
        old = next(self.parameters())  # type: ignore[attr-defined]
        self.head = (
            nn.Linear(self.num_features, num_classes, device=old.device, dtype=old.dtype)  # type: ignore[attr-defined]
            if num_classes
            else nn.Identity()
        )
        self.num_classes = num_classes
        self.arguments = {**self.arguments, "num_classes": num_classes}  # type: ignore[has-type]

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        """Recompute every block in the backward pass, or none."""
        if not hasattr(self, "checkpoint_every"):
            raise ReszooError(f"{self.architecture} has no checkpointing")  # type: ignore[attr-defined]
        self.checkpoint_every = int(enable)

    def no_weight_decay(self) -> set[str]:
        """Parameters that timm's optimizers leave without weight decay."""
        names = {name for name, _ in self.named_parameters()}  # type: ignore[attr-defined]
        return names & {"positions", "class_token"}


class FeatureMaps(nn.Module):
    """A network that gives its feature maps, as timm's `features_only=True` does.

    Args:
        network: One of our convolutional classifiers or a ViT, built without a head.
        out_indices: Which maps, all if None; negative ones count from the coarsest.

    Attributes:
        feature_info: timm's record of the channels and the reduction of each.
    """

    def __init__(self, network: nn.Module, out_indices: tuple[int, ...] | None = None) -> None:
        super().__init__()
        self.network = network
        shapes = _map_shapes(network)
        size = network.example_inputs(1)[0].shape[-1]  # type: ignore[operator]
        info = [
            {"num_chs": shape[1], "reduction": round(size / shape[-1]), "module": f"maps.{i}"}
            for i, shape in enumerate(shapes)
        ]
        indices = range(len(shapes)) if out_indices is None else out_indices
        wrong = [index for index in indices if not -len(shapes) <= index < len(shapes)]
        if wrong:
            raise ReszooError(f"out_indices must be below {len(shapes)}, the number of feature maps; got {wrong[0]}")
        self.out_indices = [index % len(shapes) for index in indices]
        self.feature_info = FeatureInfo(info, tuple(self.out_indices))

    def forward(self, x: Tensor) -> list[Tensor]:
        """(N, C, H, W) -> the maps asked for, the finest first."""
        maps = self.network.feature_maps(x)  # type: ignore[operator]
        return [maps[index] for index in self.out_indices]


@torch.no_grad()
def _map_shapes(network: nn.Module) -> list[torch.Size]:
    """Shapes of the feature maps at the published size, without computing any value."""
    with torch.device("meta"):
        outline: Any = factory_of(str(network.architecture))(**dict(network.arguments))  # type: ignore[arg-type]
        return [m.shape for m in outline.eval().feature_maps(*outline.example_inputs(1))]


def _entry(name: str) -> Callable[..., nn.Module]:
    """The function that timm calls for `reszoo_<name>`."""
    factory = factory_of(name)
    face = _faced(signature(factory).return_annotation)

    def entry(
        pretrained: bool = False, features_only: bool = False, out_indices: Any = None, **options: Any
    ) -> nn.Module:
        for key in ("pretrained_cfg", "pretrained_cfg_overlay", "cache_dir"):
            options.pop(key, None)
        if pretrained:
            raise ReszooError(f"no weights of reszoo_{name} are published for timm; build it with pretrained=False")
        network = factory(**_translated(name, {**options, **({"num_classes": 0} if features_only else {})}))
        if features_only:
            return FeatureMaps(network, out_indices)
        network.__class__ = face
        network.num_classes = network.arguments["num_classes"]  # type: ignore[index]
        settings: Any = _settings(network)
        network.default_cfg = network.pretrained_cfg = settings
        return network

    entry.__name__ = entry.__qualname__ = f"reszoo_{name}"
    entry.__doc__ = factory.__doc__
    entry.__module__ = __name__
    return entry


def _translated(name: str, options: dict[str, Any]) -> dict[str, Any]:
    """Timm's options as ours; a rate of 0 is dropped where a network has no such rate."""
    known, translated = signature(factory_of(name)).parameters, {}
    for key, value in options.items():
        ours = _OPTIONS.get(key, key)
        if ours in known:
            translated[ours] = list(value) if isinstance(value, tuple) else value
        elif not (key in ("drop_rate", "drop_path_rate") and not value):
            translated[key] = value  # the factory names it in its error
    if translated.get("stochastic_depth") and "drop_path_rate" in options and "drop_per" in known:
        translated.setdefault("drop_per", "sample")  # as timm's DropPath does
    return translated


def _settings(network: nn.Module) -> dict[str, Any]:
    """Timm's record of what a network expects."""
    image = network.example_inputs(1)[0]  # type: ignore[operator]
    settings = PretrainedCfg(
        architecture=f"reszoo_{network.architecture}",
        input_size=tuple(image.shape[1:]),
        num_classes=network.arguments["num_classes"],  # type: ignore[index]
        classifier="head",
        first_conv=next((key for key, module in network.named_modules() if isinstance(module, nn.Conv2d)), None),
    )
    return settings.to_dict()


def _faced(network: type[nn.Module]) -> type[nn.Module]:
    """The class with timm's methods; it stands in this module under its name, so that its networks pickle."""
    name = f"Timm{network.__name__}"
    if name not in globals():
        globals()[name] = type(name, (TimmFace, network), {"__module__": __name__, "__doc__": network.__doc__})
    return globals()[name]


def _classifies_images(name: str) -> bool:
    """Whether the network takes images and has a head over what `feature_maps` ends in."""
    factory = factory_of(name)
    takes = {"in_chans", "num_classes"} <= set(signature(factory).parameters)
    other = factory.__module__.rpartition(".")[2] in _OTHER_TASKS
    return takes and not other and hasattr(signature(factory).return_annotation, "feature_maps")


def register() -> list[str]:
    """Add every image classifier to timm's registry that is not in it yet; the names added."""
    added = []
    for name in list_models():
        if _classifies_images(name) and not timm.is_model(f"reszoo_{name}"):
            entry = _entry(name)
            setattr(sys.modules[__name__], entry.__name__, entry)
            register_model(entry)
            added.append(entry.__name__)
    return added


__all__ = ["FeatureMaps", "TimmFace", "register"]

register()
