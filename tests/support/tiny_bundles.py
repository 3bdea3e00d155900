"""Bundles of the tiny checkpoints, for every test that needs a real one. A new family is one line in `BUNDLES`."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from vlmexport.exporter.checkpoint import Checkpoint, fingerprint, open_checkpoint
from vlmexport.exporter.drafts.common.trained import TrainedDraft
from vlmexport.exporter.drafts.eagle.eagle import EagleDraft
from vlmexport.exporter.drafts.eagle.eagle3 import Eagle3Draft
from vlmexport.exporter.drafts.eagle.eagle3_network import Eagle3Config, Eagle3Network
from vlmexport.exporter.drafts.eagle.eagle_network import EagleConfig, EagleNetwork
from vlmexport.exporter.drafts.eagle.vispec import VispecDraft
from vlmexport.exporter.drafts.eagle.vispec_network import VispecConfig, VispecNetwork
from vlmexport.exporter.drafts.imitation.imitation import ImitationDraft, ImitationNetwork
from vlmexport.exporter.drafts.layer_skip import DraftAndVerify
from vlmexport.exporter.drafts.medusa.medusa import MedusaDraft
from vlmexport.exporter.drafts.medusa.medusa_network import MedusaConfig, MedusaHeads
from vlmexport.exporter.families.common.base import Family
from vlmexport.exporter.families.common.layer_skip import Sublayers
from vlmexport.exporter.families.registry import family_for
from vlmexport.exporter.pipeline import BuildRequest, build_bundle
from vlmexport.runtime.bundle.folder import Bundle

from tests.support import kept_traces, tiny_models, tiny_qwen3_5

kept_traces.install()


@dataclass(frozen=True)
class Recipe:
    """A checkpoint of `tiny_models.BUILDERS`, changes of its options, and what to build from it; `precision` is that of
    the bundle and of the checkpoint's numbers, `draft_precision` what the drafts' matrices are stored as, where that is another.

    At every layer of `draft_layers` there is an early exit and an untrained imitation network with random weights, which has
    attention at layers from `ATTENDING` on, and
    three Medusa heads, random too, with a projection as `head` says; an EAGLE layer as well, with the same `head`, and
    where the decoder reads pictures among its rows a ViSpec layer. The target without two of its sublayers drafts, too.
    """

    checkpoint: str
    draft_layers: tuple[int, ...] = (1,)
    changes: dict[str, Any] = field(default_factory=dict)
    limits: dict[str, Any] = field(
        default_factory=lambda: {"max_length": 160, "max_batch": 16, "max_width": 20, "max_source": 32}
    )
    precision: str = "float32"
    draft_precision: str | None = None
    head: str = "own"
    taps: tuple[int, int, int] | None = None
    """Layers whose rows an EAGLE-3 layer reads, where there is one."""
    weights: str | None = None
    """What the target's matrices are rounded to."""
    placed: tuple[str, ...] = ()
    """Layers of its own, `eagle` and `eagle3`, whose positions are the target's, with three axes (`MROPE`)."""

    @property
    def sees(self) -> bool:
        """Whether pictures stand among the rows that its decoder reads."""
        return self.checkpoint in SEEING


ATTENDING = 2
"""First layer behind which imitation networks of these bundles have attention."""

SEEING = (
    "blip2-opt",
    "gemma3",
    "internvl",
    "lfm2-vl",
    "llava",
    "llava-next",
    "paligemma2",
    "qwen2-vl",
    "qwen2.5-vl",
    "qwen3-vl",
    "qwen3.5",
    "smolvlm",
)
"""Checkpoints for which there is a ViSpec draft."""

MROPE: dict[str, dict[str, Any]] = {
    **{name: {"mrope_section": (2, 3, 3)} for name in ("qwen2-vl", "qwen2.5-vl")},
    **{name: {"mrope_section": (3, 3, 2), "mrope_interleaved": True} for name in ("qwen3-vl", "qwen3.5")},
}
"""By checkpoint how the eight angles of such a layer turn with three axes; as in the target behind one another, or not."""

