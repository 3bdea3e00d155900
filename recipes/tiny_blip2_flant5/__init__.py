"""Recipe of ``tiny-blip2-flant5``: vision stage, then a decoder that learns sampled texts without deep supervision."""
