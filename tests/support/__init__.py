"""What tests, campaigns and benchmarks share: models, bundles, oracles, engines without devices, mutants."""
