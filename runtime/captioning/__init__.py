"""Captions of large sets of pictures: what is read, how it is decoded, and the Parquet files that it becomes."""
