"""FastVLM's comparison of methods on frozen targets: early exit, Draft & Verify and imitation drafts, by quality and speed.

    python -m benchmarks.papers_fastvlm_methods --folder runs/methods
    python -m benchmarks.papers_fastvlm_methods --folder runs/methods --time     # on an idle machine

For each bundled model one bundle with every draft. Captions of held-out scenes (and answers to questions, where the model
answers any, and stories of films, where it reads some) are decoded plainly and with every draft by the runtime, verified: how many texts differ is counted. The chain
length of each is that which gains most by weights on scenes of the validation split; FastVLM's own, 8 for captions and 5 for
questions, stands beside it for the imitation drafts. Texts are judged by BLEU-4, ROUGE-L and CIDEr against five that
the generator drew of each scene or film, answers by what they say. The rows *unverified* are what the first n layers write alone,
without and with the imitation network: what the paper's rows "w/o" and "with imitation network" at a speed-up of exactly
L/n are. Without --time no clock. Writes results/papers-fastvlm-methods.json, and with --time
results/papers-fastvlm-methods-times.json; models that --models leaves out stand there as they were, if this machine measured
them.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from vlmexport.calibration.data import load_records
from vlmexport.calibration.data.reading.records import Record
from vlmexport.calibration.data.scenes import answer_value, ask, score_told, tell
from vlmexport.calibration.data.scenes.film import sample_film
from vlmexport.calibration.data.scenes.film_story import score_story, tell_film, total_story
from vlmexport.calibration.data.scenes.scene import HELDOUT, sample_scene
from vlmexport.calibration.data.scenes.score import total_accuracy
from vlmexport.calibration.evaluation.quality.captions import score
from vlmexport.calibration.evaluation.quality.told import Told
from vlmexport.calibration.targets.layer_weights import Weights
from vlmexport.calibration.targets.target import Target, load_target
from vlmexport.exporter.drafts.folders import shipped_drafts
from vlmexport.exporter.drafts.imitation.imitation import ImitationDraft
from vlmexport.exporter.families.common.layer_skip import Sublayers
from vlmexport.exporter.pipeline import BuildRequest, build_bundle
from vlmexport.runtime import Session
from vlmexport.runtime.session.result import Result
from vlmexport.runtime.speedup.stats import Stats

from benchmarks.captioning_times import decode_rate, interleaved, ratios
from benchmarks.machine import processor, save
from recipes.common.captioner import LONGEST
from recipes.models import captioner_of

MODELS = ("tiny-blip2-flant5", "tiny-vit-gpt2", "tiny-qwen2.5-vl")
PUBLISHED = {"captions": 8, "answers": 5, "stories": 8}
"""FastVLM's d; it knows no films, whose stories are as long as captions."""
FORMS = {"answers": "scenes-questions", "stories": "films"}
"""What tasks beside captions are called as data."""
REFERENCES = 5
MOST = 8
"""The longest chain that is tried."""
RESULTS = Path(__file__).parent / "results"
SCRIPT = "benchmarks/papers_fastvlm_methods.py"
PACKAGES = ("torch", "transformers", "pycocoevalcap")
COUNTS, TIMES = "papers-fastvlm-methods", "papers-fastvlm-methods-times"

Judge = Callable[[Sequence[str]], dict[str, float]]
Row = dict[str, Any]


