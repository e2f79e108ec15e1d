"""One module per lane: its candidates, gate list and measurements."""
