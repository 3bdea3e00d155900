"""Grammars: what an answer may be, as masks over the vocabulary. llguidance reads them (the extra [grammar])."""
