"""Engines that exist only for tests, behind the same interface as the ones of the runtime."""
