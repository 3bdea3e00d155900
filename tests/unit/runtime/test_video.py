"""Videos: which frames are seen, from a list, a folder or a file, and answers equal to transformers'."""

from __future__ import annotations

import importlib
import io
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from PIL import Image
from vlmexport.runtime import Session, Video, cli
from vlmexport.runtime.common import optional_deps
from vlmexport.runtime.common.errors import ImageError, OptionError, PromptError
from vlmexport.runtime.families import RawPrompt, get_family
from vlmexport.runtime.images.synthetic import synthetic_image
from vlmexport.runtime.images.video import open_video, sampled

if TYPE_CHECKING:
    from tests.support.tiny_bundles import TinyBundle

transformers = pytest.importorskip("transformers", reason="building the bundles needs [export]")
torch = pytest.importorskip("torch")
model_inputs = importlib.import_module("tests.support.qwen_inputs").model_inputs

Bundles = Callable[[str], "TinyBundle"]
FRAMES = [Image.fromarray(np.roll(synthetic_image(60, 90), 4 * at, axis=1)) for at in range(12)]
PICTURE = Image.fromarray(synthetic_image(50, 70))
MARK = "<|video_pad|>"


@pytest.fixture(scope="module")
def tiny(tiny_bundle: Bundles) -> TinyBundle:
    return tiny_bundle("qwen2.5-vl")


@pytest.fixture(scope="module")
def reference() -> Any:
    """transformers' class, whose module imports torchvision for what is not used here."""
    names = [
        f"torchvision{rest}" for rest in ("", ".transforms", ".transforms.v2", ".transforms.v2.functional")
    ]
    with pytest.MonkeyPatch.context() as patch:
        for name in names:
            patch.setitem(sys.modules, name, ModuleType(name))
        from transformers.models.qwen2_vl.video_processing_qwen2_vl import Qwen2VLVideoProcessor

        yield Qwen2VLVideoProcessor


# --- which frames ---


@pytest.mark.parametrize("count", [2, 3, 4, 5, 7, 16, 17, 30, 31, 100, 101, 999, 5000])
@pytest.mark.parametrize("fps", [0.5, 2.0, 10.0, 23.976, 30.0, 120.0])
@pytest.mark.parametrize("wanted", [1.0, 2.0, 8.0])
def test_frames_are_those_that_qwens_processor_samples(
    reference: Any, count: int, fps: float, wanted: float
) -> None:
    own = SimpleNamespace(num_frames=None, fps=None, temporal_patch_size=2, min_frames=4, max_frames=768)
    metadata = SimpleNamespace(total_num_frames=count, fps=fps)
    found = sampled(count, fps, wanted, 4, 768, 2)
    want = reference.sample_frames(own, metadata, fps=wanted).tolist()
    # Its steps are rounded to float32: where they add up to less than the whole, it gives a frame behind the end.
    assert found == [index for index in want if index < count]
    assert len(found) % 2 == 0 and len(set(found)) == len(found)


def test_a_video_shorter_than_a_pair_is_seen_whole() -> None:
    assert sampled(1, 30.0, 2.0, 4, 768, 2) == [0]
    assert sampled(4, 30.0, 2.0, 4, 768, 2) == [0, 1, 2, 3]


# --- where frames are ---


def write_folder(folder: Path, frames: list[Image.Image] = FRAMES) -> Path:
    folder.mkdir()
    for at, frame in enumerate(frames):
        frame.save(folder / f"frame{at}.png")
    (folder / "notes.txt").write_text("not a picture")
    return folder


def write_file(path: Path, count: int = 12, rate: int = 4, codec: str = "ffv1") -> Path:
    """Without loss, so that frames can be told apart to the bit."""
    av = pytest.importorskip("av", reason="writing a video needs [video]")
    with av.open(str(path), "w") as container:
        stream = container.add_stream(codec, rate=rate)
        stream.width, stream.height, stream.pix_fmt = 90, 60, "bgr0" if codec == "ffv1" else "yuv420p"
        for frame in FRAMES[:count]:
            container.mux(stream.encode(av.VideoFrame.from_image(frame)))
        container.mux(stream.encode())
    return path


def test_a_folder_is_read_in_the_order_of_its_numbers(tmp_path: Path) -> None:
    clip = open_video(Video(write_folder(tmp_path / "frames"), fps=4))
    assert (clip.count, clip.fps) == (12, 4)
    for index, frame in zip((1, 2, 10), clip.read([1, 2, 10]), strict=True):
        np.testing.assert_array_equal(frame, FRAMES[index])


