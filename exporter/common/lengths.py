"""How long sequences of a bundle may be. No PyTorch is needed here."""

from __future__ import annotations

from ...runtime.common.errors import OptionError


def check_length(length: int, max_positions: int | None, needed_embeds: int) -> None:
    """OptionError for a `--max-length` beyond the positions that the model was made for (None: any), or without room for a
    picture, which takes up to `needed_embeds` (0: none)."""
    if max_positions is not None and length > max_positions:
        raise OptionError(f"--max-length {length} is beyond the model's {max_positions} positions")
    if needed_embeds and length < needed_embeds + 2:
        raise OptionError(
            f"--max-length {length} has no room for a picture of this model, which has up to {needed_embeds} rows; give at "
            f"least {needed_embeds + 2}, and more for text"
        )