@dataclass(frozen=True)
class Method:
    """A draft of the bundle, and the share of a token's weights that a drafted token reads."""

    name: str
    draft: str
    share: float
    own_length: bool = False
    """Whether the paper's d is shown for it, too."""

    def by_weights(self, stats: Stats) -> float:
        """Tokens per weights read, over plain decoding."""
        return stats.tau / (1 + self.share * stats.proposed / stats.cycles)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--folder", type=Path, required=True, help="for the bundles, which are kept")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=MODELS, metavar="MODEL")
    parser.add_argument("--scenes", type=int, default=200, help="held-out scenes that measure")
    parser.add_argument("--chosen", type=int, default=24, help="validation scenes that choose chain lengths")
    parser.add_argument(
        "--time", action="store_true", help="decode speed-ups of what was counted, by the clock"
    )
    parser.add_argument("--timed", type=int, default=8, help="held-out scenes of a round of --time")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--threads", type=int, default=1, help="of what is computed in PyTorch")
    parser.add_argument("--no-save", action="store_true", help="print only")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    models: dict[str, Any] = {}
    if options.time:
        counted = json.loads((RESULTS / f"{COUNTS}.json").read_text("utf-8"))["models"]
    for model in options.models:
        target, bundle = load_target(model, "cpu"), options.folder / model
        if options.time:
            models[model] = times(target, bundle, counted[model]["tasks"], options.timed, options.rounds)
        else:
            methods = ready(target, bundle)
            counts = measured(target, bundle, methods, networks(target), options.scenes, options.chosen)
            models[model] = {
                "fingerprint": target.fingerprint, "layers": target.num_layers, "tasks": counts,
            }  # fmt: skip
        print("\n".join(lines(model, models[model])), flush=True)
    if options.no_save:
        return
    if options.time:
        result = {"script": f"{SCRIPT} --time", "scenes": options.timed, "rounds": options.rounds}
        print(save(TIMES, result | {"models": kept(TIMES, result) | models}))
    else:
        result = {"script": SCRIPT, "scenes": options.scenes, "chosen": options.chosen}
        print(save(COUNTS, result | {"models": kept(COUNTS, result) | models}, *PACKAGES))


def kept(name: str, result: Mapping[str, Any]) -> dict[str, Any]:
    """What stands in a file of results of the same settings on this machine, by model, with the revision that it is of."""
    path = RESULTS / f"{name}.json"
    if not path.exists():
        return {}
    known = json.loads(path.read_text("utf-8"))
    machine = known["machine"]
    if any(known.get(key) != value for key, value in result.items()) or machine["cpu"] != processor():
        return {}
    return {model: {"revision": machine["revision"]} | rows for model, rows in known["models"].items()}


# --- what is decoded ---


def tasks(target: Target) -> tuple[str, ...]:
    """What a model does."""
    known = _captioner(target).forms()
    return ("captions", *(task for task, form in FORMS.items() if form in known))


def records(target: Target, task: str, split: str, count: int) -> list[Record]:
    """Requests of a task."""
    form = FORMS.get(task) or _captioner(target).captions_form()
    return list(load_records(f"{form}:{split}:{count}"))


def _captioner(target: Target) -> Any:
    """The recipe's class of a model."""
    return captioner_of(target.checkpoint.architecture)


def ready(target: Target, bundle: Path) -> list[Method]:
    """What a bundle drafts with; it is built if it is not there."""
    alias, skip = target.checkpoint.alias, searched(target.name)
    assert alias is not None, "a bundled model"
    drafts = networks(target)
    if not (bundle / "manifest.json").exists():
        names = [f"n{draft.layer}" for draft in drafts]
        folders = [str(folder) for folder in alias.draft_folders() if folder.name in names]
        build_bundle(
            BuildRequest(
                model=target.name, output=bundle, drafts=[*folders, "draft-and-verify"],
                skip_attention=[*skip.attention], skip_mlp=[*skip.mlp],
            )
        )  # fmt: skip
    weights = Weights.of(target)
    exits = [method for draft in drafts for method in (early_exit(draft, weights), imitation(draft, weights))]
    return [*exits, Method("Draft & Verify", "draft-and-verify", weights.share(skip))]


def early_exit(draft: ImitationDraft, weights: Weights) -> Method:
    """The exit that a network stands at, without it."""
    return Method(
        f"early exit, n = {draft.layer}", f"early-exit@{draft.layer}", weights.first_layers(draft.layer)
    )


def imitation(draft: ImitationDraft, weights: Weights) -> Method:
    """A network after its layer."""
    share = weights.exit_with(draft.layer, draft.network)
    return Method(f"imitation, n = {draft.layer}", f"imitation@{draft.layer}", share, own_length=True)


