import numpy as np
import pytest
import torch
from PIL import Image

from reszoo.errors import ReszooError
from reszoo.preprocessing import ImageTransform, decode


def test_sixteen_bit_grey_keeps_its_range(tmp_path):
    ramp = np.linspace(0, 65535, 64 * 64).astype(np.uint16).reshape(64, 64)
    Image.fromarray(ramp).save(tmp_path / "x.png")
    pixels = decode(tmp_path / "x.png", 1)
    assert len(pixels.unique()) > 200
    assert abs(pixels.float().mean() - 127.5) < 1


@pytest.mark.parametrize("mode", ["RGBA", "P", "LA"])
def test_transparency_shows_white_not_the_colour_under_it(tmp_path, mode):
    image = Image.new("RGBA", (4, 2), (255, 0, 0, 255))
    image.paste((255, 0, 0, 0), (0, 0, 2, 2))
    flat = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image).convert("RGB")
    if mode == "LA":
        image, flat = (
            image.convert("LA"),
            Image.alpha_composite(Image.new("RGBA", image.size, "white"), image.convert("LA").convert("RGBA")),
        )
    if mode == "P":
        image = flat.convert("P", palette=Image.Palette.ADAPTIVE)
        image.info["transparency"] = image.getpixel((0, 0))
    image.save(tmp_path / "x.png")
    assert decode(tmp_path / "x.png", 3)[:, 0, 0].tolist() == [255, 255, 255]
    assert torch.equal(decode(tmp_path / "x.png", 3), decode(flat.convert("RGB"), 3))


def test_exif_orientation_is_applied(tmp_path):
    image = Image.new("RGB", (20, 40), "white")
    exif = Image.Exif()
    exif[0x0112] = 6
    image.save(tmp_path / "x.jpg", exif=exif)
    assert decode(tmp_path / "x.jpg", 3).shape == (3, 20, 40)


@pytest.mark.parametrize("content", [b"", b"<html></html>", None])
def test_an_unreadable_file_is_named(tmp_path, content):
    path = tmp_path / "x.jpg"
    if content is None:
        Image.effect_noise((64, 64), 50).save(path)
        content = path.read_bytes()[:600]
    path.write_bytes(content)
    with pytest.raises(ReszooError, match=r"x\.jpg' cannot be read"):
        decode(path, 3)


def test_floats_beyond_their_range_are_refused_not_clipped():
    with pytest.raises(ReszooError, match="mode 'F' must hold values from 0 to 1, found 0 to 3"):
        decode(Image.fromarray(np.array([[0.0, 3.0]], dtype=np.float32)), 1)


def test_grey_repeats_and_colour_becomes_luma():
    assert decode(Image.new("L", (1, 1), 7), 3).flatten().tolist() == [7, 7, 7]
    assert decode(Image.new("RGB", (1, 1), (255, 0, 0)), 1).item() == 76  # 0.299 * 255


def test_an_image_of_the_right_size_is_only_standardised():
    transform = ImageTransform((8, 8), (0.5,), (0.25,))
    pixels = torch.randint(0, 256, (1, 8, 8), dtype=torch.uint8)
    torch.testing.assert_close(transform(pixels), (pixels / 255 - 0.5) / 0.25)


@pytest.mark.parametrize(("height", "width"), [(30, 20), (20, 30), (4, 100), (8, 8)])
def test_any_size_becomes_the_networks(height, width):
    image = torch.randint(0, 256, (3, height, width), dtype=torch.uint8)
    assert ImageTransform((8, 12), (0.5,) * 3, (0.2,) * 3, crop=0.9)(image).shape == (3, 8, 12)


def test_the_values_survive_json():
    import json

    transform = ImageTransform((8, 12), (0.5,), (0.2,), 0.9, "bicubic")
    assert ImageTransform.from_dict(json.loads(json.dumps(transform.as_dict()))) == transform


@pytest.mark.parametrize(
    "bad", [{"mean": (0.5, 0.5)}, {"std": (0.0,)}, {"crop": 0.0}, {"interpolation": "lanczos"}, {"size": (0, 8)}]
)
def test_values_that_cannot_be_are_refused(bad):
    with pytest.raises(ReszooError):
        ImageTransform(**({"size": (8, 8), "mean": (0.5,), "std": (0.2,)} | bad))


@pytest.mark.parametrize(
    "change", [{"size": "88"}, {"size": [8, 8, 8]}, {"mean": ["0.5"]}, {"std": [float("nan")]}, {"crop": "1"}]
)
def test_a_stored_transform_is_never_cast(change):
    stored = ImageTransform((8, 8), (0.5,), (0.5,)).as_dict()
    with pytest.raises(ReszooError, match="transform: "):
        ImageTransform.from_dict(stored | change)


def test_a_picture_without_a_defined_range_is_named(tmp_path):
    Image.fromarray(np.full((8, 8), 70_000, np.int32)).save(tmp_path / "x.tif")
    with pytest.raises(ReszooError, match=r"x.tif': a picture of mode 'I' must hold"):
        decode(tmp_path / "x.tif", 1)
