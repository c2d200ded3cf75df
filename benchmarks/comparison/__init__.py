"""Problems x methods x seeds, every run in a process of its own."""
