"""First stage: the vision tower and the Q-Former learn what lies where, through throw-away heads.

Query i answers for the i-th object from the left, queries 5 to 7 for the setting; every patch
answers for the object that it shows. The heads are dropped afterwards.
"""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import Blip2ForConditionalGeneration
from vlmexport.calibration.data.scenes.dataset import prerender
from vlmexport.calibration.data.scenes.scene import MOST_OBJECTS, TRAIN, VALIDATION

from ..common.captioner import to_pixels
from ..common.labels import GLOBAL_CLASSES, NONE, PATCH_FIELDS, SLOT_CLASSES, accuracies, label_table
from ..common.long_run import LongRun
from ..common.optimizer import build_optimizers, schedule
from ..precision import computing, dtype_of
from .model import FROZEN, MEAN, SIDE, STD, WIDTH, build_model
from .tokenizer import build_tokenizer

CHECKED = 2000  # validation scenes


class VisionHeads(nn.Module):
    """Linear classifiers on query outputs and on patches; used in training only."""

    def __init__(self) -> None:
        super().__init__()
        self.slot_heads = nn.ModuleDict({n: nn.Linear(WIDTH, c) for n, c in SLOT_CLASSES.items()})
        self.global_heads = nn.ModuleDict({n: nn.Linear(WIDTH, c) for n, c in GLOBAL_CLASSES.items()})
        patch_classes = {n: SLOT_CLASSES[n] for n in PATCH_FIELDS} | {"ordinal": MOST_OBJECTS + 1}
        self.patch_heads = nn.ModuleDict({n: nn.Linear(WIDTH, c) for n, c in patch_classes.items()})


def encode(model: Blip2ForConditionalGeneration, pixels: Tensor) -> tuple[Tensor, Tensor]:
    """Pixels [B, 3, side, side] to patch states [B, 1 + patches, width] and queries [B, 8, width]."""
    patches = model.vision_model(pixel_values=pixels).last_hidden_state
    queries = model.qformer(
        query_embeds=model.query_tokens.expand(len(pixels), -1, -1), encoder_hidden_states=patches
    ).last_hidden_state
    return patches, queries


def batch(
    pictures: np.ndarray, labels: dict[str, np.ndarray], rows: np.ndarray
) -> tuple[Tensor, dict[str, Tensor]]:
    """Pixels and labels of ``rows``; rows beyond the number of pictures are mirrored pictures."""
    count = len(pictures)
    chosen = pictures[rows % count]
    flip = rows >= count
    chosen[flip] = chosen[flip][:, :, ::-1]
    return to_pixels(chosen, MEAN, STD), {
        name: torch.from_numpy(value[rows]) for name, value in labels.items()
    }


def vision_loss(
    heads: VisionHeads, patches: Tensor, queries: Tensor, labels: dict[str, Tensor]
) -> tuple[Tensor, dict[str, Tensor]]:
    """Summed cross entropies, and per question the answers' correctness (1, 0) or -1 for none."""
    loss = queries.new_zeros(())
    correct: dict[str, Tensor] = {}
    for name, head in heads.slot_heads.items():
        logits, truth = head(queries[:, :MOST_OBJECTS]), labels[name]
        loss = loss + F.cross_entropy(logits.flatten(0, 1).float(), truth.flatten(), ignore_index=NONE)
        correct[name] = torch.where(truth == NONE, -1, (logits.argmax(-1) == truth).long())
    setting = queries[:, MOST_OBJECTS:].mean(1)
    for name, head in heads.global_heads.items():
        logits, truth = head(setting), labels[name]
        loss = loss + F.cross_entropy(logits.float(), truth)
        correct[name] = (logits.argmax(-1) == truth).long()
    owner = labels["owner"].flatten(1)  # [B, patches]
    for name, head in heads.patch_heads.items():
        logits = head(patches[:, 1:])
        if name == "ordinal":
            truth = torch.where(owner >= 0, owner, MOST_OBJECTS)
        else:
            truth = labels[name].gather(1, owner.clamp_min(0)).masked_fill(owner < 0, NONE)
        loss = loss + 0.5 * F.cross_entropy(logits.flatten(0, 1).float(), truth.flatten(), ignore_index=NONE)
    return loss, correct


