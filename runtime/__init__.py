"""Run a deployment bundle: speculative decoding without torch."""
