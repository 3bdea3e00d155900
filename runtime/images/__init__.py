"""Images in: reading and checking (`load`), preprocessing without torch (`processors/`)."""
