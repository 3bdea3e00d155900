"""This machine, and the devices that bundles are planned for."""
