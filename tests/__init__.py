"""Tests, and programs that test: run from the checkout's root, where `tests` is a package."""
