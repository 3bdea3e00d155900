"""SmolVLM and Idefics 3: tiles, frames and their text as transformers' own classes have them; what is refused."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import SmolVLMProcessor
from transformers.models.smolvlm import modeling_smolvlm, processing_smolvlm
from transformers.models.smolvlm.processing_smolvlm import DEFAULT_CHAT_TEMPLATE
from transformers.models.smolvlm.video_processing_smolvlm import SmolVLMVideoProcessor
from transformers.video_utils import VideoMetadata
from vlmexport.exporter.checkpoint import open_checkpoint
from vlmexport.exporter.families.common.reference import collate
from vlmexport.exporter.families.registry import family_for
from vlmexport.exporter.families.smolvlm import with_videos
from vlmexport.exporter.families.vision import idefics3
from vlmexport.exporter.parity.reference import load_reference
from vlmexport.exporter.pipeline import BuildRequest, build_bundle
from vlmexport.exporter.pipeline.prepare import prepare
from vlmexport.runtime import Session, Video
from vlmexport.runtime.bundle.folder import Bundle
from vlmexport.runtime.bundle.manifest import ImageInfo, VideoInfo
from vlmexport.runtime.common.errors import ImageError, OptionError, UnsupportedModelError
from vlmexport.runtime.families import get_family, smolvlm
from vlmexport.runtime.families.smolvlm import Frames, picture_text
from vlmexport.runtime.images.processors import split
from vlmexport.runtime.images.splits import Splitting
from vlmexport.runtime.images.synthetic import synthetic_image
from vlmexport.runtime.text.chat import render_chat
from vlmexport.runtime.text.numbers import in_words
from vlmexport.runtime.text.tokenizer import Tokenizer

from tests.support import tiny_models, tiny_smolvlm

NAME = "smolvlm"
HALF = {"resample": "lanczos", "rescale_factor": 1 / 255, "mean": [0.5] * 3, "std": [0.5] * 3}
Built = Callable[..., tuple[Path, Path]]


# --- pixels ---


def sizes(draw: random.Random) -> tuple[int, int]:
    """(height, width): near each other, slim both ways, square."""
    side = draw.randint(1, 200)
    return draw.choice(
        [
            (draw.randint(1, 160), draw.randint(1, 160)),
            (draw.randint(1, 12), draw.randint(100, 400)),
            (draw.randint(100, 400), draw.randint(1, 12)),
            (side, side),
        ]
    )


@pytest.mark.parametrize("kind", ["smolvlm", "idefics3"])
def test_tiles_equal_transformers_bit_for_bit(kind: str) -> None:
    """Of 120 pictures of each; tiles of even and odd sides, a longest side of whole tiles or not, below one, odd, and above
    what transformers allows."""
    draw, seen = random.Random(kind), set()
    for number in range(120):
        side = draw.choice([26, 28, 32, 33])
        longest = draw.choice([side, 2 * side, 3 * side, 4 * side, 2 * side + 7, side - 5, 4 * side + 1])
        height, width = sizes(draw)
        if number % 30 == 29:
            side, longest, height, width = 1024, 5000, draw.randint(1, 9), draw.randint(50, 90)
        tiled = number % 6 != 0
        pixels = np.random.default_rng(number).integers(0, 256, (height, width, 3), dtype=np.uint8)
        image = Image.fromarray(pixels)
        reference = tiny_smolvlm.KINDS[kind][2](
            size={"longest_edge": longest}, max_image_size={"longest_edge": side}, do_image_splitting=tiled
        )
        want = reference(images=[[image]], return_tensors="np", return_row_col_info=True)
        splitting = Splitting(side, longest, tiled, 4)
        info = ImageInfo(processor="idefics3", height=side, width=side, **HALF)
        found = split.split(image, info, splitting)
        np.testing.assert_array_equal(found, want["pixel_values"][0])
        rows = (want["rows"][0][0], want["cols"][0][0])
        assert splitting.tiles(height, width) == rows and len(found) == splitting.tiles_of(*rows)
        assert len(found) <= splitting.most_tiles
        seen.add((tiled, rows == (0, 0)))
    assert seen == {(True, True), (True, False), (False, True)}


def test_no_picture_has_more_tiles_than_a_square_one() -> None:
    for side, longest in ((32, 64), (33, 99), (28, 85), (26, 26), (512, 2048), (384, 1536), (364, 5000)):
        splitting = Splitting(side, longest, True, 1)
        ratios = [(1000, width) for width in range(1, 3001, 7)]
        most = max(splitting.tiles_of(*splitting.tiles(*size)) for size in [*ratios, (1000, 1000)])
        assert most == splitting.most_tiles
    assert Splitting(512, 2048, True, 64).most_embeds == 17 * 64
    assert Splitting(384, 1536, True, 81).most_embeds == 17 * 81
    assert Splitting(512, 512, True, 64).most_embeds == Splitting(512, 2048, False, 64).most_embeds == 64


@pytest.mark.parametrize(("side", "patch"), [(32, 8), (364, 14), (384, 14), (512, 16), (224, 14), (448, 14)])
def test_positions_of_patches_are_their_numbers(side: int, patch: int) -> None:
    config: Any = modeling_smolvlm.SmolVLMVisionConfig(
        image_size=side, patch_size=patch, num_attention_heads=1
    )
    idefics3.check_positions(modeling_smolvlm.SmolVLMVisionEmbeddings, config, side // patch, "SmolVLM")


def test_other_positions_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """As rounding would make them."""
    arange = torch.arange
    monkeypatch.setattr(
        torch, "arange", lambda *a, **k: arange(*a, **k) + (0.3 if len(a) == 3 and a[1] == 1.0 else 0)
    )
    config: Any = modeling_smolvlm.SmolVLMVisionConfig(image_size=32, patch_size=8, num_attention_heads=1)
    with pytest.raises(UnsupportedModelError, match="has 4 patches along a side, which transformers rounds"):
        idefics3.check_positions(modeling_smolvlm.SmolVLMVisionEmbeddings, config, 4, "SmolVLM")


# --- text ---


class Processor(SmolVLMProcessor):
    """Transformers' own, with what its text of pictures and videos takes."""

    def __init__(self, tile_embeds: int) -> None:
        self.image_seq_len, self.image_token, self.video_token = tile_embeds, "<image>", "<video>"
        self.fake_image_token, self.global_image_token = "<fake_token_around_image>", "<global-img>"


