"""NoCaps (Agrawal et al., arXiv 1812.08658): COCO's form, where every image also has a domain.

`nocaps_val_4500_captions.json` has `images` (id, file_name, domain: in-domain, near-domain or out-domain) and
`annotations` (image_id, caption), ten per image; `nocaps_test_image_info.json` has images alone. DOMAIN
keeps one of the three.
"""

from __future__ import annotations

from ....runtime.common.errors import OptionError
from ..reading.arguments import Arguments
from ..reading.files import read_json
from ..reading.records import Problems, Record
from .coco import load_captions

USAGE = "CAPTIONS.json,IMAGES[,DOMAIN]"
TASK = "captions"
DOMAINS = ("in-domain", "near-domain", "out-domain")


def load(arguments: Arguments, prompt: str, problems: Problems) -> list[Record]:
    """One record per picture, with all captions as references. Raises OptionError for an unknown domain, and for a
    file of another layout."""
    domain = arguments.place(2)
    if domain is not None and domain not in DOMAINS:
        raise OptionError(f"nocaps: unknown domain {domain!r:.40}; choose one of {', '.join(DOMAINS)}")
    path = arguments.path(0)
    return load_captions(
        path, read_json(path), arguments.path(1), prompt, problems,
        lambda entry: domain is None or entry.get("domain") == domain,
    )  # fmt: skip
