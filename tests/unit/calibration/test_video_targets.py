"""Targets that read videos: what they are asked is what transformers takes, and what a draft learns of it is what the runtime
shows it."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from vlmexport.calibration.data import ImageRef, Record, RecordSet, load_records
from vlmexport.calibration.evaluation.run import evaluate_drafts
from vlmexport.calibration.features.text_cache import CachedTexts, build_text_cache
from vlmexport.calibration.features.vispec_masks import sight_of
from vlmexport.calibration.generation.answers import GenerationOptions
from vlmexport.calibration.generation.torch_answers import TorchAnswers
from vlmexport.calibration.objectives.training_options import LoopOptions
from vlmexport.calibration.objectives.vispec_options import VispecOptions
from vlmexport.calibration.targets.image_places import pictures_of, placeholder_tokens
from vlmexport.calibration.targets.target import Target
from vlmexport.calibration.targets.teacher_forcing import Texts
from vlmexport.calibration.training.run import train_draft
from vlmexport.exporter.families.common.parts import ReferencePrompt
from vlmexport.exporter.pipeline import BuildRequest, build_bundle
from vlmexport.runtime.bundle.manifest import VideoInfo
from vlmexport.runtime.common.errors import InputError
from vlmexport.runtime.images.synthetic import synthetic_image
from vlmexport.runtime.images.video import Video, sampled
from vlmexport.runtime.session.session import Session

from tests.support.every_kind import counted_by_the_runtime
from tests.support.qwen_inputs import model_inputs
from tests.support.training_targets import entering, make_target, own_answers
from tests.unit.calibration.test_text_cache import assert_same
from tests.unit.calibration.test_vispec_training import small

FRAMES = [Image.fromarray(np.roll(synthetic_image(60, 90), 4 * at, axis=1)) for at in range(9)]
NEW = 10


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Target:
    return make_target("qwen2.5-vl", tmp_path_factory.mktemp("qwen") / "model")


@pytest.fixture(scope="module")
def told(target: Target, tmp_path_factory: pytest.TempPathFactory) -> RecordSet:
    """The target's answers; see `answers_of`."""
    return answers_of(target, tmp_path_factory.mktemp("seen"))


def answers_of(target: Target, folder: Path) -> RecordSet:
    """A target's answers about videos of several lengths, pictures, pairs of pictures, and nothing."""
    for number, frame in enumerate(FRAMES):
        frame.resize((40, 30)).save(folder / f"{number}.png")
    one = ImageRef(file=str(folder / "0.png"))
    scenes = [ImageRef(scene=(0, index), shown=shown) for shown in ("film", "pair") for index in range(3)]
    seen = [scenes[0], one, scenes[3], None, scenes[1], scenes[4], scenes[2], one]
    words = ("the red cup", "a blue cube", "look at the ball", "the cup")
    records = [Record(f"k{at}", words[at % 4], image) for at, image in enumerate(seen)]
    return own_answers(target, records, NEW)


