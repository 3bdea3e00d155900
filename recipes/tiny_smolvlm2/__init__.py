"""Recipe of ``tiny-smolvlm2``: a SigLIP tower that sees a picture in ten tiles, then a Llama that reads the rows of all of them."""
