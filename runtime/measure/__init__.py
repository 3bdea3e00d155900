"""Measuring: benchmark, graph timings, speed model, machine."""
