"""Which frames of a video a model sees, and how large. One file per way of sampling."""