def networks(target: Target) -> list[ImitationDraft]:
    """The imitation drafts that ship with a model, by layer."""
    assert target.checkpoint.alias is not None, "a bundled model"
    shipped = [each for each in shipped_drafts(target.checkpoint.alias) if isinstance(each, ImitationDraft)]
    return sorted(shipped, key=lambda each: each.layer)


def searched(model: str) -> Sublayers:
    """What `papers_draft_and_verify.py` found in its free search."""
    result = json.loads((RESULTS / f"papers-draft-and-verify-{model}.json").read_text("utf-8"))
    skip = next(row["skip"] for row in result["rows"] if row["draft"] == "draft-and-verify, free")
    return Sublayers(tuple(skip["attention"]), tuple(skip["mlp"]))


# --- counts ---


def measured(
    target: Target,
    bundle: Path,
    methods: Sequence[Method],
    drafts: Sequence[ImitationDraft],
    scenes: int,
    chosen: int,
    asked: Sequence[str] | None = None,
) -> dict[str, dict[str, Row]]:
    """Counts and quality of one model: rows by task (of those that are `asked` for, by default all) and method; what the
    networks of `drafts` write with nobody to verify it comes last."""
    by_task: dict[str, dict[str, Row]] = {}
    for task in asked or tasks(target):
        held, told = (records(target, task, *one) for one in (("heldout", scenes), ("validation", chosen)))
        judge: Judge = partial({"captions": captions, "answers": answers, "stories": stories}[task], scenes)
        with Session.load(bundle) as session:
            plain = decoded(session, held)
            rows = by_task[task] = {"plain": judge([result.text for result in plain])}
            for method in methods:
                lengths = [best_length(session, method, told)]
                lengths += [PUBLISHED[task]] if method.own_length else []
                for length in dict.fromkeys(lengths):
                    rows[f"{method.name}, d = {length}"] = drafted(session, method, length, held, plain)
        for draft in drafts:
            for how, network in (("alone", nn.Identity()), ("with its network", draft.network)):
                texts = written(target, draft.layer, network, held)
                paper = {"by_weights": round(target.num_layers / draft.layer, 3)}
                rows[f"unverified: {draft.layer} layers {how}"] = judge(texts) | paper
    return by_task


def decoded(session: Session, asked: Sequence[Record], draft: str = "none", length: int = 0) -> list[Result]:
    """Greedy answers."""
    return [session.generate(**request(record, draft, length)) for record in asked]


def request(record: Record, draft: str = "none", length: int = 0) -> dict[str, Any]:
    """Of the runtime."""
    assert record.image is not None, "scenes have pictures"
    drafting = {"draft": draft, "draft_length": length} if length else {"draft": draft}
    return {
        "image": record.image.load(),
        "prompt": record.prompt or None,
        "max_new_tokens": LONGEST,
        **drafting,
    }


def best_length(session: Session, method: Method, told: Sequence[Record]) -> int:
    """The fixed length that gains most by weights."""
    stats = {
        length: Stats.total(result.stats for result in decoded(session, told, method.draft, length))
        for length in range(1, MOST + 1)
    }
    return max(stats, key=lambda length: method.by_weights(stats[length]))


def drafted(
    session: Session, method: Method, length: int, held: Sequence[Record], plain: Sequence[Result]
) -> Row:
    """A row of a method."""
    results = decoded(session, held, method.draft, length)
    stats = Stats.total(result.stats for result in results)
    return {
        "draft": method.draft, "draft_length": length, "share": round(method.share, 4),
        "differ": sum(a.tokens != b.tokens for a, b in zip(plain, results, strict=True)),
        "alpha": round(stats.alpha or 0.0, 4), "tau": round(stats.tau, 4),
        "by_weights": round(method.by_weights(stats), 4),
    }  # fmt: skip