def text_of(written: tuple[str | int, ...]) -> str:
    return "".join(piece if isinstance(piece, str) else "<image>" * piece for piece in written)


@pytest.mark.parametrize("grid", [(0, 0), (1, 2), (2, 1), (3, 4), (4, 4)])
def test_text_of_a_picture_is_transformers(grid: tuple[int, int]) -> None:
    want = Processor(5).replace_image_token({"rows": [[grid[0]]], "cols": [[grid[1]]]}, 0)
    assert text_of(picture_text(*grid, 5)) == want


@pytest.mark.parametrize(
    ("count", "fps", "shown", "most"),
    [(1, 1.0, None, 64), (16, 2.0, None, 64), (2, 30.0, None, 4), (300, 30.0, None, 4), (90, 1.0, None, 4), (4000, 25.0, 0.4, 8),
     (250, 12.5, 3.0, 64), (7000, 1.0, None, 64), (3, 1.0, 0.2, 64), (5, 2.0, 1.0, 2)],
)  # fmt: skip
def test_frames_and_their_text_are_transformers(
    monkeypatch: pytest.MonkeyPatch, count: int, fps: float, shown: float | None, most: int
) -> None:
    monkeypatch.setattr(processing_smolvlm, "num2words", in_words)
    about = VideoMetadata(count, fps, duration=count / fps)
    want: Any = SmolVLMVideoProcessor.sample_frames(SimpleNamespace(), about, most, shown or 1)  # type: ignore[arg-type]
    about.frames_indices = want.tolist()
    info = VideoInfo(
        token_id=0, fps=1.0, min_frames=1, max_frames=most, min_pixels=1, max_pixels=1, max_rows=1, tokens_per_second=0,
    )  # fmt: skip
    blank = np.zeros((count, 2, 2, 3), np.uint8)
    found = Frames.of(Video(blank, fps, shown), info)
    assert found.chosen == about.frames_indices
    shape = SimpleNamespace(shape=(1, len(want)))
    said = Processor(3).replace_video_token({"pixel_values": shape, "video_metadata": [about]}, 0)
    assert text_of(found.text(3)) == said


