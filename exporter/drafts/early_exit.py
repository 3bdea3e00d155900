"""Early exit: the rows after draft layer n go straight into the target's final norm and LM head.

(Elhoushi et al., LayerSkip, arXiv 2404.16710.) It has no weights and no graph: the bundle only needs the cut at n.
"""

EARLY_EXIT = "early-exit"


def early_exit_name(layer: int) -> str:
    """Name of the draft in a manifest."""
    return f"{EARLY_EXIT}@{layer}"