@pytest.mark.parametrize("suffix", ["mkv", "avi"])
def test_a_file_knows_its_frames_and_their_rate(tmp_path: Path, suffix: str) -> None:
    clip = open_video(Video(write_file(tmp_path / f"clip.{suffix}")))
    assert (clip.count, clip.fps) == (12, 4)
    for index, frame in zip((0, 7, 11), clip.read([0, 7, 11]), strict=True):
        np.testing.assert_array_equal(frame, FRAMES[index])
    assert open_video(Video(tmp_path / f"clip.{suffix}", fps=8)).fps == 8


def test_invalid_video_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("av")
    whole, damaged = write_file(tmp_path / "clip.avi"), tmp_path / "damaged.avi"
    damaged.write_bytes(whole.read_bytes()[: whole.stat().st_size // 2])
    (tmp_path / "words.mp4").write_text("no video at all")
    (tmp_path / "empty").mkdir()
    playlist = tmp_path / "list.ffconcat"
    playlist.write_text("ffconcat version 1.0\nfile http://127.0.0.1:9/clip.mkv\n")
    for source, message in (
        (tmp_path / "nowhere.mp4", "no such video file or folder"),
        (tmp_path / "words.mp4", "cannot be read as a video"),
        (playlist, "cannot be read as a video"),
        (tmp_path / "empty", "no picture files"),
        ([], "has no frames"),
        (7, "is a camera or a stream"),
        (7.5, "a video is a file, a folder"),
    ):
        with pytest.raises(ImageError, match=message):
            open_video(Video(source, fps=4))
    clip = open_video(Video(damaged))
    with pytest.raises(
        ImageError, match=r"damaged\.avi: frame \d+ of the 12 that the file claims cannot be read"
    ):
        clip.read(range(clip.count))
    with pytest.raises(ImageError, match="several sizes, 90 x 60 and 70 x 50"):
        open_video(Video([FRAMES[0], PICTURE], fps=4)).read([0, 1])
    for rate in (0, -1, "fast", 1e9, float("nan")):
        with pytest.raises(
            OptionError, match=r"Video: fps \(frames a second\): .* is not a number ≥ 0.0001 and ≤ 1000"
        ):
            Video(FRAMES, fps=rate)  # type: ignore[arg-type]
    for rate in (True, 1e-300):
        with pytest.raises(OptionError, match="Video: sample_fps"):
            Video(FRAMES, sample_fps=rate)
    for rate in (np.float32(2), np.int64(2), 2):
        assert Video(FRAMES, fps=rate).fps == 2.0  # type: ignore[arg-type]
    with pytest.raises(OptionError, match="channels: 'gbr' is not one of rgb, bgr"):
        Video(FRAMES, channels="gbr")
    for source in (whole, tmp_path):
        with pytest.raises(ImageError, match="channels 'bgr' is for frames that are arrays"):
            open_video(Video(source, channels="bgr"))
    monkeypatch.setitem(optional_deps.MODULES, "video", ("no_such_module",))
    with pytest.raises(OptionError, match=r"reading a video file needs the extra \[video\]"):
        open_video(Video(whole))


# --- the model ---


@pytest.mark.parametrize(
    ("content", "rates"),
    [
        (["video", "the red cup"], [(4.0, None)]),
        (["the cup", "image", "video", "and", "video"], [(12.0, 6.0), (3.0, 1.0)]),
    ],
)
def test_answers_equal_transformers(
    tiny: TinyBundle, reference: Any, content: list[str], rates: list[tuple[float, float | None]]
) -> None:
    model = transformers.Qwen2_5_VLForConditionalGeneration.from_pretrained(tiny.checkpoint).eval()
    parts = [
        {"type": part} if part in ("video", "image") else {"type": "text", "text": part} for part in content
    ]
    messages = [{"role": "user", "content": parts}]
    given = [Video(FRAMES, fps, sample) for fps, sample in rates]
    chosen = [sampled(12, fps, sample or 2.0, 4, 768, 2) for fps, sample in rates]
    images = [PICTURE] * content.count("image")
    prepared = get_family("qwen2.5-vl").prepare(tiny.bundle, [*images, *given], messages)
    seen = [len(frames) / 12 * fps for frames, (fps, _) in zip(chosen, rates, strict=True)]
    frames = [[FRAMES[index] for index in indices] for indices in chosen]
    info = tiny.bundle.manifest.image.video  # type: ignore[union-attr]
    videos = list(zip(frames, seen, strict=True))
    asked = model_inputs(tiny.checkpoint, info, prepared.token_ids.tolist(), videos, images)
    text = transformers.AutoTokenizer.from_pretrained(tiny.checkpoint).apply_chat_template(
        messages, add_generation_prompt=True, tokenize=False
    )
    counts = [int(np.prod(thw)) // 4 for thw in asked["video_grid_thw"].tolist()]
    pictures = [int(np.prod(thw)) // 4 for thw in asked.get("image_grid_thw", torch.empty(0, 3)).tolist()]
    for mark, numbers in ((MARK, counts), ("<|image_pad|>", pictures)):
        pieces = text.split(mark)
        text = "".join(piece + mark * number for piece, number in zip(pieces, [*numbers, 0], strict=True))
    tokenizer = transformers.AutoTokenizer.from_pretrained(tiny.checkpoint)
    assert prepared.token_ids.tolist() == tokenizer(text, add_special_tokens=False)["input_ids"]
    grids = {name: asked[name] for name in ("image_grid_thw", "video_grid_thw") if name in asked}
    want, _ = model.model.get_rope_index(
        asked["input_ids"], asked["mm_token_type_ids"], **grids,
        second_per_grid_ts=torch.tensor(asked["second_per_grid_ts"]),
    )  # fmt: skip
    np.testing.assert_array_equal(prepared.positions, want[:, 0])  # type: ignore[arg-type]
    with torch.inference_mode():
        out = model.generate(**asked, max_new_tokens=16, do_sample=False)
    tokens = out[0, len(prepared.token_ids) :].tolist()
    with Session.load(tiny.path) as session:
        for draft in ("none", "imitation", "medusa"):
            found = session.generate(
                image=images, video=given, messages=messages, max_new_tokens=16, draft=draft
            )
            assert found.tokens == tokens
        handle = session.encode(given[0])
        assert handle.kind == "video" and handle.num_embeds == counts[0]
        again = session.generate(images=[*images, handle, *given[1:]], messages=messages, max_new_tokens=16)
        assert again.tokens == tokens


def test_patches_of_a_frame_pair_equal_qwens_processor(tiny: TinyBundle, reference: Any) -> None:
    view = get_family("qwen2.5-vl").view(tiny.bundle, Video(FRAMES[:5], 2.0, 2.0))  # four frames, two pairs
    info = tiny.bundle.manifest.image.video  # type: ignore[union-attr]
    size = {"shortest_edge": info.min_pixels, "longest_edge": info.max_pixels}  # type: ignore[union-attr]
    pixels = transformers.Qwen2VLImageProcessorPil(size=size)
    steps, down, across, _ = view.layout
    assert (steps, len(view.runs)) == (2, 2) and view.num_embeds == steps * down * across
    frames = []
    for frame in (FRAMES[0], FRAMES[1], FRAMES[2], FRAMES[3]):
        patches = pixels(images=frame, return_tensors="pt")["pixel_values"].reshape(
            down, across, 2, 2, 3, 2, 14, 14
        )
        frames.append(
            patches[:, :, :, :, :, 0].permute(4, 0, 2, 5, 1, 3, 6).reshape(3, 28 * down, 28 * across)
        )
    want, *grid = reference.patchify(None, torch.stack(frames)[None], 14, 2, 2)
    assert grid == [2, 2 * down, 2 * across]
    for step, run in enumerate(view.runs):
        found = run["pixel_values"][run["unit_order"]].reshape(-1, want.shape[-1])
        np.testing.assert_allclose(found, want[0].reshape(2, len(found), -1)[step], atol=1e-5)


def test_the_order_of_colours_is_that_of_a_videos_frames_too(tiny: TinyBundle) -> None:
    """A request of OpenCV's frames is that of the same frames in RGB."""
    frames = [np.asarray(frame) for frame in FRAMES[:4]]
    turned = [frame[..., ::-1] for frame in frames]
    with Session.load(tiny.path) as session:
        want = session.encode(Video(frames, fps=2))
        for video, channels in ((Video(turned, fps=2), "bgr"), (Video(turned, fps=2, channels="bgr"), "rgb")):
            np.testing.assert_array_equal(session.encode(video, channels).encoded, want.encoded)
        assert not np.array_equal(session.encode(Video(turned, fps=2)).encoded, want.encoded)
        asked = {"prompt": "cup", "max_new_tokens": 6}
        found = session.generate(video=Video(np.stack(turned), fps=2), channels="bgr", **asked)
        assert found.tokens == session.generate(video=Video(frames, fps=2), **asked).tokens
        with pytest.raises(ImageError, match="is for arrays"):
            session.generate(video=Video(FRAMES, fps=2), channels="bgr", **asked)


def test_last_odd_frame_is_repeated(tiny: TinyBundle) -> None:
    family = get_family("qwen2.5-vl")
    one = family.view(tiny.bundle, Video(FRAMES[:1], 2.0))
    two = family.view(tiny.bundle, Video([FRAMES[0], FRAMES[0]], 2.0))
    assert len(one.runs) == 1 and one.num_embeds == two.num_embeds
    np.testing.assert_array_equal(one.runs[0]["pixel_values"], two.runs[0]["pixel_values"])


def test_a_long_video_has_smaller_frames(tiny: TinyBundle) -> None:
    info = tiny.bundle.manifest.image.video  # type: ignore[union-attr]
    assert info is not None
    large = [Image.new("RGB", (640, 480))] * 4
    family, rows = get_family("qwen2.5-vl"), []
    try:
        for info.max_rows in (128_000, 11, 1):
            rows.append(family.view(tiny.bundle, Video(large, 2.0)).num_embeds)
    finally:
        info.max_rows = 115_200
    assert rows == [2 * 6, 2 * 4, 2 * 2], "each of two steps: 2 x 3 units, then 2 x 2, then its smallest"


@pytest.mark.parametrize(
    ("video", "prompt", "error", "message"),
    [
        (Video(FRAMES), "cup", ImageError, r"nobody knows its rate; give Video\(frames, fps="),
        (Video(FRAMES, 4), f"a {MARK}", PromptError, "stands for one of the videos"),
        (Video(FRAMES, 4), RawPrompt(f"{MARK} {MARK}"), PromptError, r"has 2 <\|video_pad\|>, and 1 videos"),
        ([Video(FRAMES, 4)] * 9, "cup", PromptError, "image rows included"),
        (Video("nowhere.mp4"), "cup", ImageError, "nowhere.mp4"),
    ],
)
def test_invalid_layout_is_refused(
    tiny: TinyBundle, video: Any, prompt: Any, error: type[Exception], message: str
) -> None:
    with Session.load(tiny.path) as session, pytest.raises(error, match=message):
        session.generate(video=video, prompt=prompt)


def test_models_that_read_pictures_refuse_videos(tiny_bundle: Bundles) -> None:
    for name in ("llava", "t5"):
        with (
            Session.load(tiny_bundle(name).path) as session,
            pytest.raises(ImageError, match="reads pictures, not Video; give it some of the frames"),
        ):
            session.generate(video=Video(FRAMES, 4), prompt="cup")


# --- the command line ---


def test_the_command_line_takes_a_video(
    tiny: TinyBundle, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, file = write_folder(tmp_path / "frames"), write_file(tmp_path / "clip.mkv")
    words = ["--prompt", "the red cup", "--max-new-tokens", "12"]
    shown = []
    for given in (["--video", str(folder), "--video-fps", "4"], ["--video", str(file)]):
        assert cli.main(["run", str(tiny.path), *given, *words]) == 0
        shown.append(capsys.readouterr().out)
    with Session.load(tiny.path) as session:
        want = session.generate(video=Video(FRAMES, 4), prompt="the red cup", max_new_tokens=12).text + "\n"
    assert shown == [want, want]
    assert cli.main(["run", str(tiny.path), "--video-fps", "4", *words]) == 2
    assert "--video-fps 4 is of no video" in capsys.readouterr().err


def test_a_conversation_on_the_command_line(
    tiny: TinyBundle, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    PICTURE.save(tmp_path / "a picture.png")
    turns = (
        f"\ufeffred\n\n/image '{tmp_path / 'a picture.png'}'\n/image nowhere.png\n/what\ncup\n/quit\nnever\n"
    )
    monkeypatch.setattr(sys, "stdin", io.StringIO(turns))
    assert cli.main(["run", str(tiny.path), "--chat", "--prompt", "cup", "--max-new-tokens", "3"]) == 0
    shown = capsys.readouterr()
    with Session.load(tiny.path) as session:
        chat = session.chat()
        want = [chat.say("cup", max_new_tokens=3), chat.say("red", max_new_tokens=3)]
        want.append(chat.say("cup", PICTURE, max_new_tokens=3))
    assert shown.out == "".join(result.text + "\n" for result in want)
    assert "error: nowhere.png" in shown.err and "/what: /image FILE" in shown.err
    assert shown.err.count("prompt tokens kept") == 2
    for options in (["--json"], ["--raw"], ["--image", "-"]):
        assert cli.main(["run", str(tiny.path), "--chat", *options]) == 2
    capsys.readouterr()
