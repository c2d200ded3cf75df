"""Linear operators on the flat vector, and the bridge to scipy."""
