"""Drafts with matrices of float32, int8 and int4: bytes, a step of the draft beside a token of plain decoding, tokens per
cycle and speed, on the same requests.

    python -m benchmarks.light_drafters --model tiny-blip2-flant5 --draft medusa --requests 32 --new-tokens 96 --save
    python -m benchmarks.light_drafters --model tiny-vit-gpt2 --draft medusa --requests 32 --new-tokens 96 --save
    python -m benchmarks.light_drafters --model runs/smollm2 --draft runs/medusa --draft-length 3 --requests 10 \
        --new-tokens 80 --name smollm2-medusa --save
    python -m benchmarks.light_drafters --model runs/smollm2 --random 8192 --draft-length 3 --name smollm2-eagle-8192 --save

builds the three bundles below --work first (without parity; `vlmexport build` compares them). Bundles that are there
already are given by their precision: --bundle float32=DIR --bundle int8=DIR --bundle int4=DIR.

Of --draft medusa, or any draft's folder. --random N takes in its place an EAGLE layer of the model's shape with random weights
that chooses from N tokens: what it costs, not what it is worth. Passes of all bundles take turns, and so do their requests;
every text is compared with plain decoding's: `different` counts those that are not it, which only a near-tie of float32
may be (`vlmexport verify` judges that). Held-out scenes, or held-out chat prompts for a model of text.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.machine import save

PRECISIONS = ("float32", "int8", "int4")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", help="alias, folder or hub id")
    parser.add_argument("--draft", help="kind that ships with the model, or a draft's folder")
    parser.add_argument("--random", type=int, metavar="N", help="an untrained EAGLE layer over N tokens")
    parser.add_argument("--bundle", action="append", default=[], metavar="PRECISION=DIR")
    parser.add_argument("--work", type=Path, default=Path("runs/light-drafters"))
    parser.add_argument("--requests", type=int, default=16)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--draft-length", type=int, help="of the chains; default: the bundle's")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--name", help="of the result file; default: the model's")
    parser.add_argument(
        "--save", action="store_true", help="write benchmarks/results/light-drafters-NAME.json"
    )
    options = parser.parse_args()
    bundles = {name: Path(folder) for name, _, folder in (each.partition("=") for each in options.bundle)}
    if bundles and "float32" not in bundles:
        parser.error("--bundle float32=DIR is what the others are compared with")
    if not bundles and (options.model is None or (options.draft is None) == (options.random is None)):
        parser.error("give --model and one of --draft and --random, or --bundle")
    bundles = bundles or build(options)
    from vlmexport.runtime import Session

    sessions = {name: Session.load(folder, threads=options.threads) for name, folder in bundles.items()}
    names = {name: drafted(session) for name, session in sessions.items()}
    steps, token = step_seconds(sessions, names)
    by_precision: dict[str, dict[str, Any]] = {
        name: {
            "draft": names[name],
            "draft_bytes": draft_bytes(session.bundle, names[name]),
            "step_seconds": steps[name],
            "step_share": steps[name] / token,
        }
        for name, session in sessions.items()
    }
    if options.random is None:
        for name, decoded in decode(sessions, names, options).items():
            by_precision[name] |= decoded
    whole = by_precision["float32"]
    for name, row in by_precision.items():
        print(
            f"{name}: {row['draft_bytes'] / 1e6:.2f} MB, a step {row['step_seconds'] * 1e3:.3f} ms = "
            f"{row['step_share']:.3f} T(1) ({whole['step_seconds'] / row['step_seconds']:.2f} times as fast)"
            + (
                f"; tau {row['tau']:.3f}, {row['speedup']:.2f} times plain decoding, {row['different']} texts differ"
                if "tau" in row
                else ""
            )
        )
    if options.save:
        manifest = sessions["float32"].bundle.manifest
        label = options.name or Path(manifest.model.source).name
        result = {
            "script": "benchmarks/light_drafters.py",
            "model": manifest.model.source,
            "random_layer_over": options.random,
            "requests": options.requests,
            "new_tokens": options.new_tokens,
            "draft_length": options.draft_length or manifest.policy.draft_length,
            "threads": sessions["float32"].threads,
            "token_seconds": token,
            "precisions": by_precision,
        }
        print(save(f"light-drafters-{label}", result))


def build(options: argparse.Namespace) -> dict[str, Path]:
    """A bundle for each precision below --work; those that are there stay."""
    from vlmexport.exporter.pipeline import BuildRequest, build_bundle

    made = {}
    draft = options.draft
    if draft is None:
        from benchmarks.random_eagle import random_eagle

        folder = options.work / f"random-eagle-{options.random}"
        draft = str(random_eagle(options.model, folder, options.random))
    label = f"{Path(options.model).name}-{Path(draft).name}"
    for precision in PRECISIONS:
        made[precision] = options.work / f"{label}-{precision}"
        if not (made[precision] / "manifest.json").is_file():
            light = [] if precision == "float32" else [precision]
            build_bundle(
                BuildRequest(
                    model=options.model,
                    output=made[precision],
                    drafts=[draft],
                    draft_precision=light,
                    parity=False,
                )
            )
    return made


def drafted(session: Any) -> str:
    """The bundle's draft with graphs: its default, else the first."""
    drafts = [draft.name for draft in session.bundle.manifest.drafts if draft.graphs]
    default = session.bundle.manifest.policy.draft
    return default if default in drafts else drafts[0]


