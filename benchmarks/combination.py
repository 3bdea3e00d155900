"""Prompt lookup first, else a trained draft: tokens per cycle of both, each alone and together, by how many tokens must have
stood before.

    vlmexport build --model tiny-blip2-flant5 -o tiny-bundle
    python -m benchmarks.combination tiny-bundle --draft medusa

Captions of held-out scenes, chains of a fixed length; counts, not times: the same on every machine.
"""

from __future__ import annotations

import argparse

from benchmarks.machine import save


def main() -> None:
    from vlmexport.calibration.data.scenes import HELDOUT, render, sample_scene
    from vlmexport.runtime import Session
    from vlmexport.runtime.drafts import create
    from vlmexport.runtime.drafts.combined import FallbackProposer
    from vlmexport.runtime.drafts.prompt_lookup.prompt_lookup import PromptLookup

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("bundle")
    parser.add_argument("--draft", default="medusa")
    parser.add_argument("--requests", type=int, default=24)
    parser.add_argument("--draft-length", type=int, default=4)
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/combination.json")
    options = parser.parse_args()
    session = Session.load(options.bundle)
    manifest = session.bundle.manifest
    name = f"prompt-lookup+{options.draft}"
    draft = manifest.choose_draft(name)
    assert draft is not None
    second = create(draft, session.decoder)._second  # type: ignore[attr-defined]
    pictures = [render(sample_scene(0, HELDOUT[number])) for number in range(options.requests)]
    plain = [session.generate(image=picture, max_new_tokens=64, draft="none").tokens for picture in pictures]
    by_arm: dict[str, dict[str, float]] = {}
    for arm, shortest in ((options.draft, 0), ("prompt-lookup", 0), *((name, n) for n in (1, 2, 3))):
        if shortest:
            first = PromptLookup(draft, session.decoder, shortest=shortest)
            session.replace_proposer(name, FallbackProposer(name, first, second))
        label = f"{arm}, {shortest} or more tokens" if shortest else arm
        cycles = accepted = 0
        for picture, wanted in zip(pictures, plain, strict=True):
            result = session.generate(
                image=picture, max_new_tokens=64, draft=arm, draft_length=options.draft_length
            )
            assert result.tokens == wanted, label
            cycles += result.stats.cycles
            accepted += result.stats.accepted
        by_arm[label] = {"tau": accepted / cycles + 1, "cycles": cycles}
        print(f"{label}: tau {by_arm[label]['tau']:.2f} over {cycles} cycles", flush=True)
    if options.save:
        print(
            save(
                "combination",
                {"model": manifest.model.source, "draft_length": options.draft_length, "found": by_arm},
            )
        )


if __name__ == "__main__":
    main()
