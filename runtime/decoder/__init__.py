"""Passes of the model over bound buffers: masks, key/value arena, encoder, token trees."""