def draft_bytes(bundle: Any, name: str) -> int:
    """Bytes in the weights file of what the draft brings along."""
    import onnx

    manifest, slots = bundle.manifest, {}
    for graph in manifest.choose_draft(name).graphs.values():
        model = onnx.load(str(bundle.path / manifest.graphs[graph].file), load_external_data=False)
        for tensor in model.graph.initializer:
            place = {each.key: each.value for each in tensor.external_data}
            if place and tensor.name.startswith("draft."):
                slots[place["location"], place["offset"]] = int(place["length"])
    return sum(slots.values())


def step_seconds(sessions: dict[str, Any], names: dict[str, str]) -> tuple[dict[str, float], float]:
    """(median seconds of one pass of the draft by precision, of a token of plain decoding): all passes take turns."""
    from vlmexport.runtime.measure.pass_costs import passes
    from vlmexport.runtime.measure.timing import GraphTimer, median_seconds

    arms: dict[str, list[Any]] = {}
    for precision, session in sessions.items():
        manifest, engine = session.bundle.manifest, session.decoder.engine
        timer = GraphTimer(session.bundle, engine, cache=128, source=manifest.text.image_rows or 32)
        draft = manifest.choose_draft(names[precision])
        for (what, _, width), graphs in passes(manifest, [draft], [1], embed=False).items():
            if what == "plain" and precision == "float32":
                arms["plain"] = timer.calls(graphs, width)
            elif (
                what == "propose" and draft.layer
            ):  # an imitation network stands in front of the target's head
                arms[precision] = timer.calls(draft.graphs.values(), width)
            elif what in ("once", "propose"):
                arms[precision] = timer.calls(graphs, width)
    medians = median_seconds(arms)
    return medians, medians.pop("plain")


def decode(
    sessions: dict[str, Any], names: dict[str, str], options: argparse.Namespace
) -> dict[str, dict[str, float]]:
    """Tokens per cycle and the speed-up in seconds of decoding, by precision; plain decoding takes its turn, too."""
    asked = requests(sessions["float32"].bundle.manifest, options.requests)
    arms: list[str] = ["plain", *sessions]
    counts = {arm: [0, 0, 0.0] for arm in arms}
    different = dict.fromkeys(arms, 0)
    order = random.Random(0)
    for number, request in enumerate([asked[0], *asked]):  # the first warms up
        texts: dict[str, Sequence[int]] = {}
        order.shuffle(arms)
        for arm in arms:
            session = sessions["float32" if arm == "plain" else arm]
            result = session.generate(
                **request,
                max_new_tokens=options.new_tokens,
                draft="none" if arm == "plain" else names[arm],
                **({} if arm == "plain" else {"draft_length": options.draft_length or session.bundle.manifest.policy.draft_length}),
            )  # fmt: skip
            texts[arm] = result.tokens
            if number:
                counts[arm][0] += result.stats.accepted
                counts[arm][1] += result.stats.cycles
                counts[arm][2] += result.stats.decode_seconds
        for arm in arms if number else ():
            different[arm] += texts[arm] != texts["plain"]
    plain = counts["plain"][2]
    return {
        arm: {
            "tau": accepted / cycles + 1,
            "cycles": cycles,
            "different": different[arm],
            "decode_seconds": seconds,
            "speedup": plain / seconds,
        }
        for arm, (accepted, cycles, seconds) in counts.items()
        if arm != "plain"
    }


def requests(manifest: Any, count: int) -> list[dict[str, Any]]:
    """Held-out pictures, or chat prompts whose topics are in no training prompt."""
    if manifest.image is not None:
        from vlmexport.calibration.data.scenes import HELDOUT, render, sample_scene

        return [{"image": render(sample_scene(0, HELDOUT[number]))} for number in range(count)]
    from recipes.smollm2_prompts import chat_prompts

    heldout = chat_prompts()[1]
    return [{"prompt": prompt} for prompt in heldout[:: max(1, len(heldout) // count)][:count]]


if __name__ == "__main__":
    main()
