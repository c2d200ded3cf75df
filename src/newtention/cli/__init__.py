"""The command line: `newtention fit`, `predict`, `certify`, `report`, `examples`."""
