"""What a draft is trained to do: one file per kind."""
