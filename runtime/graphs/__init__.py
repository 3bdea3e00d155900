"""Roles of graphs: what each takes and gives, when it runs, and who declares it."""