NUMBERS = {
    0: "zero", 1: "one", 12: "twelve", 19: "nineteen", 20: "twenty", 21: "twenty-one", 64: "sixty-four", 100: "one hundred",
    101: "one hundred and one", 128: "one hundred and twenty-eight", 768: "seven hundred and sixty-eight",
    1000: "one thousand", 1001: "one thousand and one", 1100: "one thousand, one hundred",
    12_345: "twelve thousand, three hundred and forty-five",
    999_999: "nine hundred and ninety-nine thousand, nine hundred and ninety-nine",
}  # fmt: skip


def test_numbers_in_words_are_those_of_num2words() -> None:
    """What the package writes, noted once."""
    assert {number: in_words(number) for number in NUMBERS} == NUMBERS
    for number in (-1, 1_000_000):
        with pytest.raises(ValueError, match=r"is not in 0\.\.999999"):
            in_words(number)


def test_conversations_with_a_video_have_transformers_own_template() -> None:
    own, special = "\n" + tiny_smolvlm.TEMPLATE.replace("<image>", "[picture]") + "!\n", {}
    template = with_videos(own)
    for kinds in (("text",), ("image", "text"), ("text", "video"), ("video", "image", "text")):
        turn = {"role": "user", "content": [{"type": kind, "text": f"{kind} <b>"} for kind in kinds]}
        want = render_chat(DEFAULT_CHAT_TEMPLATE if "video" in kinds else own, [turn], special)
        assert render_chat(template, [turn], special) == want
        assert ("[picture]" in want) == ("image" in kinds and "video" not in kinds)


# --- requests ---

PICTURES = [Image.fromarray(synthetic_image(*size)) for size in ((50, 70), (30, 170), (64, 33), (170, 31))]
FILM = Video([np.asarray(picture.resize((60, 40))) for picture in PICTURES[:3]], 1.0)
REQUESTS: list[tuple[list[Any], Any]] = [
    ([], "the red cup"),
    (PICTURES[:1], "the red cup"),
    (PICTURES, "cup"),
    ([FILM], "cup"),
    (
        [PICTURES[1], FILM, PICTURES[0]],
        [
            {"role": "system", "content": [{"type": "text", "text": "look"}]},
            {
                "role": "user",
                "content": [{"type": "text", "text": "a\n"}, {"type": "image"}, {"type": "video"}],
            },
            {"role": "assistant", "content": [{"type": "text", "text": "red"}]},
            {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "\n\nb"}]},
        ],
    ),
]


def compare(bundle: Path, checkpoint: Path) -> None:
    """Ids and tiles of requests with transformers'."""
    family, opened = family_for(open_checkpoint(checkpoint)), Bundle.open(bundle)
    for given, prompt in REQUESTS:
        want = family.reference_prompt(given or None, prompt)
        found = get_family(NAME).prepare(opened, given or None, prompt)
        assert found.token_ids.tolist() == list(want.input_ids)
        if want.vision is not None:
            tiles = np.stack([run["pixel_values"] for run in found.vision])
            np.testing.assert_array_equal(tiles, want.vision["pixel_values"].numpy())


def test_requests_are_laid_out_as_transformers_does(tiny_bundle: Built) -> None:
    compare(*tiny_bundle(NAME))


def _columns_first(patch: pytest.MonkeyPatch) -> None:
    whole = split.split

    def turned(image: Any, info: Any, splitting: Splitting) -> np.ndarray:
        down, across = splitting.tiles(image.height, image.width)
        made = whole(image, info, splitting)
        order = np.arange(down * across).reshape(down, across).T.reshape(-1)
        return made[[*order, len(made) - 1]]

    patch.setattr(smolvlm, "split", turned)


def _whole_first(patch: pytest.MonkeyPatch) -> None:
    whole = split.split
    patch.setattr(smolvlm, "split", lambda *given: np.roll(whole(*given), 1, 0))


def _line_ends_alone(patch: pytest.MonkeyPatch) -> None:
    """What ends a line is tokenized before what begins the next one is known."""
    encode = Tokenizer.encode

    def by_line(self: Tokenizer, text: str, add_special_tokens: bool = True) -> np.ndarray:
        return np.concatenate(
            [encode(self, line, add_special_tokens) for line in text.splitlines(keepends=True)]
        )

    patch.setattr(Tokenizer, "encode", by_line)


def _resized_once(patch: pytest.MonkeyPatch) -> None:
    """To whole tiles at once, not by way of the longest side."""
    patch.setattr(Splitting, "resized", lambda self, height, width: (height, width))


