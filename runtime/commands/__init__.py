"""Commands of the runtime, one file each: `register(app)` adds the command to a typer application."""
