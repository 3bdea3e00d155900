"""The picture of docs/how-to/serve.md: the page of a server after an answer.

    vlmexport build --model tiny-blip2-flant5 -o bundle
    python -m docs.screenshot bundle docs/images/serve-page.png

It needs Chromium and the package `playwright`. The bundle's own example is asked about several times, and the last answer is
shown: the first one finds the server cold.
"""

from __future__ import annotations

import argparse
import io
from pathlib import Path

from PIL import Image
from playwright.sync_api import expect

from tests.support.browser import driven_browser
from tests.support.running_server import RunningServer

WIDTH, COLOURS, ASKED = 900, 256, 4
"""CSS pixels; colours of a small file; answers."""


def shoot(bundle: Path, out: Path) -> None:
    """Write a PNG of the page."""
    with RunningServer(bundle) as server, driven_browser() as browser:
        page = browser.new_page(viewport={"width": WIDTH, "height": 400}, color_scheme="light")
        page.goto(server.url)
        page.set_input_files("#file", bundle / "example.png")
        expect(page.locator("#picture")).to_be_visible()
        for _ in range(ASKED):
            page.click("#ask")
            expect(page.locator("#status")).to_have_text("Done.")
        image = Image.open(io.BytesIO(page.screenshot(full_page=True))).convert("RGB")
    image.quantize(COLOURS, dither=Image.Dither.NONE).save(out, optimize=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("bundle", type=Path)
    parser.add_argument("out", type=Path)
    arguments = parser.parse_args()
    shoot(arguments.bundle, arguments.out)


if __name__ == "__main__":
    main()
