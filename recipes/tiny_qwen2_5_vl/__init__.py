"""Recipe of ``tiny-qwen2.5-vl``: a tower that learns what lies where, then a decoder over pictures, pairs of them and films."""
