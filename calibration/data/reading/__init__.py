"""How documents and tables of any data set become records."""
