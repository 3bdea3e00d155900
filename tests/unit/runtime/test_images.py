"""Images: every mode becomes upright RGB or is refused by name; the processor equals the reference."""

from __future__ import annotations

import io
import struct
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from vlmexport.runtime.bundle.manifest import ImageInfo
from vlmexport.runtime.common.errors import BundleError, ImageError
from vlmexport.runtime.images import load as load_module
from vlmexport.runtime.images.load import load_image
from vlmexport.runtime.images.processors import crop, preprocess
from vlmexport.runtime.images.processors.window import resized_window
from vlmexport.runtime.images.video import Video, open_video

SETTINGS = ImageInfo(
    processor="blip", height=48, width=64, resample="bicubic", rescale_factor=1 / 255,
    mean=[0.48145466, 0.4578275, 0.40821073], std=[0.26862954, 0.26130258, 0.27577711],
)  # fmt: skip


def picture(width: int = 53, height: int = 37) -> Image.Image:
    """Smooth colour with an asymmetric bright corner: any rotation, mirror or channel swap shows."""
    y, x = np.mgrid[0:height, 0:width]
    pixels = np.stack([x * 255 // width, y * 255 // height, (x + y) * 255 // (width + height)], axis=-1)
    pixels[:5, :9] = 255
    return Image.fromarray(pixels.astype(np.uint8))


def same(a: Image.Image, b: Image.Image, tolerance: int = 0) -> bool:
    left, right = np.asarray(a, np.int16), np.asarray(b, np.int16)
    return left.shape == right.shape and int(np.abs(left - right).max()) <= tolerance


def test_path_pil_and_array_are_the_same(tmp_path: Path) -> None:
    original = picture()
    original.save(tmp_path / "a.png")
    for source in (tmp_path / "a.png", str(tmp_path / "a.png"), original, np.asarray(original)):
        loaded = load_image(source)
        assert loaded.mode == "RGB"
        assert same(loaded, original)


def test_an_array_view_with_strides_is_read_right() -> None:
    array = np.asarray(picture())
    assert same(load_image(array[:, ::-1]), Image.fromarray(array[:, ::-1].copy()))


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("kind", ["path", "pil"])
def test_exif_rotation_is_applied(tmp_path: Path, orientation: int, kind: str) -> None:
    upright = picture()
    # How the sensor stored it: the inverse of what a viewer does (TIFF 6.0, tag 274).
    stored = {
        1: lambda i: i,
        2: lambda i: i.transpose(Image.Transpose.FLIP_LEFT_RIGHT),
        3: lambda i: i.transpose(Image.Transpose.ROTATE_180),
        4: lambda i: i.transpose(Image.Transpose.FLIP_TOP_BOTTOM),
        5: lambda i: i.transpose(Image.Transpose.TRANSPOSE),
        6: lambda i: i.transpose(Image.Transpose.ROTATE_90),
        7: lambda i: i.transpose(Image.Transpose.TRANSVERSE),
        8: lambda i: i.transpose(Image.Transpose.ROTATE_270),
    }[orientation](upright)
    exif = Image.Exif()
    exif[274] = orientation
    path = tmp_path / "a.png"
    stored.save(path, exif=exif)
    assert same(load_image(path if kind == "path" else Image.open(path)), upright)


@pytest.mark.filterwarnings("error")
def test_unreadable_exif_is_ignored(tmp_path: Path) -> None:
    path = tmp_path / "a.jpg"
    picture().save(path, exif=b"Exif\x00\x00II*\x00\xff\xff\xff\xff rubbish", quality=95)
    assert load_image(path).size == (53, 37)


@pytest.mark.parametrize("mode", ["L", "1", "P", "CMYK", "YCbCr", "HSV"])
def test_modes_without_transparency_convert_as_pillow_does(mode: str) -> None:
    image = picture().convert(mode)
    assert same(load_image(image), image.convert("RGB"))


@pytest.mark.parametrize("extension", ["jpg", "tif"])
def test_cmyk_files(tmp_path: Path, extension: str) -> None:
    path = tmp_path / f"a.{extension}"
    picture().convert("CMYK").save(path)
    assert Image.open(path).mode == "CMYK"
    assert same(load_image(path), picture(), tolerance=40 if extension == "jpg" else 1)


def test_transparency_is_laid_over_white() -> None:
    image = picture().convert("RGBA")
    alpha = np.full((37, 53), 255, np.uint8)
    alpha[:, :20], alpha[:, 20:30] = 0, 128
    image.putalpha(Image.fromarray(alpha))
    pixels = np.asarray(load_image(image))
    assert (pixels[:, :20] == 255).all()
    np.testing.assert_array_equal(pixels[:, 30:], np.asarray(picture())[:, 30:])
    half = np.asarray(picture())[:, 20:30] * (128 / 255) + 255 * (127 / 255)
    assert np.abs(pixels[:, 20:30] - half).max() <= 1


def test_transparent_palette_and_grey_alpha(tmp_path: Path) -> None:
    palette = picture().convert("P")
    palette.save(tmp_path / "a.png", transparency=palette.getpixel((0, 0)))
    pixels = np.asarray(load_image(tmp_path / "a.png"))
    assert (pixels[0, 0] == 255).all()
    grey = Image.merge("LA", (picture().convert("L"), Image.new("L", (53, 37), 0)))
    assert (np.asarray(load_image(grey)) == 255).all()


@pytest.mark.parametrize("extension", ["png", "tif", "pgm"])
def test_16_bit_grey_is_scaled_not_clipped(tmp_path: Path, extension: str) -> None:
    values = np.linspace(0, 65535, 53 * 37).reshape(37, 53).astype(np.uint16)
    Image.fromarray(values).save(tmp_path / f"a.{extension}")
    pixels = np.asarray(load_image(tmp_path / f"a.{extension}"))
    expected = np.round(values / 257).astype(np.uint8)
    np.testing.assert_array_equal(pixels, np.repeat(expected[..., None], 3, axis=2))


def grey_values(highest: int) -> np.ndarray:
    values = np.linspace(0, highest, 53 * 37).round().reshape(37, 53)
    assert values.max() == highest
    return values.astype(np.uint16)


@pytest.mark.parametrize("extension", ["png", "tif"])
@pytest.mark.parametrize(
    ("highest", "full"),
    [(0, 255), (200, 255), (256, 1023), (1023, 1023), (3000, 4095), (4095, 4095), (16000, 16383)],
)
def test_grey_of_fewer_bits_in_16_is_scaled_by_its_range(
    tmp_path: Path, extension: str, highest: int, full: int
) -> None:
    values = grey_values(highest)
    expected = np.repeat(np.round(values * (255 / full)).astype(np.uint8)[..., None], 3, axis=2)
    Image.fromarray(values).save(tmp_path / f"a.{extension}")
    sources = [tmp_path / f"a.{extension}", Image.fromarray(values), Image.fromarray(values.astype(np.int32))]
    for source in sources:
        found = np.asarray(load_image(source))
        assert np.abs(found.astype(int) - expected).max() <= (full not in (255, 65535)), "but for halves"


def test_8_bit_values_in_16_bits_are_those_of_8_bits() -> None:
    values = np.arange(256, dtype=np.uint8).reshape(16, 16)
    assert same(load_image(Image.fromarray(values.astype(np.uint16))), load_image(Image.fromarray(values)))


def test_declared_value_range_is_used(tmp_path: Path) -> None:
    values = grey_values(900)
    Image.fromarray(values).save(tmp_path / "a.tif", tiffinfo={281: 4095})
    assert np.asarray(load_image(tmp_path / "a.tif")).max() == round(900 * 255 / 4095)
    Image.fromarray(values).save(tmp_path / "low.tif", tiffinfo={281: 100})  # it lies
    assert np.asarray(load_image(tmp_path / "low.tif")).max() == round(900 * 255 / 1023)
    (tmp_path / "a.pgm").write_bytes(b"P5 53 37 4095\n" + values.astype(">u2").tobytes())
    assert np.asarray(load_image(tmp_path / "a.pgm")).max() == round(900 * 255 / 4095)


def test_values_beyond_16_bits_are_refused() -> None:
    for value in (70000, -1):
        with pytest.raises(ImageError, match=r"grey values 0\.\.70000 .* 8-bit PNG|grey values -1\.\.0"):
            load_image(Image.fromarray(np.array([[0, value]], np.int32)))


def test_bytes_and_streams_are_read_as_files_are(tmp_path: Path) -> None:
    picture().save(tmp_path / "a.png")
    data = (tmp_path / "a.png").read_bytes()
    for source in (data, bytearray(data), memoryview(data), io.BytesIO(data)):
        assert same(load_image(source), picture())
    with (tmp_path / "a.png").open("rb") as stream:
        assert same(load_image(stream), picture())


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (b"", "the image: is empty"),
        (b"not an image", "the image: not an image of a known format"),
        (io.BytesIO(b""), "the image: is empty"),
        (io.StringIO("x"), "the stream gives str, not bytes; open the file in mode 'rb'"),
        (type("Broken", (), {"read": lambda *_: 1 / 0})(), r"the image: cannot be read \(division by zero\)"),
    ],
)
def test_bytes_that_are_no_image_are_refused(source: object, message: str) -> None:
    with pytest.raises(ImageError, match=message):
        load_image(source)


