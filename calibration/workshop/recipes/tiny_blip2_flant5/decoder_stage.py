"""Second stage: the language model learns captions and answers from the Q-Former's outputs.

The vision side is frozen and its outputs are cached, until an optional last phase trains all
together. Two throw-away projections after a quarter and a half of the decoder's layers also
predict the next token (deep supervision); they are dropped at the end.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import Blip2ForConditionalGeneration, PreTrainedTokenizerBase

from .....runtime.measure.machine import cores
from ...precision import PRECISIONS, computing, dtype_of
from ...scenes.dataset import prerender
from ...scenes.scene import TRAIN, VALIDATION
from .evaluation import evaluate_scenes
from .labels import label_table
from .model import DECODER_LAYERS, SIDE, WIDTH, build_model, save_bundle
from .optimizer import build_optimizers, schedule
from .texts import ASKED, PROMPTS, text_table
from .tokenizer import build_tokenizer
from .vision_stage import VisionHeads, encode, to_pixels, vision_loss

PROBES = (DECODER_LAYERS // 4, DECODER_LAYERS // 2)


class QueryCache:
    """Q-Former outputs of the training pictures, computed when first asked for."""

    def __init__(
        self, model: Blip2ForConditionalGeneration, pictures: np.ndarray, dtype: torch.dtype
    ) -> None:
        self.model, self.pictures, self.dtype = model, pictures, dtype
        rows, queries = 2 * len(pictures), model.query_tokens.shape[1]
        self.store = np.zeros((rows, queries, WIDTH), np.float16)
        self.known = np.zeros(rows, bool)

    def pixels(self, rows: np.ndarray) -> Tensor:
        """Normalised pixels of ``rows`` [B, 3, side, side]; the second half is mirrored."""
        chosen = self.pictures[rows % len(self.pictures)]
        flip = rows >= len(self.pictures)
        chosen[flip] = chosen[flip][:, :, ::-1]
        return to_pixels(chosen)

    @torch.no_grad()
    def __getitem__(self, rows: np.ndarray) -> Tensor:
        missing = rows[~self.known[rows]]
        if len(missing):
            with computing(self.dtype):
                _, queries = encode(self.model, self.pixels(missing))
            self.store[missing] = queries.float().numpy().astype(np.float16)
            self.known[missing] = True
        return torch.from_numpy(self.store[rows]).float()


class Teacher(nn.Module):
    """Teacher-forced losses of the language model, with the throw-away probes."""

    def __init__(self, model: Blip2ForConditionalGeneration, weight: float) -> None:
        super().__init__()
        self.model, self.weight = model, weight
        self.probes = nn.ModuleDict({str(n): nn.Linear(WIDTH, WIDTH, bias=False) for n in PROBES})
        self.seen: dict[int, Tensor] = {}
        for probe in self.probes.values():
            nn.init.eye_(probe.weight)  # pyright: ignore[reportArgumentType]
        for n in PROBES:
            model.language_model.decoder.block[n - 1].register_forward_hook(self._keep(n))

    def _keep(self, layer: int):
        def hook(module: nn.Module, inputs: object, output: object) -> None:
            self.seen[layer] = output[0] if isinstance(output, tuple) else output  # type: ignore[assignment]

        return hook

    def forward(self, queries: Tensor, prompts: Tensor, targets: Tensor) -> dict[str, Tensor]:
        """Cross entropies: ``loss`` to train, ``final`` and one per probe.

        Args:
            queries: [B, 8, width]. prompts: [B, p] ids padded with 0. targets: [B, t] likewise.
        """
        language = self.model.language_model
        embeds = torch.cat([self.model.language_projection(queries), language.shared(prompts)], 1)
        mask = torch.cat([torch.ones(queries.shape[:2], dtype=torch.long), (prompts != 0).long()], 1)
        labels = targets.masked_fill(targets == 0, -100).flatten()
        inputs = F.pad(targets[:, :-1], (1, 0))
        output = language(
            inputs_embeds=embeds, attention_mask=mask, decoder_input_ids=inputs, use_cache=False
        )
        result = {"final": F.cross_entropy(output.logits.flatten(0, 1).float(), labels)}
        result["loss"] = result["final"]
        for n in PROBES:
            hidden = language.decoder.final_layer_norm(self.probes[str(n)](self.seen[n]))
            result[f"layer{n}"] = F.cross_entropy(language.lm_head(hidden).flatten(0, 1).float(), labels)
            result["loss"] = result["loss"] + self.weight * result[f"layer{n}"]
        return result


def trimmed(ids: np.ndarray) -> Tensor:
    """Padded ids without the columns that are padding in every row."""
    return torch.from_numpy(ids[:, : max(1, int((ids != 0).sum(1).max()))])


def train_decoder(
    work: Path,
    steps: int,
    bundle: Path | None = None,
    size: int = 64_000,
    batch_size: int = 64,
    lr: float = 3e-3,
    joint: int = 0,
    seed: int = 0,
    resume: bool = True,
    precision: str = "auto",
) -> Path:
    """Runs or resumes the stage; returns the checkpoint's path.

    Args:
        work: folder of the data and checkpoints; the vision stage must have run there.
        steps: all steps, with the joint ones.
        bundle: where to write the model as it stands every 250 steps.
        size: training pictures (each is used plain and mirrored).
        batch_size: captions per step; as many questions, of other pictures, are added.
        lr: peak learning rate.
        joint: how many of the last steps train the vision side too.
        seed: of weights, data and order.
        resume: continue from the checkpoint if there is one.
        precision: see `workshop.precision`.
    """
    dtype = dtype_of(precision)
    data = work / "data"
    tokenizer = build_tokenizer(seed)
    pictures = prerender(data / f"train{SIDE}.u8", seed, TRAIN[:size], SIDE)
    texts = text_table(data / "train_texts.npz", seed, TRAIN[:size], tokenizer)
    labels = label_table(data / "train_labels.npz", seed, TRAIN[:size])
    model, heads = build_model(tokenizer, seed), VisionHeads()
    teacher = Teacher(model, 0.3)
    vision = torch.load(work / "vision.pt", weights_only=False)
    prefixes = ("vision_model.", "qformer.", "query_tokens")
    model.load_state_dict({k: v for k, v in vision["model"].items() if k.startswith(prefixes)}, strict=False)
    heads.load_state_dict(vision["heads"])
    cache = QueryCache(model, pictures, dtype)

    language = [(n, p) for n, p in teacher.named_parameters() if "language_" in n or "probes" in n]
    seeing = [(n, p) for n, p in teacher.named_parameters() if "language_" not in n and "probes" not in n]
    seeing = [("query_embed" if n.endswith("query_tokens") else n, p) for n, p in seeing] + [
        (f"heads.{n}", p) for n, p in heads.named_parameters()
    ]
    talk, see = build_optimizers(language, lr, dtype), build_optimizers(seeing, lr, dtype)
    checkpoint, log, start = work / "decoder.pt", work / "decoder.jsonl", 0
    if resume and checkpoint.exists():
        state = torch.load(checkpoint, weights_only=False)
        teacher.load_state_dict(state["teacher"])
        heads.load_state_dict(state["heads"])
        for optimizer, stored in zip([*talk, *see], state["optimizers"], strict=True):
            optimizer.load_state_dict(stored)
        start = state["step"]
    by_count = [np.flatnonzero(texts["count"] == n) for n in range(2, 6)]
    share = np.array([len(r) for r in by_count]) / len(texts["count"])
    clock, running = time.time(), {}
    for step in range(start, steps):
        for optimizer in [*talk, *see]:
            for group in optimizer.param_groups:
                group["lr"] = lr * schedule(step, steps, 200)
        rng = np.random.default_rng([seed, 13, step])
        rows = rng.choice(by_count[rng.choice(4, p=share)], batch_size)
        asked = rng.integers(0, len(texts["count"]), batch_size)
        pick = rng.integers(0, ASKED, len(asked))
        prompt = PROMPTS[0] if rng.random() < 0.6 else PROMPTS[rng.integers(len(PROMPTS))]
        prompts = torch.tensor([tokenizer(prompt)["input_ids"]] * batch_size)
        together = step >= steps - joint
        everything = np.concatenate([rows, asked])
        with computing(dtype):
            seen_loss: Tensor | float = 0.0
            if together:
                patches, queries = encode(model, cache.pixels(everything))
                truth = {name: torch.from_numpy(value[everything]) for name, value in labels.items()}
                seen_loss = 0.1 * vision_loss(heads, patches, queries, truth)[0]
            else:
                queries = cache[everything]
            told = teacher(queries[:batch_size], prompts, trimmed(texts["caption"][rows]))
            answered = teacher(
                queries[batch_size:],
                trimmed(texts["question"][asked, pick]),
                trimmed(texts["answer"][asked, pick]),
            )
            loss = told["loss"] + 0.3 * answered["loss"] + seen_loss
        loss.backward()
        nn.utils.clip_grad_norm_([p for _, p in language], 1.0)
        for optimizer in [*talk, *see] if together else talk:
            optimizer.step()
        for optimizer in [*talk, *see]:
            optimizer.zero_grad()
        losses = {f"caption_{k}": v for k, v in told.items() if k != "loss"} | {"answer": answered["final"]}
        for name, value in losses.items():
            running[name] = running.get(name, 0.0) + value.item()
        last = step + 1 == steps
        if (step + 1) % 50 == 0 or last:
            line: dict[str, object] = {
                "step": step + 1,
                "seconds": round(time.time() - clock, 1),
                "joint": together,
            }
            line |= {name: round(value / 50, 4) for name, value in running.items()}
            running = {}
            if (step + 1) % 100 == 0 or last:
                _save(checkpoint, teacher, heads, [*talk, *see], step + 1)
            if (step + 1) % 250 == 0 or last:
                line |= evaluate_scenes(model, tokenizer, seed, VALIDATION[:100])
                if bundle is not None:
                    publish(model, tokenizer, bundle, work, line)
            with log.open("a") as out:
                out.write(json.dumps(line) + "\n")
    return checkpoint


def publish(
    model: Blip2ForConditionalGeneration,
    tokenizer: PreTrainedTokenizerBase,
    folder: Path,
    work: Path,
    line: dict[str, object],
) -> None:
    """Replaces the published model and notes its metrics in ``STATUS.txt``."""
    save_bundle(model, tokenizer, folder)
    with (work / "STATUS.txt").open("a") as out:
        out.write(f"{time.strftime('%H:%M:%S')} {json.dumps(line)}\n")


def _save(
    path: Path, teacher: Teacher, heads: VisionHeads, optimizers: list[torch.optim.Optimizer], step: int
) -> None:
    state = {"teacher": teacher.state_dict(), "heads": heads.state_dict(), "step": step}
    torch.save(state | {"optimizers": [o.state_dict() for o in optimizers]}, path.with_suffix(".new"))
    path.with_suffix(".new").replace(path)


def main() -> None:
    """Command line of the stage."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--bundle", type=Path)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--joint", type=int, default=0)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--precision", choices=PRECISIONS, default="auto")
    parser.add_argument("--threads", type=int, default=cores())
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    train_decoder(
        options.work,
        options.steps,
        options.bundle,
        batch_size=options.batch_size,
        lr=options.lr,
        joint=options.joint,
        precision=options.precision,
    )


if __name__ == "__main__":
    main()