@pytest.mark.parametrize(
    ("count", "rate", "shown"), [(4, 2.0, None), (5, 2.0, None), (9, 12.0, 6.0), (1, 2.0, None)]
)
def test_a_video_is_laid_out_as_transformers_takes_it(
    target: Target, count: int, rate: float, shown: float | None
) -> None:
    """Ids, patches, times and positions; a picture before it and one behind it keep theirs."""
    family, whole = target.family, FRAMES[:count]
    info = VideoInfo(**family.vision.settings()["video"])  # type: ignore[union-attr]
    chosen = sampled(count, rate, shown or info.fps, info.min_frames, info.max_frames, 2)
    seen = ([whole[at] for at in chosen], len(chosen) / count * rate)
    found = family.reference_prompt([FRAMES[8], Video(whole, rate, shown), FRAMES[3]], "the cup")
    wanted = model_inputs(
        Path(target.checkpoint.folder), info, found.input_ids, [seen], [FRAMES[8], FRAMES[3]]
    )
    assert found.vision is not None
    for name in ("pixel_values", "image_grid_thw", "pixel_values_videos", "video_grid_thw"):
        torch.testing.assert_close(found.vision[name], wanted[name])
    assert found.vision["second_per_grid_ts"].tolist() == pytest.approx(wanted["second_per_grid_ts"])
    steps = -(-len(chosen) // 2)
    assert found.video_steps == (steps,)
    marks = (family.image_token_id, family.video_token_id)
    counts = [found.input_ids.count(mark) for mark in marks]
    grids = [found.vision[name].prod(-1).sum().item() // 4 for name in ("image_grid_thw", "video_grid_thw")]
    assert counts == grids and counts[1] % steps == 0
    positions, _ = target.model.model.get_rope_index(
        wanted["input_ids"],
        wanted["mm_token_type_ids"],
        image_grid_thw=wanted["image_grid_thw"],
        video_grid_thw=wanted["video_grid_thw"],
        second_per_grid_ts=torch.tensor(wanted["second_per_grid_ts"]),
    )
    torch.testing.assert_close(found.positions, positions[:, 0])


def test_several_kinds_in_a_batch_are_each_alone(target: Target, told: RecordSet) -> None:
    """Pictures, pairs, films and none in one batch: answers, rows and what is kept of pictures are those of each alone."""
    answers = TorchAnswers(target, batch_size=3)
    again = dict(answers.answer(list(told), GenerationOptions(NEW)))
    assert [again[at][0] for at in range(len(told))] == [record.tokens for record in told]
    assert [target.generate([record], NEW)[0] for record in told] == [record.tokens for record in told]
    whole, _ = target.rows(list(told), [2])
    texts = target.texts(list(told), (2,))
    for at, record in enumerate(told):
        rows, _ = target.rows([record], [2])
        torch.testing.assert_close(whole.select(whole.records == at).trunk, rows.trunk, rtol=1e-4, atol=1e-4)
        own = target.texts([record], (2,))
        mine, theirs = texts.pictures[at], own.pictures[0]
        assert [place for place, _ in mine] == [place for place, _ in theirs]
        for (_, a), (_, b) in zip(mine, theirs, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)
    shapes = [[tuple(rows.shape[:2]) for _, rows in pictures] for pictures in texts.pictures]
    films = [len(load_records("films:train:3")[at].image.load().frames) // 2 for at in range(3)]  # type: ignore[union-attr]
    assert [len(own) for own in shapes] == [1, 1, 2, 0, 1, 2, 1, 1]
    assert [own[0][0] for own in (shapes[0], shapes[4], shapes[6])] == films and len(set(films)) > 1


def test_rows_of_videos_are_what_enters_the_decoder(target: Target, told: RecordSet) -> None:
    with entering(target) as entered:
        texts = target.texts(list(told))
    seen = 0
    for b, pictures in enumerate(texts.pictures):
        for start, rows in pictures:
            flat = rows.flatten(0, 1)
            torch.testing.assert_close(flat, entered[0][b, start : start + len(flat)])
            seen += 1
    assert seen == 9


def test_videos_are_kept_with_their_steps(target: Target, told: RecordSet, tmp_path: Path) -> None:
    folder = build_text_cache(target, told, (), tmp_path / "cache", "float32", batch_size=3)
    for places in ([0, 2, 4], [6, 3, 1, 5]):
        assert_same(CachedTexts(folder, target).rows(places), target.texts([told[at] for at in places]))


def test_what_a_layer_sees_of_a_video() -> None:
    """Every time step is a picture with tokens of its own; text behind knows the mean of their features."""
    network = small(queries=3)
    generator = torch.Generator().manual_seed(4)
    steps, hidden = torch.randn(3, 4, 8, generator=generator), torch.randn(1, 18, 8, generator=generator)
    places = torch.zeros(1, 18, dtype=torch.long)
    sight = sight_of(network, Texts(hidden, hidden, places, places.bool(), [[(2, steps)]]))
    made = [network.imadpt(step) for step in steps]
    # Pairs 1 to 12 are the video's: 1 to 4, 5 to 8 and 9 to 12 a step's, of which the last two hold its tokens.
    assert [at for at in range(18) if not sight.visible[0, at]] == [1, 2, 5, 6, 9, 10]
    assert torch.nonzero(sight.compressed[0])[:, 0].tolist() == [3, 4, 7, 8, 11, 12]
    for own, first in zip(made, (3, 7, 11), strict=True):
        torch.testing.assert_close(sight.visual[0, first : first + 2], own[:2])
    mean = torch.stack([own[2] for own in made]).mean(0)
    torch.testing.assert_close(sight.visual[0, 13:], mean.expand(5, 8))
    assert not sight.visual[0, 0].any() and (mean - made[2][2]).abs().max() > 1e-2


def test_what_a_layer_learned_of_videos_is_what_the_runtime_counts(
    target: Target, told: RecordSet, tmp_path: Path
) -> None:
    """A ViSpec layer, trained, measured and built: chains over films and pictures come out the same."""
    compare_with_the_runtime(target, told, tmp_path)


def test_what_a_layer_learned_of_tiles_and_frames_is_what_the_runtime_counts(tmp_path: Path) -> None:
    """Text stands between them: each is a picture of its own, in training and in a session."""
    tiled = make_target("smolvlm", tmp_path / "smolvlm" / "model")
    told = answers_of(tiled, tmp_path)
    texts = tiled.texts(list(told))
    for record, pictures in zip(told, texts.pictures, strict=True):
        ids = tiled.prompt(record).input_ids
        assert sum(rows.shape[1] for _, rows in pictures) == ids.count(tiled.family.image_token_id)
        assert all(len(rows) == 1 and rows.shape[1] == 4 for _, rows in pictures)
    assert {len(pictures) for pictures in texts.pictures} >= {0, 3, 5}
    compare_with_the_runtime(tiled, told, tmp_path)


def compare_with_the_runtime(target: Target, told: RecordSet, tmp_path: Path) -> None:
    own = VispecOptions(compressed_tokens=2)
    loop = LoopOptions(steps=6, batch_size=4, lr=3e-3, warmup=1)
    train_draft(target, told, own, loop, tmp_path / "draft", told, tmp_path / "cache")
    (found,) = evaluate_drafts(target, told, [str(tmp_path / "draft")], 4).values()
    build_bundle(
        BuildRequest(
            model=str(target.checkpoint.folder), output=tmp_path / "b", drafts=[str(tmp_path / "draft")]
        )
    )
    with Session.load(tmp_path / "b") as session:
        counted = counted_by_the_runtime(session, told, "vispec", 4, NEW)
    assert counted["chain"] == [found.cycles, found.evaluated, found.accepted]


def test_a_prompt_must_not_write_what_stands_for_a_video(target: Target) -> None:
    with pytest.raises(
        InputError, match=r"record k: the prompt contains '<\|video_pad\|>', which stands for a video row"
    ):
        target.prompt(Record("k", "the <|video_pad|>", ImageRef(scene=(0, 1), shown="film")))


def test_runs_of_one_token_are_pictures_in_their_order() -> None:
    """Tiles and frames that text stands between have the token of pictures, and are read as they stand."""
    family: Any = SimpleNamespace(
        image_token_id=9, video_token_id=9, decoder=SimpleNamespace(cross_attention=False)
    )
    assert placeholder_tokens(family) == (9,)
    prompts = [ReferencePrompt((1, 9, 9, 2, 9, 3)), ReferencePrompt((9, 1))]
    rows = torch.arange(4.0)[:, None]
    found = pictures_of(family, prompts, [rows[:3].reshape(1, 3, 1), rows[3:].reshape(1, 1, 1)])
    assert [[(at, embeds.flatten().tolist()) for at, embeds in own] for own in found] == [
        [(1, [0.0, 1.0]), (4, [2.0])],
        [(0, [3.0])],
    ]
    assert all(embeds.ndim == 3 and len(embeds) == 1 for own in found for _, embeds in own)
