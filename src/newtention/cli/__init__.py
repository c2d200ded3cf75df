"""The command line: `newtention fit`, `predict`, `report`, `examples`."""
