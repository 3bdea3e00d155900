"""All of `tune`: which draft pays on this device."""
