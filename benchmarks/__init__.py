"""Programs that measure: `python -m benchmarks.NAME` in the checkout's root. Figures lie in results/."""
