"""The `mask` graph: which cache slots the tokens of a pass see, computed where the pass runs.

A device that makes its masks itself needs no new ones from the host between the steps of a cycle: what changes from
step to step are a few integers. Engines in host memory do without this graph.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from ...runtime.bundle.decoder_info import DecoderInfo
from ...runtime.graphs.values import CONV_SLOTS, MASKS, attention_masks, conv_slots, positions_shape
from .composer import Composer
from .weights import WeightStore


def build_mask(store: WeightStore, decoder: DecoderInfo) -> ir.Model:
    """Rows [batch, width] behind `start` valid slots, of chains or trees whose nodes take the next `span` ones.

    Row i sees every slot before `start`, and the one of node j where `ancestors` [i, j]. With a relative bias the value
    of a visible slot is the row of `distance_bias` with the number of their distance, that of a hidden one its last row.
    Without, the mask is boolean. Layers with sliding attention have a mask of their own, of those slots that are less than
    the window away: a node by its depth. Convolutions get the slots of the tokens before a row on its way, −1 before the
    sequence. A pass over a whole tree has `span` = width.
    """
    graph = Composer("mask", store, "mask")

    def ints(*values: int) -> ir.Value:
        return graph.constant(np.array(values, np.int64))

    def last_of(value: ir.Value, axis: int) -> ir.Value:
        """The size of an axis less one, [1], as a number that a device computes with.

        ONNX Runtime keeps what `Shape` gives, and what is computed from that, on the CPU, and captures no graph that copies
        such a number to the device. `Range` takes its ends from the CPU and writes to the device.
        """
        return graph.node("Gather", [numbers_of(value, axis), ints(-1)], axis=0)

    def numbers_of(value: ir.Value, axis: int) -> ir.Value:
        """0, 1, … for all of an axis, on the device."""
        size = graph.node("Squeeze", [graph.node("Shape", [value], start=axis, end=axis + 1), ints(0)])
        zero, one = (graph.constant(np.array(number, np.int64)) for number in (0, 1))
        return graph.node("Range", [zero, size, one])

    def slots_before(kernel: int, slot_depths: ir.Value) -> ir.Value:
        """The slots of the kernel − 1 tokens before each row on its way, [batch, width, kernel − 1]."""
        shape, after = graph.node("Shape", [ancestors]), graph.node("Add", [last, ints(1)])
        room = graph.node("Add", [graph.node("Shape", [ancestors], start=2, end=3), ints(1)])
        # Of every row the node of each depth on its way; what is not on its way is noted behind all depths.
        deep = graph.node("Where", [ancestors, graph.node("Unsqueeze", [slot_depths, ints(1)]), after])
        nodes = graph.node("Expand", [numbers_of(ancestors, 2), shape])
        whole = graph.node("Concat", [graph.node("Shape", [depths]), room], axis=0)
        way = graph.node(
            "ScatterElements", [graph.node("Expand", [ints(0), whole]), deep, nodes], "way", axis=2
        )
        back = graph.constant(np.arange(kernel - 1, 0, -1, dtype=np.int64))
        wanted = graph.node("Sub", [graph.node("Unsqueeze", [depths, ints(2)]), back], "wanted_depths")
        taken = graph.node("GatherElements", [way, graph.node("Max", [wanted, ints(0)])], axis=2)
        taken = graph.node("Where", [graph.node("Less", [wanted, ints(0)]), wanted, taken])
        first = graph.node("Unsqueeze", [start, ints(1, 2)])
        return graph.node("Max", [graph.node("Add", [first, taken]), ints(-1)], CONV_SLOTS)

    def distance_of(slot_depths: ir.Value) -> ir.Value:
        """How far every slot's token is before each row, [batch, width, cache]."""
        taken = graph.node("GatherElements", [slot_depths, inside], axis=1)
        key = graph.node("Where", [before, number, taken])
        return graph.node(
            "Sub", [graph.node("Unsqueeze", [depths, ints(2)]), graph.node("Unsqueeze", [key, ints(1)])]
        )

    start, depths = graph.input("start"), graph.input("depths")
    ancestors, slots = graph.input("ancestors"), graph.input("slots")
    # Every slot by the number of its node: negative ones come before the first.
    number = graph.node(
        "Sub", [graph.node("Unsqueeze", [slots, ints(0)]), graph.node("Unsqueeze", [start, ints(1)])]
    )
    last = last_of(ancestors, 2)
    inside = graph.node("Min", [graph.node("Max", [number, ints(0)]), last], "inside")
    shape = graph.node("Concat", [graph.node("Shape", [depths]), graph.node("Shape", [slots])], axis=0)
    by_row = graph.node("Expand", [graph.node("Unsqueeze", [inside, ints(1)]), shape])
    related = graph.node("GatherElements", [ancestors, by_row], axis=2)
    own = graph.node("Less", [number, graph.node("Add", [last, ints(1)])])
    before = graph.node("Less", [number, ints(0)])
    related = graph.node("And", [related, graph.node("Unsqueeze", [own, ints(1)])])
    visible = graph.node("Or", [related, graph.node("Unsqueeze", [before, ints(1)])], "visible")
    bias = graph.input("distance_bias") if graph.takes("distance_bias") else None
    slot_depths = graph.input("slot_depths") if graph.takes("slot_depths") else None
    if bias is None:
        seen = {MASKS["full_attention"]: visible}
        if decoder.sliding_window is not None:
            assert slot_depths is not None
            distance = distance_of(slot_depths)
            near = graph.node("Less", [distance, ints(decoder.sliding_window)], "near")
            seen[MASKS["sliding_attention"]] = graph.node("And", [visible, near], "in_window")
        for name in attention_masks(decoder, range(decoder.num_layers)):
            graph.output(name, graph.node("Unsqueeze", [seen[name], ints(1)]))
    else:
        assert slot_depths is not None
        hidden = last_of(bias, 0)
        distance = distance_of(slot_depths)
        farthest = graph.node("Sub", [hidden, ints(1)])
        distance = graph.node("Min", [graph.node("Max", [distance, ints(0)]), farthest])
        values = graph.node("Gather", [bias, graph.node("Where", [visible, distance, hidden])], axis=0)
        graph.output("attn_mask", graph.node("Transpose", [values], perm=[0, 3, 1, 2]))
    if conv_slots(decoder, range(decoder.num_layers)):
        assert slot_depths is not None and decoder.conv_kernel is not None
        graph.output(CONV_SLOTS, slots_before(decoder.conv_kernel, slot_depths))
    if positions_shape(decoder.position, 0) is not None:
        first = graph.input("first_positions")
        places = graph.node("Add", [graph.node("Unsqueeze", [first, ints(1)]), depths])
        if decoder.max_positions is not None:  # tokens that pad a pass may lie beyond a table of learned ones
            places = graph.node("Min", [places, ints(decoder.max_positions - 1)])
        if decoder.position == "mrope":
            axes = graph.node("Concat", [ints(3), graph.node("Shape", [depths])], axis=0)
            places = graph.node("Expand", [graph.node("Unsqueeze", [places, ints(0)]), axes])
        graph.output("positions", places)
    return graph.model()
