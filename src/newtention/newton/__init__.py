"""The dense Newton solver: starts, projection, steps, acceptance, stopping, loop."""
