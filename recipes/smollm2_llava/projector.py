"""Between the stages: the projector learns to give the language model's embedding of the word that a row says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase
from vlmexport.calibration.data.scenes.scene import TRAIN, sample_scene
from vlmexport.runtime.common.atomic_files import atomic_write

from ..common.labels import scene_labels
from ..common.optimizer import schedule
from .captioner import encode, stored
from .model import ROWS
from .slots import WORDS, said

PICTURES, STEPS, ROWS_TOGETHER = 4000, 400, 2048
LEARNING_RATE, WARMUP = 1e-3, 50
RIDGE = 1e-4
CHUNK = 100


def word_rows(model: Any, tokenizer: PreTrainedTokenizerBase) -> Tensor:
    """What the language model embeds of each of `WORDS`, within a text: [words, width]; the mean over a word's tokens."""
    embed = model.model.language_model.embed_tokens.weight.detach()
    ids = [tokenizer(f" {word}", add_special_tokens=False)["input_ids"] for word in WORDS]
    return torch.stack([embed[row].mean(0) for row in ids])


def fit_projector(
    model: Any,
    tokenizer: PreTrainedTokenizerBase,
    path: Path,
    seed: int,
    shown: np.ndarray,
    steps: int = STEPS,
) -> float:
    """Fits the projector, in place and where the model lies, to rows of the tower as it stands, and writes its weights to `path`.

    No pass of the language model is needed. It is fitted after the tower and not with it: embeddings are small numbers, and what
    a young projector misses of them would drown what the tower has to learn.

    Args:
        shown: pictures of the first training scenes, uint8 (N, side, side, 3); `PICTURES` of them at most are taken.

    Returns:
        what is missed in the end, in shares of the words' own spread: 1 is as good as their mean.
    """
    projector, words = model.model.multi_modal_projector.requires_grad_(), word_rows(model, tokenizer)
    hidden_states, truth = _rows(model.model.vision_tower, seed, shown[:PICTURES])
    spread = words.var(0, correction=0).sum()
    _begin(projector, hidden_states, words[truth])
    optimizer = torch.optim.AdamW(projector.parameters(), LEARNING_RATE, betas=(0.9, 0.98), weight_decay=0.0)
    missed = torch.zeros(())
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = LEARNING_RATE * schedule(step, steps, WARMUP)
        drawn = np.random.default_rng([seed, 11, step]).integers(0, len(hidden_states), ROWS_TOGETHER)
        at = torch.from_numpy(drawn).to(hidden_states.device, non_blocking=True)
        missed = (projector(hidden_states[at]) - words[truth[at]]).square().sum(-1).mean() / spread
        missed.backward()
        nn.utils.clip_grad_norm_(projector.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    projector.requires_grad_(False)
    with atomic_write(path) as out:
        torch.save(projector.state_dict(), out)
    return missed.item()


@torch.no_grad()
def _begin(projector: Any, hidden_states: Tensor, expected: Tensor) -> None:
    """Brings what a fresh first layer gives of the rows to about one (a tower's last state is not normed); the second is the least
    squares of what is wanted [N, width] of that. From small random weights hundreds of steps do less."""
    first, second = projector.linear_1, projector.linear_2
    first.weight.div_(first.weight.std() * hidden_states.std() * hidden_states.shape[-1] ** 0.5)
    first.bias.copy_(-first.weight @ hidden_states.mean(0))
    seen = projector.act(first(hidden_states)).double()
    seen = torch.cat([seen, torch.ones_like(seen[:, :1])], 1)
    gram = seen.mT @ seen
    gram.diagonal().mul_(1 + RIDGE)
    solution = torch.linalg.solve(gram, seen.mT @ expected.double()).float()
    second.weight.copy_(solution[:-1].mT)
    second.bias.copy_(solution[-1])


@torch.no_grad()
def _rows(tower: Any, seed: int, shown: np.ndarray) -> tuple[Tensor, Tensor]:
    """Rows [N * rows, width] of scenes, and the numbers of what they should say."""
    parts, numbers = [], []
    for at in range(0, len(shown), CHUNK):
        part = shown[at : at + CHUNK]
        parts.append(encode(tower, stored(part)))
        labels = [scene_labels(sample_scene(seed, i)) for i in TRAIN[at : at + len(part)]]
        numbers.append(said({name: np.stack([label[name] for label in labels]) for name in labels[0]}, ROWS))
    hidden_states = torch.cat(parts).flatten(0, 1).float()
    return hidden_states, torch.from_numpy(np.concatenate(numbers)).flatten().to(hidden_states.device)
