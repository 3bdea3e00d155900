"""The bundle on disk: its folder, its manifest, and what every graph must look like from outside."""
