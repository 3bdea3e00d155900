"""Answers in JSON: what a schema costs, and what drafting in it gains.

    python -m benchmarks.smollm2 /tmp/smollm2 && vlmexport build --model /tmp/smollm2 -o runs/smollm2
    python -m benchmarks.grammars runs/smollm2

Three schemas of robots (`grasp`, `boxes`, `hazard`), each asked about several scenes in words. Every arm answers each
question under the same schema: plainly, with what the schema forces as its only draft, and with the bundle's default behind
that; no draft is trained. Ratios are of decode seconds, the arms in random order; the figure is the median over questions and
rounds with a bootstrapped 95 % interval. `mask_microseconds`: the host's work for one drafted position, from the mask to the
masked logits, along the same answers in chains of `CHAIN` tokens.
"""

from __future__ import annotations

import argparse
import random
import time
from typing import Any

import numpy as np
from vlmexport.runtime import Session
from vlmexport.runtime.bundle.manifest import GenerationInfo
from vlmexport.runtime.grammars.grammar import of_schema
from vlmexport.runtime.grammars.matcher import compile_grammar
from vlmexport.runtime.sampling.logits_processors import Processors

from benchmarks.intervals import shown, with_interval
from benchmarks.machine import save

THREADS = 2
CHAIN = 8


def record(**properties: Any) -> dict[str, Any]:
    """The JSON schema of an object with exactly these."""
    return {
        "type": "object",
        "properties": properties,
        "required": [*properties],
        "additionalProperties": False,
    }


NUMBER, INTEGER, FLAG = {"type": "number"}, {"type": "integer"}, {"type": "boolean"}
SCHEMAS = {
    "grasp": record(
        object={"type": "string", "maxLength": 24},
        graspable=FLAG,
        position=record(x=NUMBER, y=NUMBER, z=NUMBER),
        confidence=NUMBER,
        next_action={"enum": ["pick", "place", "push", "look around", "stop"]},
    ),
    "boxes": record(
        detections={
            "type": "array",
            "minItems": 1,
            "maxItems": 3,
            "items": record(
                label={"type": "string", "maxLength": 24},
                bbox_2d={"type": "array", "items": INTEGER, "minItems": 4, "maxItems": 4},
            ),
        }
    ),
    "hazard": record(
        hazard_detected=FLAG,
        hazard_category={"enum": ["none", "person in workspace", "spill", "obstacle"]},
        stop_required=FLAG,
        explanation={"type": "string", "maxLength": 80},
    ),
}
ASKED = {
    "grasp": "A {0} {1} stands {2} cm ahead and {3} cm to the right, {4} cm high. Describe as JSON how to grasp it.",
    "boxes": "A {0} {1} at {2}, {3}, {5}, {6} and a person at {4}, {3}, {6}, {5}. List the detections as JSON.",
    "hazard": "A {0} {1} lies {2} cm from the arm, and a hand reaches in from {3} cm. Report the hazard as JSON.",
}
COLOURS = ("red", "blue", "steel", "wooden", "yellow")
THINGS = ("mug", "screwdriver", "bottle", "cable drum", "battery", "knife")
ARMS: dict[str, dict[str, Any]] = {
    "plain": {"draft": "none"},
    "grammar": {"draft": "grammar"},
    "default": {},
}


def question(kind: str, number: int) -> str:
    """The scene of this number, in words."""
    rng = random.Random(f"{kind} {number}")
    numbers = [rng.randrange(5, 400) for _ in range(5)]
    return ASKED[kind].format(rng.choice(COLOURS), rng.choice(THINGS), *numbers)


def compare(session: Session, kind: str, questions: int, rounds: int, most: int) -> dict[str, Any]:
    """The arms over all questions of a schema."""
    shuffle, ratios = random.Random(0), {name: [] for name in ARMS}
    passes, tokens, changed, cut, names = dict.fromkeys(ARMS, 0), 0, 0, 0, {}
    answers: list[list[int]] = []
    for number in range(questions):
        for _ in range(rounds):
            found = {}
            for name in shuffle.sample([*ARMS], len(ARMS)):
                found[name] = session.generate(
                    prompt=question(kind, number), schema=SCHEMAS[kind], max_new_tokens=most, **ARMS[name]
                )
                names[name] = found[name].stats.draft
            plain = found["plain"]
            changed += any(each.tokens != plain.tokens for each in found.values())
            cut += plain.finish_reason != "eos"
            tokens += len(plain.tokens)
            for name, each in found.items():
                ratios[name].append(plain.stats.decode_seconds / each.stats.decode_seconds)
                passes[name] += each.stats.cycles + 1
        answers.append(plain.tokens)
    return {
        "questions": questions,
        "tokens": tokens,
        "answers_with_a_changed_token": changed,
        "answers_cut_at_the_limit": cut,
        "mask_microseconds": mask_costs(session, kind, answers),
        "arms": {
            name: {
                "draft": names[name],
                "times_plain": with_interval(ratios[name]),
                "tokens_per_pass": round(tokens / passes[name], 2),
            }
            for name in ARMS
        },
    }


def mask_costs(session: Session, kind: str, answers: list[list[int]]) -> dict[str, float]:
    """Microseconds for one position, along answers."""
    manifest, taken = session.bundle.manifest, []
    logits = np.random.default_rng(0).standard_normal(manifest.text.vocab_size).astype(np.float32)
    for tokens in answers:
        matcher = compile_grammar(session.bundle, of_schema("schema", SCHEMAS[kind]))
        processors = Processors.from_info(GenerationInfo(), manifest.text.eos_token_ids, (), matcher)
        assert processors is not None
        for first in range(0, len(tokens), CHAIN):
            chain = tokens[first : first + CHAIN]
            for at in range(len(chain)):
                begin = time.perf_counter()
                processors.apply(logits, chain[:at])
                taken.append(1e6 * (time.perf_counter() - begin))
            processors.extend(chain)
    return {
        "vocabulary": manifest.text.vocab_size,
        "median": round(float(np.median(taken)), 1),
        "99th_percentile": round(float(np.percentile(taken, 99)), 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("bundle")
    parser.add_argument("--questions", type=int, default=8, help="of each schema")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--new-tokens", type=int, default=200)
    parser.add_argument("--no-save", action="store_true", help="print only")
    options = parser.parse_args()
    rows: dict[str, Any] = {}
    with Session.load(options.bundle, threads=THREADS, max_length=512) as session:
        session.generate(prompt="hello", schema=SCHEMAS["hazard"], max_new_tokens=8)  # warm-up
        for kind in SCHEMAS:
            rows[kind] = compare(session, kind, options.questions, options.rounds, options.new_tokens)
            for name, row in rows[kind]["arms"].items():
                print(
                    f"{kind:8} {name:8} {row['draft']!s:22} {shown(row['times_plain'], '.2f')} ×, "
                    f"tokens a pass {row['tokens_per_pass']}",
                    flush=True,
                )
            print({key: value for key, value in rows[kind].items() if key != "arms"}, flush=True)
        model = session.bundle.manifest.model.source
    if not options.no_save:
        result = {"script": "benchmarks/grammars.py", "model": model, "threads": THREADS, "schemas": rows}
        print(save("grammars", result, "onnxruntime"))


if __name__ == "__main__":
    main()