def test_too_many_bytes_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load_module, "MOST_BYTES", 100)
    data = io.BytesIO()
    picture().save(data, "PNG")
    for source in (data.getvalue(), io.BytesIO(data.getvalue())):
        with pytest.raises(ImageError, match="the image: more than 0 MiB; scale it down"):
            load_image(source)


def test_grey_arrays_and_the_order_of_colours() -> None:
    array = np.array(picture())
    assert same(load_image(array[:, :, ::-1], channels="bgr"), picture())
    assert same(load_image(np.ascontiguousarray(array[:, :, ::-1]), channels="bgr"), picture())
    grey = array[:, :, 0]
    for source in (grey, grey[:, :, None]):
        for channels in ("rgb", "bgr"):
            assert (np.asarray(load_image(source, channels)) == grey[:, :, None]).all()


def test_color_order_without_effect_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ImageError, match="channels: 'BGR' is not one of rgb, bgr"):
        load_image(np.array(picture()), channels="BGR")
    for source, kind in ((picture(), "Image"), (tmp_path / "a.png", "a path"), (b"x", "bytes")):
        with pytest.raises(ImageError, match=f"'bgr' is for arrays, .* leave it out for {kind}"):
            load_image(source, channels="bgr")


def _png(
    size: tuple[int, int], depth: int, colour: int, rows: list[bytes], transparent: bytes = b""
) -> bytes:
    """A PNG of a kind that Pillow reads but cannot write; `colour` 0 is grey, 2 RGB."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = chunk(b"IHDR", struct.pack(">IIBBBBB", *size, depth, colour, 0, 0, 0))
    header += chunk(b"tRNS", transparent) if transparent else b""
    data = zlib.compress(b"".join(b"\0" + row for row in rows))
    return b"\x89PNG\r\n\x1a\n" + header + chunk(b"IDAT", data) + chunk(b"IEND", b"")


def _sixteen_bit_colour(values: np.ndarray) -> bytes:
    height, width, _ = values.shape
    return _png((width, height), 16, 2, [row.astype(">u2").tobytes() for row in values])


@pytest.mark.parametrize("depth", [1, 2, 4, 8, 16])
@pytest.mark.parametrize("transparent", [0, 1])
def test_a_transparent_grey_is_laid_over_white_at_every_depth(depth: int, transparent: int) -> None:
    most = 2**depth - 1
    values = [0, 1, most]
    packed = sum(value << depth * (7 - at) for at, value in enumerate(values)).to_bytes(depth, "big")
    found = load_image(_png((3, 1), depth, 0, [packed[: -(-3 * depth // 8)]], struct.pack(">H", transparent)))
    wanted = [255 if value == transparent else round(value * 255 / most) for value in values]
    assert np.asarray(found)[0].tolist() == [[value] * 3 for value in wanted]


@pytest.mark.parametrize("depth", [8, 16])
def test_a_transparent_colour_is_laid_over_white_at_every_depth(depth: int) -> None:
    form, scale = (">9B", 1) if depth == 8 else (">9H", 256)
    colours = [3 * scale, 4 * scale, 5 * scale, 3 * scale, 4 * scale, 6 * scale, 3, 4, 250 * scale]
    transparent = struct.pack(">3H", *colours[:3])
    found = load_image(_png((3, 1), depth, 2, [struct.pack(form, *colours)], transparent))
    assert np.asarray(found)[0].tolist() == [[255] * 3, [3, 4, 6], [3 // scale, 4 // scale, 250]]


def test_16_bit_colour_keeps_its_range(tmp_path: Path) -> None:
    values = np.linspace(0, 65535, 10 * 12 * 3).reshape(10, 12, 3).astype(np.uint16)
    (tmp_path / "a.png").write_bytes(_sixteen_bit_colour(values))
    np.testing.assert_array_equal(np.asarray(load_image(tmp_path / "a.png")), (values >> 8).astype(np.uint8))


def test_the_first_frame_of_an_animation(tmp_path: Path) -> None:
    frames = [Image.new("RGB", (20, 20), colour) for colour in ("red", "blue")]
    frames[0].save(tmp_path / "a.gif", save_all=True, append_images=frames[1:])
    assert load_image(tmp_path / "a.gif").getpixel((5, 5)) == (255, 0, 0)


def _bomb() -> bytes:
    """A valid PNG header that claims 30,000 × 30,000 pixels."""
    header = b"IHDR" + struct.pack(">IIBBBBB", 30_000, 30_000, 8, 2, 0, 0, 0)
    body = struct.pack(">I", 13) + header + struct.pack(">I", zlib.crc32(header))
    return (
        b"\x89PNG\r\n\x1a\n" + body + struct.pack(">I", 0) + b"IDAT" + struct.pack(">I", zlib.crc32(b"IDAT"))
    )


def _encoded(kind: str, **options: object) -> bytes:
    stream = io.BytesIO()
    picture(300, 200).save(stream, kind, **options)
    return stream.getvalue()


BAD_FILES = {
    "empty.png": (b"", "is empty"),
    "text.jpg": (b"not an image at all, just words", "not an image of a known format"),
    "cut.jpg": (_encoded("JPEG")[:2000], "truncated or damaged"),
    "cut.png": (_encoded("PNG")[:900], "truncated or damaged"),
    "header.png": (_encoded("PNG")[:20], "not an image|cannot be read|truncated"),
    "bomb.png": (_bomb(), "megapixels"),
    "vector.eps": (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n", "not an image of a known format"),
}


@pytest.mark.parametrize("name", BAD_FILES)
def test_bad_files_are_refused_by_name(tmp_path: Path, name: str) -> None:
    data, message = BAD_FILES[name]
    (tmp_path / name).write_bytes(data)
    with pytest.raises(ImageError, match=message) as caught:
        load_image(tmp_path / name)
    assert name in str(caught.value)
    assert "\n" not in str(caught.value)


def test_missing_file_and_folder(tmp_path: Path) -> None:
    with pytest.raises(ImageError, match="the image: its path is empty"):
        load_image("")
    with pytest.raises(ImageError, match="no such image file"):
        load_image(tmp_path / "none.png")
    with pytest.raises(ImageError, match="is not a file"):
        load_image(tmp_path)


def test_large_images_are_refused_before_decoding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    picture().save(tmp_path / "a.png")
    monkeypatch.setattr(load_module, "MAX_PIXELS", 53 * 37)
    load_image(tmp_path / "a.png")
    monkeypatch.setattr(load_module, "MAX_PIXELS", 53 * 37 - 1)
    monkeypatch.setattr(Image.Image, "load", lambda self: pytest.fail("decoded before the limit was checked"))
    with pytest.raises(ImageError, match="53 × 37 pixels; the limit is"):
        load_image(tmp_path / "a.png")


@pytest.mark.parametrize(
    "array",
    [
        np.zeros((4, 4, 3), np.float32), np.zeros((4, 4, 3), np.uint16), np.zeros((4, 4), np.uint16),
        np.zeros((3, 4, 4), np.uint8), np.zeros((4, 4, 4), np.uint8), np.zeros((1, 4, 4, 3), np.uint8),
        np.zeros((0, 4, 3), np.uint8), np.broadcast_to(np.uint8(7), (10**7, 10**7, 3)),
    ],
    ids=lambda a: f"{a.dtype}{list(a.shape)}",
)  # fmt: skip
def test_other_arrays_are_refused(array: np.ndarray) -> None:
    with pytest.raises(ImageError, match="array"):
        load_image(array)


@pytest.mark.parametrize("source", [b"bytes", 3, [1, 2], Image.new("F", (3, 3)), Image.new("RGB", (0, 4))])
def test_other_sources_are_refused(source: object) -> None:
    with pytest.raises(ImageError):
        load_image(source)


REMOTE = {
    "http://x/y.png": "is a URL, and nothing is downloaded: save it",
    "https://x/a//b.png": "is a URL, and nothing is downloaded: save it",
    "s3://bucket/y.png": "is a URL, and nothing is downloaded: save it",
    "file:///a/b%20c.png": "is a URL: give the path alone, /a/b c.png",
    "data:image/png;base64,iVBO": "give the bytes, base64",
    "rtsp://camera/1": "is a camera or a stream",
    "/dev/video0": "is a camera or a stream",
    "0": "is a camera or a stream",
    0: "is a camera or a stream",
}


@pytest.mark.parametrize("source", REMOTE)
@pytest.mark.parametrize(
    "read", [load_image, lambda source: open_video(Video(source))], ids=["image", "video"]
)
def test_url_and_camera_errors_name_the_remedy(
    read: Callable[[object], object], source: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for given in (source, Path(source)) if isinstance(source, str) else (source,):
        with pytest.raises(ImageError) as caught:
            read(given)
        message = str(caught.value)
        assert REMOTE[source] in message and "\n" not in message
        if "//b" not in str(source) or given is source:
            assert message.startswith(f"{source}: "), "kept as typed, also where `Path` loses a slash"


@pytest.mark.parametrize("name", ["a:b.png", "http.png", "C:/a.png", "video0", "12345.png"])
def test_ordinary_names_are_not_urls(name: str) -> None:
    with pytest.raises(ImageError, match="no such image file"):
        load_image(name)


def test_file_named_like_a_camera_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    picture().save("0", format="PNG")
    assert same(load_image("0"), picture())


def test_pixel_values_by_hand() -> None:
    white = preprocess(Image.new("RGB", (10, 10), (255, 0, 51)), SETTINGS)
    assert white.shape == (1, 3, 48, 64)
    assert white.dtype == np.float32
    expected = (np.array([1.0, 0.0, 0.2]) - SETTINGS.mean) / np.array(SETTINGS.std)
    np.testing.assert_allclose(white[0, :, 7, 9], expected, atol=1e-6)


def test_unknown_processor_and_filter_are_named() -> None:
    image = picture()
    for field, message in (("processor", "image.processor': 'x'"), ("resample", "image.resample': 'x'")):
        settings = ImageInfo(**{**SETTINGS.to_dict(), field: "x"})
        with pytest.raises(BundleError, match=message):
            preprocess(image, settings)


SIZES = [(64, 48), (53, 37), (640, 480), (31, 200), (1, 1), (1920, 1080)]


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("mode", ["RGB", "L", "RGBA", "P"])
def test_equals_the_reference_processor(size: tuple[int, int], mode: str) -> None:
    reference = pytest.importorskip("transformers.models.blip.image_processing_pil_blip")
    processor = reference.BlipImageProcessorPil(
        size={"height": SETTINGS.height, "width": SETTINGS.width},
        image_mean=SETTINGS.mean,
        image_std=SETTINGS.std,
    )
    image = picture(*size)
    if mode == "RGBA":
        image.putalpha(image.convert("L"))
    image = image.convert(mode)
    expected = processor(image, return_tensors="np")["pixel_values"]
    found = preprocess(load_image(image), SETTINGS)
    assert found.shape == expected.shape
    assert np.abs(found - expected).max() <= 1e-5


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_vit_pixels_equal_its_processor(size: tuple[int, int]) -> None:
    reference = pytest.importorskip("transformers.models.vit.image_processing_pil_vit")
    settings = ImageInfo(
        processor="vit", height=56, width=56, resample="bilinear", rescale_factor=1 / 255, mean=[0.5] * 3, std=[0.5] * 3
    )  # fmt: skip
    processor = reference.ViTImageProcessorPil(size={"height": 56, "width": 56})
    expected = processor(picture(*size), return_tensors="np")["pixel_values"]
    assert np.abs(preprocess(load_image(picture(*size)), settings) - expected).max() <= 1e-6


def test_a_processor_of_one_size_needs_that_size() -> None:
    settings = ImageInfo(**{**SETTINGS.to_dict(), "height": None})
    with pytest.raises(BundleError, match=r"'image\.height' and 'image\.width' must be set"):
        preprocess(picture(), settings)


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_difference_to_the_torchvision_backend(
    size: tuple[int, int], record_property: Callable[[str, object], None]
) -> None:
    """Informative: that backend resizes with other arithmetic; the reference is the PIL one."""
    pytest.importorskip("torchvision")
    reference = pytest.importorskip("transformers.models.blip.image_processing_blip")
    processor = reference.BlipImageProcessor(
        size={"height": SETTINGS.height, "width": SETTINGS.width},
        image_mean=SETTINGS.mean,
        image_std=SETTINGS.std,
    )
    expected = processor(picture(*size), return_tensors="np")["pixel_values"]
    difference = float(np.abs(preprocess(load_image(picture(*size)), SETTINGS) - expected).max())
    record_property("largest_difference", difference)
    print(f"{size}: largest difference {difference:.3g}")
    assert difference < 0.2  # one grey level is 0.015


# --- thin pictures ---


@pytest.mark.parametrize("resample", ["BOX", "BILINEAR", "HAMMING", "BICUBIC", "LANCZOS"])
def test_a_window_of_a_resized_picture_is_that_of_the_whole(resample: str) -> None:
    random, filter_ = np.random.default_rng(0), Image.Resampling[resample]
    for turn in range(80):
        short = int(random.integers(1, 40))
        long = int(short * random.uniform(1, 40))
        shape = (long, short) if turn % 2 else (short, long)
        image = Image.fromarray(random.integers(0, 256, (*shape, 3), dtype=np.uint8))
        side = int(random.integers(short, 60))
        longer = int(side * long / short)
        if longer < long:
            continue
        size = (side, longer) if turn % 2 else (longer, side)
        count = int(random.integers(1, longer + 1))
        start = int(random.integers(0, longer - count + 1))
        whole = np.asarray(image.resize(size, filter_))
        wanted = whole[start : start + count] if turn % 2 else whole[:, start : start + count]
        found = resized_window(image, size, 0 if turn % 2 else 1, start, count, filter_)
        np.testing.assert_array_equal(found, wanted)


@pytest.mark.parametrize("size", [(1, 20_000), (20_000, 1), (3, 9_001), (7_000, 2)], ids=str)
def test_only_the_visible_middle_of_a_thin_picture_is_resized(
    size: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = ImageInfo(**{**SETTINGS.to_dict(), "processor": "clip", "height": 32, "width": 32})
    settings.extra = {"shortest_edge": 32}
    image = Image.fromarray(np.random.default_rng(1).integers(0, 256, (*size[::-1], 3), dtype=np.uint8))
    resize, made = Image.Image.resize, []

    def counted(self: Image.Image, *arguments: Any, **options: Any) -> Image.Image:
        found = resize(self, *arguments, **options)
        made.append(found.width * found.height)
        return found

    monkeypatch.setattr(Image.Image, "resize", counted)
    found = preprocess(image, settings)
    assert max(made) <= size[0] * size[1] + 32 * 64
    monkeypatch.setattr(crop, "THIN", 1 << 30)
    np.testing.assert_array_equal(found, preprocess(image, settings))