def written(target: Target, layer: int, network: nn.Module, held: Sequence[Record]) -> list[str]:
    """What the first `layer` layers and a network write, with nobody to verify it."""
    with exited(target, layer, network):
        told = target.generate(held, LONGEST)
    return [target.tokenizer.decode(ids, skip_special_tokens=True) for ids in told]


@contextmanager
def exited(target: Target, layer: int, network: nn.Module) -> Iterator[None]:
    """Within, the target ends after `layer` layers, whose rows pass a network before its final norm."""
    kept = list(target.layers)
    hook = target.final_norm.register_forward_pre_hook(lambda _, given: (network(given[0]), *given[1:]))
    del target.layers[layer:]
    try:
        yield
    finally:
        hook.remove()
        target.layers.extend(kept[layer:])


# --- quality ---


def captions(scenes: int, texts: Sequence[str]) -> dict[str, float]:
    """Of captions of the first held-out scenes, against what the generator tells of each, and the facts in them."""
    seen = [sample_scene(0, index) for index in HELDOUT[:scenes]]
    values = likeness(texts, [[tell(scene, variant).text for variant in range(REFERENCES)] for scene in seen])
    facts = total_accuracy(score_told(text, scene) for text, scene in zip(texts, seen, strict=True))
    return values | {"facts": round(facts, 4)}


def stories(scenes: int, texts: Sequence[str]) -> dict[str, float]:
    """The same of the films of the first held-out scenes."""
    seen = [sample_film(0, index) for index in HELDOUT[:scenes]]
    values = likeness(
        texts, [[tell_film(film, variant).text for variant in range(REFERENCES)] for film in seen]
    )
    facts = total_story(score_story(text, film) for text, film in zip(texts, seen, strict=True))
    return values | {"facts": round(facts, 4)}


def likeness(texts: Sequence[str], references: Sequence[Sequence[str]]) -> dict[str, float]:
    """BLEU-4, ROUGE-L and CIDEr of texts, each against its own references."""
    told = [
        Told(Record(str(place), "", None, references=tuple(own)), text)
        for place, (text, own) in enumerate(zip(texts, references, strict=True))
    ]
    return {name: round(value, 4) for name, value in score(told).values.items()}


def answers(scenes: int, texts: Sequence[str]) -> dict[str, float]:
    """Share of the answers to questions about the first held-out scenes that say the right thing."""
    asked = [ask(sample_scene(0, index), 0) for index in HELDOUT[:scenes]]
    right = [answer_value(one.kind, text) == one.value for one, text in zip(asked, texts, strict=True)]
    return {"right": round(sum(right) / len(right), 4)}


# --- the clock ---


def times(
    target: Target,
    bundle: Path,
    counted: Mapping[str, Mapping[str, Row]],
    scenes: int,
    rounds: int,
    threads: int | None = 1,
) -> dict[str, Any]:
    """Decode speed-ups of the rows that were counted, by task: all of a task take turns. On one core, unless `threads` says
    otherwise: two threads that wait for one another are no measure of a method."""
    ready(target, bundle)
    by_task: dict[str, dict[str, Row]] = {}
    with Session.load(bundle, threads=threads) as session:
        for task, rows in counted.items():
            asked = [request(record) for record in records(target, task, "heldout", scenes)]
            arms = {"plain": partial(decode_rate, session, asked)}
            for name, row in rows.items():
                if "draft" in row:
                    how = {"draft": row["draft"], "draft_length": row["draft_length"]}
                    arms[name] = partial(decode_rate, session, [one | how for one in asked])
            rates = interleaved(arms, rounds)
            by_task[task] = {name: ratios(rates[name], rates["plain"]) for name in arms}
    return {"tasks": by_task}


def lines(model: str, measured_model: Mapping[str, Any]) -> Iterator[str]:
    """Rows of a Markdown table."""
    for task, rows in measured_model["tasks"].items():
        for name, row in rows.items():
            values = "; ".join(f"{key} {value}" for key, value in row.items() if key != "draft")
            yield f"| {model} | {task} | {name} | {values} |"


if __name__ == "__main__":
    main()
