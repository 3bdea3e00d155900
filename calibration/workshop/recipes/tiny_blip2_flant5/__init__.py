"""Recipe of ``tiny-blip2-flant5``: data, vision stage, decoder stage, evaluation."""