FUSED: dict[str, Any] = {"hidden_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2}
FUSED_OPT: dict[str, Any] = {"hidden_size": 128, "word_embed_proj_dim": 128, "num_attention_heads": 4}
"""Four heads: TensorRT has no fused attention for odd numbers of heads here. Bundles of a family with layers of one size share
their traces."""

FULL, SLIDING, LINEAR = "full_attention", "sliding_attention", "linear_attention"


def windowed(*layer_types: str) -> dict[str, Any]:
    """Options of a Qwen2 of which some layers see 8 positions."""
    return {"use_sliding_window": True, "sliding_window": 8, "layer_types": list(layer_types)}


BUNDLES = {
    # It starts with another token than id 0, as a T5 may.
    "t5": Recipe(
        "blip2-t5",
        changes={"num_heads": 4, "vision_layers": 1, "qformer_layers": 1, "decoder_start_token_id": 2},
    ),
    "t5-text": Recipe("t5", changes={"num_heads": 4, "decoder_start_token_id": 2}, head="shared"),
    "llama": Recipe("llama", head="trimmed", taps=(1, 1, 1)),
    "blip2-opt": Recipe(
        "blip2-opt",
        changes={
            **FUSED_OPT,
            "seed": 16,
            "vision_layers": 1,
            "qformer_layers": 1,
        },
        head="shared",
    ),
    "vit-gpt2": Recipe("vit-gpt2", changes={"n_embd": 128, "n_head": 4, "seed": 18, "vision_layers": 1}),
    "llama-tied": Recipe("llama-tied"),
    "llava": Recipe("llava", changes={"vision_layers": 2}, head="shared"),
    # As many places as two large pictures and some words need.
    "llava-next": Recipe(
        "llava-next",
        changes={"vision_layers": 2},
        limits={"max_length": 256, "max_batch": 16, "max_width": 20, "max_source": 32},
        head="shared",
    ),
    "qwen2.5-vl": Recipe(
        "qwen2.5-vl",
        changes={**FUSED, "seed": 30},
        head="shared",
        taps=(1, 1, 1),
        placed=("eagle3",),
    ),
    # As many places as two pictures of 13 tiles and some words need.
    "internvl": Recipe(
        "internvl",
        changes={**FUSED, "vision_layers": 2},
        limits={"max_length": 256, "max_batch": 16, "max_width": 20, "max_source": 32},
        head="shared",
        taps=(1, 1, 1),
    ),
    "internvl-two-cuts": Recipe(
        "internvl",
        (1, 2),
        {**FUSED, "language": "qwen3", "head_dim": 32, "num_hidden_layers": 3, "vision_layers": 2},
        taps=(1, 1, 2),
    ),
    # As many places as three pictures, or a video and its text, need.
    "smolvlm": Recipe(
        "smolvlm",
        changes=FUSED,
        limits={"max_length": 256, "max_batch": 16, "max_width": 20, "max_source": 32},
        head="shared",
    ),
    # Windows of 8: in each segment layers that see everything, layers that do not, or both.
    # With seed 28 a uniform falls within 2e-7 of a boundary between two tokens, which float32 does not tell apart.
    "qwen2": Recipe("qwen2", changes={**FUSED, **windowed(SLIDING, FULL), "seed": 37}),
    "qwen2-two-cuts": Recipe(
        "qwen2", (1, 2), {**FUSED, "num_hidden_layers": 4, **windowed(FULL, SLIDING, SLIDING, FULL)}
    ),
    # A segment of convolutions alone, which takes neither mask nor positions, then one of attention.
    "lfm2": Recipe("lfm2", changes={**FUSED, "seed": 20}, taps=(1, 1, 1)),
    # As many places as two pictures of 4 tiles and some words need.
    "lfm2-vl": Recipe(
        "lfm2-vl",
        changes={**FUSED, "seed": 31},
        limits={"max_length": 256, "max_batch": 16, "max_width": 20, "max_source": 32},
        head="shared",
        taps=(1, 1, 1),
    ),
    "lfm2-vl-two-cuts": Recipe(
        "lfm2-vl", (1, 2), {**FUSED, "num_hidden_layers": 3, "seed": 31}, taps=(1, 1, 2)
    ),
    "lfm2-two-cuts": Recipe("lfm2", (1, 2), {**FUSED, "num_hidden_layers": 4, "seed": 20}, taps=(1, 1, 2)),
    # Windows of 8, which the rows of a picture do not fit: they see each other.
    "gemma3": Recipe("gemma3", changes=FUSED, head="shared", taps=(1, 1, 1)),
    # Windows of 8, which a prompt does not fit: all of it sees itself. Its rows are 16 and some words.
    "paligemma2": Recipe("paligemma2", changes={**FUSED, "seed": 31}, head="shared", taps=(1, 1, 1)),
    "paligemma2-two-cuts": Recipe(
        "paligemma2", (1, 2), {**FUSED, "num_hidden_layers": 4, "seed": 31}, taps=(1, 1, 2)
    ),
    "gemma3-two-cuts": Recipe("gemma3", (1, 2), {**FUSED, "num_hidden_layers": 4}, taps=(1, 1, 2)),
    "qwen3": Recipe("qwen3", changes={**FUSED, "seed": 20}, taps=(1, 1, 1)),
    "qwen3-two-cuts": Recipe("qwen3", (1, 2), {**FUSED, "num_hidden_layers": 3}, taps=(1, 1, 2)),
    "t5-two-cuts": Recipe(
        "blip2-t5",
        (1, 2),
        {"num_layers": 1, "num_decoder_layers": 3, "vision_layers": 1, "qformer_layers": 1},
    ),
    "t5-text-two-cuts": Recipe("t5", (1, 2), {"num_heads": 4, "num_layers": 1, "num_decoder_layers": 3}),
    "llama-two-cuts": Recipe("llama", (1, 2), {"num_hidden_layers": 3}, head="trimmed", taps=(1, 2, 2)),
    "blip2-opt-two-cuts": Recipe(
        "blip2-opt", (1, 2), {**FUSED_OPT, "num_hidden_layers": 3, "vision_layers": 1, "qformer_layers": 1}
    ),
    "llava-two-cuts": Recipe("llava", (1, 2), {"num_hidden_layers": 3, "vision_layers": 2}),
    "llava-next-two-cuts": Recipe("llava-next", (1, 2), {"num_hidden_layers": 3, "vision_layers": 2}),
    "qwen2-vl": Recipe(
        "qwen2-vl", changes={**FUSED, "seed": 47}, head="shared", taps=(1, 1, 1), placed=("eagle",)
    ),
    # A cut lies between the layers behind which embeddings of pictures are added.
    "qwen3-vl": Recipe(
        "qwen3-vl", changes={**FUSED, "seed": 50}, head="shared", taps=(1, 1, 1), placed=("eagle3",)
    ),
    "qwen3.5": Recipe(
        "qwen3.5",
        changes={"layer_types": (LINEAR, FULL, LINEAR), **FUSED, "seed": 50},
        head="shared",
        taps=(1, 1, 1),
        placed=("eagle3",),
    ),
    "qwen3.5-two-cuts": Recipe(
        "qwen3.5",
        (1, 2),
        {"layer_types": (FULL, LINEAR, LINEAR, FULL), **FUSED, "seed": 50},
        taps=(1, 1, 2),
        placed=("eagle", "eagle3"),
    ),
    "qwen2-vl-two-cuts": Recipe(
        "qwen2-vl", (1, 2), {**FUSED, "num_hidden_layers": 3, "seed": 30}, taps=(1, 1, 2)
    ),
    "qwen3-vl-two-cuts": Recipe(
        "qwen3-vl",
        (1, 2),
        {**FUSED, "num_hidden_layers": 3, "seed": 50},
        taps=(1, 1, 2),
        placed=("eagle", "eagle3"),
    ),
    "qwen2.5-vl-two-cuts": Recipe(
        "qwen2.5-vl",
        (1, 2),
        {**FUSED, "num_hidden_layers": 3, "seed": 30},
        taps=(1, 1, 2),
        placed=("eagle", "eagle3"),
    ),
    "smolvlm-two-cuts": Recipe("smolvlm", (1, 2), {**FUSED, "num_hidden_layers": 3}),
    "vit-gpt2-two-cuts": Recipe(
        "vit-gpt2", (1, 2), {"n_embd": 128, "n_head": 4, "n_layer": 3, "vision_layers": 1}
    ),
}
BUNDLES |= {
    f"{name}-{precision}{cuts}": replace(BUNDLES[f"{name}{cuts}"], precision=precision)
    for name, precision in (("t5", "float16"), ("llama", "bfloat16"), ("llama", "float16"))
    for cuts in ("", "-two-cuts")
}
HOST_ALONE = ("qwen3.5",)
"""Families whose decoder keeps states: engines in host memory run them, and chains alone are verified. One bundle of float32 for
each."""

WITH_MTP = ("qwen3.5",)
"""Checkpoints whose own head drafts."""

IN_FLOAT16 = (
    "blip2-opt",
    "internvl",
    "llava",
    "llava-next",
    "qwen2.5-vl",
    "qwen3-vl",
    "smolvlm",
    "vit-gpt2",
)
"""What is looked at in float16 for its numbers alone."""

BUNDLES |= {f"{name}-float16": replace(BUNDLES[name], precision="float16") for name in IN_FLOAT16}
BUNDLES |= {
    "llama-int4": replace(BUNDLES["llama"], draft_precision="int4"),
    "blip2-opt-int8": replace(BUNDLES["blip2-opt"], draft_precision="int8", precision="float16"),
}
LIGHT = ("llama-int4", "blip2-opt-int8")
"""With drafts whose weights are integers."""

EVERY_FAMILY = (
    "t5",
    "llama",
    "blip2-opt",
    "vit-gpt2",
    "llava",
    "llava-next",
    "qwen2-vl",
    "qwen2.5-vl",
    "qwen3-vl",
    "gemma3",
    "paligemma2",
    "internvl",
    "smolvlm",
    "qwen2",
    "qwen3",
    "lfm2",
    "lfm2-vl",
    "t5-text",
)
"""One bundle of float32 for each; a new family is one word here."""

WITH_INTEGERS = (*EVERY_FAMILY, "llama-tied")
"""Bundles that are looked at with integer weights, too."""

CUT_TWICE = ("t5", "llama")
"""Those of them with a second cut."""

KINDS = ("int8", "int4")
BUNDLES |= {
    f"{name}-weights-{kind}{cuts}": replace(BUNDLES[f"{name}{cuts}"], weights=kind)
    for kind in KINDS
    for name, cuts in (*((name, "") for name in WITH_INTEGERS), *((name, "-two-cuts") for name in CUT_TWICE))
}
# With seed 18 it repeats itself soon.
BUNDLES["vit-gpt2-weights-int4"] = replace(
    BUNDLES["vit-gpt2-weights-int4"], changes={**BUNDLES["vit-gpt2"].changes, "seed": 21}
)
BUNDLES["llama-float16-weights-int4"] = replace(BUNDLES["llama-float16"], weights="int4")


@dataclass(frozen=True)
class TinyBundle:
    """Where a bundle lies, and where the checkpoint that it was built from."""

    name: str
    checkpoint: Path
    path: Path
    draft_folders: dict[int, Path]
    medusa: Path
    eagle: Path
    vispec: Path
    eagle3: Path
    skipping: Path

    @cached_property
    def bundle(self) -> Bundle:
        """The opened bundle."""
        return Bundle.open(self.path)

    @cached_property
    def family(self) -> Family:
        """What exported it."""
        return family_for(open_checkpoint(str(self.checkpoint)))

    def networks(self) -> dict[str, torch.nn.Module]:
        """Graph name → a draft's network in PyTorch, with its weights as the bundle holds them."""
        recipe = BUNDLES[self.name]
        return {
            name: draft.with_precision(recipe.draft_precision).stored_as(recipe.precision).network
            for name, draft in self.drafts().items()
        }

    def drafts(self) -> dict[str, TrainedDraft]:
        """Graph name → the trained draft, as it lies in its folder."""
        found: dict[str, TrainedDraft] = {
            f"imitation.{n}": ImitationDraft.load(folder) for n, folder in self.draft_folders.items()
        }
        found |= {"medusa": MedusaDraft.load(self.medusa), "eagle": EagleDraft.load(self.eagle)}
        if BUNDLES[self.name].sees:
            found["vispec"] = VispecDraft.load(self.vispec)
        if BUNDLES[self.name].taps is not None:
            found["eagle3"] = Eagle3Draft.load(self.eagle3)
        return found


def described(source: Checkpoint, folder: Path) -> dict[str, object]:
    """The target of a draft for the checkpoint in `folder`."""
    layers = family_for(source).decoder.num_layers
    return {"name": folder.name, "fingerprint": fingerprint(source), "num_layers": layers}


def stir(network: torch.nn.Module, generator: torch.Generator, size: float) -> None:
    """Adds normal numbers of this size to every parameter."""
    for value in network.parameters():
        value.add_(torch.randn(value.shape, generator=generator), alpha=size)


@contextmanager
def seeded(seed: int) -> Iterator[torch.Generator]:
    """For weights that are the same whatever was drawn before, by a network's own initialisation too."""
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        yield torch.manual_seed(seed)


def untrained_draft(checkpoint: Path, layer: int, folder: Path, seed: int = 11, heads: int = 0) -> Path:
    """Writes an imitation draft for `checkpoint` whose weights are random, so that it agrees only by chance; with attention
    of so many `heads`."""
    source = open_checkpoint(str(checkpoint))
    shape = family_for(source).decoder
    width = shape.hidden_size
    with seeded(seed) as generator:
        network = ImitationNetwork(width, attention_heads=heads)
        stir(network, generator, (1.5 if heads else 0.5) / width**0.5)
    target = described(source, checkpoint)
    ImitationDraft(network=network.eval(), layer=layer, target=target).save(folder)
    return folder


def untrained_heads(checkpoint: Path, folder: Path, head: str = "own", seed: int = 12) -> Path:
    """Writes Medusa heads for `checkpoint` with random weights and invented hits, so that there is a tree."""
    source = open_checkpoint(str(checkpoint))
    language = family_for(source).language
    vocabulary, width = language.head.shape
    trimmed = 2 * vocabulary // 3 if head == "trimmed" else None
    with seeded(seed) as generator:
        network = MedusaHeads(MedusaConfig(width, vocabulary, 3, 2, head, trimmed))
        for name, value in network.named_parameters():
            value.add_(
                torch.randn(value.shape, generator=generator),
                alpha=(1.0 if "bias" in name else 3.0) / width**0.5,
            )
        if trimmed is not None:
            network.d2t.copy_(torch.randperm(vocabulary, generator=generator)[:trimmed])
    target = described(source, checkpoint)
    hits = [[0.4, 0.2, 0.1, 0.05], [0.3, 0.2, 0.1], [0.25, 0.15]]
    MedusaDraft(network=network.eval(), target=target, evaluation={"hits": hits}).save(folder)
    return folder


def untrained_layer(
    checkpoint: Path, folder: Path, head: str = "shared", seed: int = 13, **axes: Any
) -> Path:
    """Writes an EAGLE layer for `checkpoint` with random weights; its shape is not that of the target's layers. `axes`:
    a value of `MROPE`."""
    source = open_checkpoint(str(checkpoint))
    language = family_for(source).language
    vocabulary, width = language.head.shape
    trimmed = 2 * vocabulary // 3 if head == "trimmed" else None
    with seeded(seed) as generator:
        network = EagleNetwork(
            EagleConfig(width, vocabulary, 4, 2, 16, 96, head=head, trimmed=trimmed, **axes)
        )
        stir(network, generator, 1.5 / width**0.5)
        if trimmed is not None:
            network.d2t.copy_(torch.randperm(vocabulary, generator=generator)[:trimmed])
    target = described(source, checkpoint)
    EagleDraft(network=network.eval(), target=target).save(folder)
    return folder


def untrained_wide(
    checkpoint: Path, folder: Path, taps: tuple[int, int, int], head: str = "own", seed: int = 15, **axes: Any
) -> Path:
    """Writes an EAGLE-3 layer for `checkpoint` with random weights, its head `trimmed` or not; `axes`: a value of `MROPE`."""
    source = open_checkpoint(str(checkpoint))
    language = family_for(source).language
    vocabulary, width = language.head.shape
    trimmed = 2 * vocabulary // 3 if head == "trimmed" else None
    options = {"head": "trimmed", "trimmed": trimmed} if trimmed else {}
    config = Eagle3Config(width, vocabulary, 4, 2, 16, 96, taps=taps, **options, **axes)
    with seeded(seed) as generator:
        network = Eagle3Network(config)
        stir(network, generator, 1.5 / width**0.5)
        if trimmed is not None:
            network.d2t.copy_(torch.randperm(vocabulary, generator=generator)[:trimmed])
    target = described(source, checkpoint)
    Eagle3Draft(network=network.eval(), target=target).save(folder)
    return folder


def untrained_vispec(checkpoint: Path, folder: Path, head: str = "shared", seed: int = 14) -> Path:
    """Writes a ViSpec layer for `checkpoint` with random weights: two tokens and a global feature of every picture."""
    source = open_checkpoint(str(checkpoint))
    language = family_for(source).language
    vocabulary, width = language.head.shape
    layer = EagleConfig(width, vocabulary, 4, 2, 16, 96, head=head)
    with seeded(seed) as generator:
        network = VispecNetwork(VispecConfig(layer, 4, queries=3, adaptor_bias=True))
        stir(network, generator, 1.5 / width**0.5)
        # Tokens of the size of text, or nobody would look at them; the mixer takes it back.
        network.imadpt.o_proj.weight.mul_(8)
        network.img_fc.weight[:, width:].div_(8)
    target = described(source, checkpoint)
    VispecDraft(network=network.eval(), target=target).save(folder)
    return folder


def without_sublayers(checkpoint: Path, folder: Path) -> Path:
    """Writes a Draft & Verify draft for `checkpoint`: no attention in the first layer and no MLP in the second, so that
    what it drafts has other rows than the target's in the caches that it does write."""
    target = described(open_checkpoint(str(checkpoint)), checkpoint)
    DraftAndVerify(skip=Sublayers((0,), (1,)), target=target).save(folder)
    return folder


def load(name: str, folder: Path) -> TinyBundle | None:
    """The bundle that `build` left in `folder`, or None when there is none."""
    drafts = {n: folder / f"draft-{n}" for n in BUNDLES[name].draft_layers}
    made = TinyBundle(
        name,
        folder / "checkpoint",
        folder / "bundle",
        drafts,
        folder / "medusa",
        folder / "eagle",
        folder / "vispec",
        folder / "eagle3",
        folder / "draft-and-verify",
    )
    return made if (made.path / "manifest.json").is_file() else None


def build(name: str, folder: Path) -> TinyBundle:
    """Builds the bundle `name` of `BUNDLES` below `folder`; what a build that was stopped has left there goes."""
    shutil.rmtree(folder, ignore_errors=True)
    recipe = BUNDLES[name]
    dtype = getattr(torch, recipe.precision)
    checkpoint = tiny_models.checkpoint(
        recipe.checkpoint, folder / "checkpoint", dtype=dtype, **recipe.changes
    )
    if recipe.checkpoint in WITH_MTP:
        tiny_qwen3_5.add_mtp(checkpoint)
    drafts = [
        str(untrained_draft(checkpoint, n, folder / f"draft-{n}", seed=n, heads=4 if n >= ATTENDING else 0))
        for n in recipe.draft_layers
    ]
    drafts.append(str(untrained_heads(checkpoint, folder / "medusa", recipe.head)))
    axes = {kind: MROPE[recipe.checkpoint] if kind in recipe.placed else {} for kind in ("eagle", "eagle3")}
    drafts.append(str(untrained_layer(checkpoint, folder / "eagle", recipe.head, **axes["eagle"])))
    if recipe.checkpoint in WITH_MTP:
        drafts.append("mtp")
    if recipe.checkpoint not in HOST_ALONE:
        drafts.append(str(without_sublayers(checkpoint, folder / "draft-and-verify")))
    if recipe.sees:
        drafts.append(str(untrained_vispec(checkpoint, folder / "vispec", recipe.head)))
    if recipe.taps is not None:
        wide = untrained_wide(checkpoint, folder / "eagle3", recipe.taps, recipe.head, **axes["eagle3"])
        drafts.append(str(wide))
    # The contract suite compares with transformers itself, far more closely than the build does.
    build_bundle(
        BuildRequest(
            model=str(checkpoint),
            output=folder / "bundle",
            drafts=drafts,
            parity=False,
            precision=recipe.precision,
            weights=recipe.weights,
            draft_precision=[] if recipe.draft_precision is None else [recipe.draft_precision],
            **recipe.limits,
        )
    )
    made = load(name, folder)
    assert made is not None
    return made
