"""All of `calibrate`: which draft pays on this device."""