@torch.no_grad()
def evaluate(
    model: Blip2ForConditionalGeneration,
    heads: VisionHeads,
    pictures: np.ndarray,
    labels: dict[str, np.ndarray],
    dtype: torch.dtype = torch.float32,
) -> dict[str, float]:
    """Accuracy per question on unmirrored pictures, and of kind and colour together."""

    def answers(start: int) -> dict[str, Tensor]:
        pixels, truth = batch(pictures, labels, np.arange(start, min(start + 250, len(pictures))))
        with computing(dtype):
            patches, queries = encode(model, pixels)
            _, correct = vision_loss(heads, patches, queries, truth)
        correct["object"] = torch.where(correct["colour"] < 0, -1, correct["kind"] * correct["colour"])
        return correct

    return accuracies(map(answers, range(0, len(pictures), 250)))


def train_vision(
    work: Path,
    steps: int,
    size: int = 64_000,
    batch_size: int = 128,
    lr: float = 3e-3,
    seed: int = 0,
    precision: str = "auto",
    stop_at: int | None = None,
    check_every: int = 250,
) -> int:
    """Runs or continues the stage; returns the step that was reached.

    `work` receives ``data`` and ``vision`` with ``state.pt`` and ``log.jsonl``; arguments as of `train.train`.

    Raises:
        OptionError: see `LongRun`.
    """
    dtype = dtype_of(precision)
    data, settings = (
        work / "data",
        {"steps": steps, "pictures": size, "batch": batch_size, "lr": lr, "seed": seed},
    )
    with LongRun(work / "vision", settings) as run:
        pictures = prerender(data / f"train{SIDE}-{size}.u8", seed, TRAIN[:size], SIDE)
        labels = label_table(data / f"train_labels-{size}.npz", seed, TRAIN[:size])
        check_pictures = prerender(data / f"val{SIDE}.u8", seed, VALIDATION[:CHECKED], SIDE)
        check_labels = label_table(data / "val_labels.npz", seed, VALIDATION[:CHECKED])
        model, heads = build_model(build_tokenizer(), seed), VisionHeads()
        modules = nn.ModuleDict({"vision": model.vision_model, "qformer": model.qformer, "heads": heads})
        named = [*modules.named_parameters(), ("query_embed", model.query_tokens)]
        optimizers = build_optimizers(named, lr, dtype)
        state = run.load()
        start = 0
        if state is not None:
            model.load_state_dict(state["model"], strict=False)
            heads.load_state_dict(state["heads"])
            for optimizer, stored in zip(optimizers, state["optimizers"], strict=True):
                optimizer.load_state_dict(stored)
            start = state["step"]
        clock, running, done = time.time(), 0.0, 0
        last = min(steps, stop_at or steps)
        for step in range(start, last):
            for optimizer in optimizers:
                for group in optimizer.param_groups:
                    group["lr"] = lr * schedule(step, steps, 100)
            rows = np.random.default_rng([seed, 7, step]).integers(0, 2 * len(pictures), batch_size)
            pixels, truth = batch(pictures, labels, rows)
            with computing(dtype):
                patches, queries = encode(model, pixels)
                loss, _ = vision_loss(heads, patches, queries, truth)
            loss.backward()
            nn.utils.clip_grad_norm_([p for _, p in named], 1.0)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            running += loss.item()
            done, at = done + 1, step + 1
            ending = at == last or run.stopping
            if at % 50 == 0 or ending:
                line = {
                    "step": at,
                    "loss": round(running / done, 4),
                    "seconds": round(time.time() - clock, 1),
                }
                running, done = 0.0, 0
                if at % check_every == 0 or at == last:
                    line |= evaluate(model, heads, check_pictures, check_labels, dtype)
                run.log(line)
            if run.due() or ending:
                seen = {n: p for n, p in model.state_dict().items() if n.startswith(FROZEN)}
                learned = {"heads": heads.state_dict(), "optimizers": [o.state_dict() for o in optimizers]}
                run.save({"step": at, "model": seen, **learned})
            if run.stopping:
                return at
    return max(start, last)
