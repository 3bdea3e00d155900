"""Pages of the reference that are made from the code when the site is built (`make docs`)."""