def _times_rounded(patch: pytest.MonkeyPatch) -> None:
    text = Frames.text

    def later(self: Frames, tile_embeds: int) -> tuple[str | int, ...]:
        return tuple(p.replace(":01:", ":02:") if isinstance(p, str) else p for p in text(self, tile_embeds))

    patch.setattr(Frames, "text", later)


@pytest.mark.parametrize(
    "mutant", [_columns_first, _whole_first, _line_ends_alone, _resized_once, _times_rounded]
)
def test_planted_errors_are_seen(
    tiny_bundle: Built, monkeypatch: pytest.MonkeyPatch, mutant: Callable[[pytest.MonkeyPatch], None]
) -> None:
    mutant(monkeypatch)
    with pytest.raises(AssertionError):
        compare(*tiny_bundle(NAME))


def test_pictures_of_several_sizes_and_films_in_one_batch(tiny_checkpoint: Callable[..., Path]) -> None:
    """Other numbers of tiles in each request; `generate-data` and training make such batches."""
    family = family_for(open_checkpoint(tiny_checkpoint(NAME)))
    model = load_reference(family.checkpoint, streamed=False)
    prompts = [family.reference_prompt(each, "cup") for each in (PICTURES[:2], [FILM], None, PICTURES[3:])]
    texts = [[40, 41, 42], [43], [44], [45, 46]]
    with torch.no_grad():
        together = model(**collate(family, prompts, texts)).logits
        for row, (prompt, text) in enumerate(zip(prompts, texts, strict=True)):
            alone = model(**collate(family, [prompt], [text])).logits[0]
            torch.testing.assert_close(together[row, : len(alone)], alone, atol=1e-4, rtol=1e-4)


# --- one tile ---


@pytest.mark.parametrize(
    ("pixels", "longest", "rows"), [(1024, 32, 4), (4095, 32, 4), (4096, 64, 20), (10**6, 64, 20)]
)
def test_max_pixels_leaves_whole_tiles(
    tiny_checkpoint: Callable[..., Path], tmp_path: Path, pixels: int, longest: int, rows: int
) -> None:
    request = BuildRequest(model=str(tiny_checkpoint(NAME)), output=tmp_path / "b", max_pixels=pixels)
    manifest = prepare(request, write=False).manifest
    assert manifest.image is not None and manifest.image.extra["longest_edge"] == longest
    assert manifest.limits.max_image_rows == rows


