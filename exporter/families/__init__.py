"""Model families: how each is cut into graphs. One file per family; `registry.py` lists them."""
