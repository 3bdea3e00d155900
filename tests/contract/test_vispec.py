"""ViSpec through the public interface: several pictures, none, videos, and pictures late in a conversation."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.support import vispec_sessions as sessions


@pytest.mark.parametrize("family", ["llava", "llava-next", "qwen2.5-vl", "internvl", "smolvlm"])
def test_several_pictures_and_none(rigs: Callable, family: str) -> None:
    sessions.several_and_none(rigs(family, "onnxruntime"))


@pytest.mark.parametrize("family", ["llava", "llava-next", "qwen2.5-vl", "internvl", "smolvlm"])
def test_a_conversation_with_pictures_late(rigs: Callable, family: str) -> None:
    sessions.conversation(rigs(family, "onnxruntime"))


def test_pictures_of_several_runs(rigs: Callable) -> None:
    sessions.several_runs(rigs("llava", "onnxruntime"))


def test_frames_of_a_video_are_averaged(rigs: Callable) -> None:
    sessions.video(rigs("qwen2.5-vl", "onnxruntime"))


def test_frames_with_text_between_are_pictures(rigs: Callable) -> None:
    sessions.video(rigs("smolvlm", "onnxruntime"))
