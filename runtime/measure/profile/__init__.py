"""`vlmexport profile`: times of every graph at every width, from trtexec or from the engine at hand, and what they mean.

`points` says what is timed; `commands` writes trtexec's command lines and inputs, `results` reads its files back; `local`
times the engine at hand. Both give `Timing`s, of which `report` makes one JSON object and `page` a page to look at.
"""
