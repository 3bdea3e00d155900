"""Token-exactness of speculative decoding on held-out scenes (invariant 1).

For every scene the plain tokens are compared with the speculative ones, for each draft in the bundle, for a draft that
is always wrong, and for draft lengths spread over 1 … 16; then limits 1, 2 and 3. Captions end with EOS.

    vlmexport build --model tiny-blip2-flant5 --draft-layer 3 --max-width 17 -o runs/tiny
    python -m benchmarks.losslessness runs/tiny --scenes 500
"""

from __future__ import annotations

import argparse
import json
from collections import Counter

from benchmarks.machine import save


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("bundle")
    parser.add_argument("--name", default="tiny", help="of the result file")
    parser.add_argument("--scenes", type=int, default=500)
    parser.add_argument("--max-new-tokens", type=int, default=100)
    options = parser.parse_args()
    from vlmexport.calibration.data.scenes import HELDOUT, render, sample_scene
    from vlmexport.runtime import Session
    from vlmexport.runtime.drafts.adversarial import always_wrong

    session = Session.load(options.bundle)
    drafts = [draft.name for draft in session.bundle.manifest.drafts]
    longest = session.bundle.manifest.limits.max_width - 1
    total: Counter[str] = Counter()
    different: list[dict[str, object]] = []
    for index in range(options.scenes):
        image = render(sample_scene(0, HELDOUT[index]))
        plain = session.generate(image=image, max_new_tokens=options.max_new_tokens, speculative=False)
        runs = [
            (name, 1 + (index + shift) % longest, options.max_new_tokens) for shift, name in enumerate(drafts)
        ]
        runs += [(drafts[0], 5, limit) for limit in (1, 2, 3)]
        for name, length, limit in runs:
            result = session.generate(image=image, max_new_tokens=limit, draft=name, draft_length=length)
            compare(total, different, plain.tokens, result, name, length, limit, index)
        with always_wrong(session, drafts[0]):
            length = 1 + index % longest
            result = session.generate(
                image=image, max_new_tokens=options.max_new_tokens, draft=drafts[0], draft_length=length
            )
            compare(
                total, different, plain.tokens, result, "always-wrong", length, options.max_new_tokens, index
            )
    result = {
        "script": "benchmarks/losslessness.py",
        "scenes": options.scenes,
        "runs": total["runs"],
        "tokens": total["tokens"],
        "identical_runs": total["identical"],
        "finish_reasons": {k[7:]: v for k, v in total.items() if k.startswith("finish_")},
        "different": different[:20],
    }
    print(json.dumps(result, indent=1))
    print(save(f"losslessness-{options.name}", result))
    raise SystemExit(1 if different else 0)


def compare(total, different, plain, result, name, length, limit, scene) -> None:
    """Count one run and note it when its tokens are not the plain ones."""
    total["runs"] += 1
    total["tokens"] += len(result.tokens)
    total[f"finish_{result.finish_reason}"] += 1
    if list(result.tokens) == list(plain[:limit]):
        total["identical"] += 1
    else:
        at = next((i for i, (a, b) in enumerate(zip(plain, result.tokens, strict=False)) if a != b), None)
        different.append({"scene": scene, "draft": name, "draft_length": length, "limit": limit, "at": at})


if __name__ == "__main__":
    main()