def test_a_bundle_of_one_tile_answers_as_the_model(
    tiny_checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    checkpoint = tiny_checkpoint(NAME)
    request = BuildRequest(model=str(checkpoint), output=tmp_path / "b", draft_layer=1, max_pixels=1024)
    build_bundle(request)
    family = family_for(open_checkpoint(checkpoint))
    model = load_reference(family.checkpoint, streamed=False)
    assert family.vision is not None
    settings = family.checkpoint.image_settings
    settings["size"] = {"longest_edge": 32}
    with Session.load(tmp_path / "b") as session:
        for picture in PICTURES:
            view = session._family.view(session.bundle, picture)
            assert view.num_embeds == 4 and len(view.runs) == 1
            found = session.generate(picture, "the red cup", max_new_tokens=8, draft="early-exit").tokens
            small = family_for(family.checkpoint)
            inputs = collate(small, [small.reference_prompt(picture, "the red cup")])
            with torch.no_grad():
                want = model.generate(**inputs, max_new_tokens=8, do_sample=False, pad_token_id=0)
            assert found == want[0, inputs["input_ids"].shape[1] :].tolist()


def test_too_few_pixels_for_a_tile_are_refused(tiny_checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    request = BuildRequest(model=str(tiny_checkpoint(NAME)), output=tmp_path / "b", max_pixels=1023)
    with pytest.raises(
        UnsupportedModelError, match="--max-pixels 1023 is too small for this model, whose tiles have 1024"
    ):
        prepare(request, write=False)


def test_a_length_without_room_for_a_picture_is_refused(
    tiny_checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    request = BuildRequest(model=str(tiny_checkpoint(NAME)), output=tmp_path / "b", max_length=21)
    with pytest.raises(OptionError, match="which has up to 20 rows; give at least 22, and"):
        prepare(request, write=False)


# --- what is refused ---


def changed(folder: Path, file: str, values: dict[str, Any], part: str | None = None) -> Path:
    """The folder with other values in a JSON file, or in a part of it; None: without the field."""
    path = folder / file
    document = json.loads(path.read_text()) if path.exists() else {}
    place = document if part is None else document[part]
    place |= values
    for name in [name for name, value in values.items() if value is None]:
        del place[name]
    path.write_text(json.dumps(document))
    return folder


@pytest.mark.parametrize(
    ("file", "part", "values", "message"),
    [
        ("config.json", "text_config", {"model_type": "mistral"}, "with the language model 'mistral'"),
        ("config.json", "vision_config", {"image_size": [32, 32]}, r"vision_config.image_size=.*32.*is not one number"),
        ("config.json", "vision_config", {"patch_size": 64}, "patch_size=64 is above image_size=32"),
        ("config.json", "vision_config", {"num_channels": 1}, "num_channels=1 is not 3"),
        ("config.json", None, {"scale_factor": 3}, "scale_factor=3 does not divide the 4 patches"),
        ("config.json", None, {"image_token_id": 5}, "image_token_id=5 is not the tokenizer's '<image>'"),
        ("processor_config.json", None, {"image_seq_len": 9}, "image_seq_len=9 differs from the 4 rows of a tile"),
        ("preprocessor_config.json", None, {"max_image_size": {"longest_edge": 48}}, "differs from the vision tower's 32 x 32"),
        ("preprocessor_config.json", None, {"size": {"height": 64, "width": 64}}, "size .*64.* is not a longest_edge"),
        ("preprocessor_config.json", None, {"do_resize": False}, "do_resize=false"),
        ("preprocessor_config.json", None, {"resample": 9}, "resample=9"),
        ("preprocessor_config.json", None, {"video_sampling": {"fps": 1}}, "has no max_frames and fps"),
        ("tokenizer_config.json", None, {"fake_image_token": "<f>", "extra_special_tokens": {"fake_image_token": "<f>"}}, "tokenizer's fake_image_token='<f>' is not supported"),
        ("video_preprocessor_config.json", None, {"video_sampling": {"fps": 1, "max_frames": 4}, "max_image_size": {"longest_edge": 64}}, "max_image_size .*64.* differs from the vision tower's 32"),
        ("video_preprocessor_config.json", None, {"video_sampling": {"fps": 1, "max_frames": 4}, "image_mean": [0.4] * 3}, "video processor: image_mean"),
        ("video_preprocessor_config.json", None, {"video_sampling": {"fps": 1, "max_frames": 4}, "resample": 3}, "video processor: resample=3"),
        ("video_preprocessor_config.json", None, {"video_sampling": {"fps": 1, "max_frames": 4}, "do_normalize": False}, "video processor: do_normalize=false"),
        ("video_preprocessor_config.json", None, {"video_sampling": {"fps": 1, "max_frames": 4}, "max_image_size": {"longest_edge": 32}, "size": {"height": 3}}, "video processor: size"),
    ],
)  # fmt: skip
def test_other_models_and_processors_are_refused(
    tmp_path: Path, file: str, part: str | None, values: dict[str, Any], message: str
) -> None:
    folder = changed(tiny_models.checkpoint(NAME, tmp_path), file, values, part)
    with pytest.raises(UnsupportedModelError, match=message):
        prepare(BuildRequest(model=str(folder), output=tmp_path / "b"), write=False)


@pytest.mark.parametrize("name", ["smolvlm", "idefics3"])
def test_a_model_without_video_sampling_refuses_videos(tmp_path: Path, name: str) -> None:
    folder = tiny_models.checkpoint(name, tmp_path / "m")
    if name == "smolvlm":
        changed(folder, "preprocessor_config.json", {"video_sampling": None})
    family = family_for(open_checkpoint(folder))
    assert family.video_token_id is None and family.chat_template == tiny_smolvlm.TEMPLATE
    build_bundle(BuildRequest(model=str(folder), output=tmp_path / "b", parity=False))
    opened = Bundle.open(tmp_path / "b")
    assert opened.manifest.image is not None and opened.manifest.image.video is None
    with pytest.raises(ImageError, match="reads pictures only: give the frames as pictures"):
        get_family(NAME).prepare(opened, FILM, "cup")
    with pytest.raises(ImageError, match="nobody knows its rate"):
        info = VideoInfo(token_id=0, fps=1.0, min_frames=1, max_frames=4, min_pixels=1, max_pixels=1, max_rows=1, tokens_per_second=0)  # fmt: skip
        Frames.of(Video(FILM.frames), info)
