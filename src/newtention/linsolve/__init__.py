"""Linear algebra on the Newton system: batched, dense, factor once and solve many."""
