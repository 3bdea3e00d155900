"""The `mask` graph: which cache slots the rows of a pass may see, computed where the pass runs.

A device that makes its masks itself needs no new ones from the host between the steps of a cycle: what changes from
step to step are a few integers. Engines in host memory do without this graph.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from ...runtime.bundle.interfaces import positions_shape
from ...runtime.bundle.manifest import DecoderInfo
from .compose import Composer
from .weights import WeightStore


def build_mask(store: WeightStore, decoder: DecoderInfo) -> ir.Model:
    """Rows [batch, width] behind `start` valid slots, of chains or trees whose nodes take the next `span` ones.

    Row i sees every slot before `start`, and the one of node j where `ancestors` [i, j]. With a relative bias the value
    of a visible slot is the row of `distance_bias` with the number of their distance, that of a hidden one its last row.
    Without, the mask is boolean. A pass over a whole tree has `span` = width.
    """
    graph = Composer("mask", store, "mask")

    def ints(*values: int) -> ir.Value:
        return graph.constant(np.array(values, np.int64))

    start, depths = graph.input("start"), graph.input("depths")
    ancestors, slots = graph.input("ancestors"), graph.input("slots")
    # Every slot by the number of its node: negative ones come before the first.
    number = graph.node(
        "Sub", [graph.node("Unsqueeze", [slots, ints(0)]), graph.node("Unsqueeze", [start, ints(1)])]
    )
    span = graph.node("Shape", [ancestors], start=2, end=3)
    last = graph.node("Sub", [span, ints(1)])
    inside = graph.node("Min", [graph.node("Max", [number, ints(0)]), last], "inside")
    shape = graph.node("Concat", [graph.node("Shape", [depths]), graph.node("Shape", [slots])], axis=0)
    by_row = graph.node("Expand", [graph.node("Unsqueeze", [inside, ints(1)]), shape])
    related = graph.node("GatherElements", [ancestors, by_row], axis=2)
    own = graph.node("Less", [number, span])
    before = graph.node("Less", [number, ints(0)])
    related = graph.node("And", [related, graph.node("Unsqueeze", [own, ints(1)])])
    visible = graph.node("Or", [related, graph.node("Unsqueeze", [before, ints(1)])], "visible")
    if decoder.mask_dtype == "bool":
        graph.output("attn_mask", graph.node("Unsqueeze", [visible, ints(1)]))
    else:
        bias, slot_depths = graph.input("distance_bias"), graph.input("slot_depths")
        hidden = graph.node("Sub", [graph.node("Shape", [bias], start=0, end=1), ints(1)])
        taken = graph.node("GatherElements", [slot_depths, inside], axis=1)
        key = graph.node("Where", [before, number, taken])
        distance = graph.node(
            "Sub", [graph.node("Unsqueeze", [depths, ints(2)]), graph.node("Unsqueeze", [key, ints(1)])]
        )
        farthest = graph.node("Sub", [hidden, ints(1)])
        distance = graph.node("Min", [graph.node("Max", [distance, ints(0)]), farthest])
        values = graph.node("Gather", [bias, graph.node("Where", [visible, distance, hidden])], axis=0)
        graph.output("attn_mask", graph.node("Transpose", [values], perm=[0, 3, 1, 2]))
    if positions_shape(decoder.position, 0) is not None:
        first = graph.input("first_positions")
        places = graph.node("Add", [graph.node("Unsqueeze", [first, ints(1)]), depths])
        if decoder.max_positions is not None:  # rows that pad a pass may lie beyond a table of learned ones
            places = graph.node("Min", [places, ints(decoder.max_positions - 1)])
        if decoder.position == "mrope":
            axes = graph.node("Concat", [ints(3), graph.node("Shape", [depths])], axis=0)
            places = graph.node("Expand", [graph.node("Unsqueeze", [places, ints(0)]), axes])
        graph.output("positions", places)
    return graph.model()
