"""The dense Newton solver: starts, projection, acceptance, stopping, loop."""
